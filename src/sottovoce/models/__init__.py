"""What is learned: models, their clipped gradient sums, and how good they are.

`base` holds svm, softmax, mlp, cnn and your own JAX model; `clipping` their clipped sums without
per-sample gradients; `gradients` per-sample gradients in float64 for a release; `form` a model's
sizes; `features` what is computed of one sample first; `custom`, `torch_model` and `imported`
models of your own; `evaluate` loss and accuracy. Importing the package loads nothing: a device
that needs numpy alone pays for numpy alone.
"""
