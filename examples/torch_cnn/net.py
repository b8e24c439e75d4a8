"""A small PyTorch CNN for the 8×8 digits, as a client's own model. No batch normalisation."""

from torch import nn

from sottovoce.models.torch_model import TorchModel


def make() -> nn.Module:
    """Two convolutions, then a linear layer."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


model = TorchModel(make)
