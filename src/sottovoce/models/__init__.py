"""What is learned: models, their clipped gradient sums, and how good they are.

One file per model (`svm`, `softmax`, `mlp`, `cnn`) holds its parameters, loss, clipped sum and
per-sample gradient; `base` the protocol that they follow and the registry that finds them; `custom`
and `torch_model` bring a user's own model behind the same protocol; `clipping` compiles sums over
many samples; `features` are computed of one sample first. Importing the package loads nothing, and
only `clipping` and `torch_model` import JAX or torch: a device that needs numpy pays for numpy.
"""
