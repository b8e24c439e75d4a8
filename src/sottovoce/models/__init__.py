"""What is learned: models, their clipped gradient sums, and how good they are.

One file per model (`svm`, `softmax`, `mlp`, `cnn`, `least_squares`) holds its parameters, loss,
clipped sum and per-sample gradient; `base` has the protocol that they follow and the registry that
finds them; `custom` and `torch_model` bring a user's own model behind the same protocol; `clipping`
compiles sums over many samples; `features` and `network` compute features of one sample. Importing
the package loads nothing, and only `clipping`, `kernels` and `torch_model` import JAX or torch.
"""
