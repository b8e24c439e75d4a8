"""What is learned: models, their clipped gradient sums, and how good they are.

Importing this package loads nothing, so that a device which only needs the numpy twin pays only
for numpy. Take what you need from its files:

- `models`: svm, softmax, mlp, cnn, your own: frozen values with `init`, `apply`, `loss`, `predict`
- `clipping`: `clipped_sum`, the weighted sum of per-sample gradients, each cut to norm C (JAX)
- `reference`: the same for svm and mlp in float64 numpy, without JAX
- `evaluate`: mean loss and accuracy (JAX)
- `chunks`: rows in pieces of fixed size, so that memory does not grow with the data
"""
