"""What a message says of a model: its name and sizes, and so the arrays it must have. No JAX."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sottovoce.errors import InputError, Malformed
from sottovoce.models import features
from sottovoce.models.features import Hog

KERNEL = 5
GROWTH = 4  # a picture's sides grow so much in the cnn: 2 · padding − kernel + 1
_OPTIONS: dict[str, tuple[str, ...]] = {
    "svm": ("kappa",),
    "softmax": (),
    "mlp": ("hidden",),
    "cnn": ("channels",),
    "own": (),
}
_SEEN = {"features": "name", "cell": "cell", "upright": "upright", "colours": "colours"}
_LARGEST = 1 << 30

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Form:
    """A model as the server names it; `own` is the client's own code, named in its node file.

    >>> Form("mlp", (8, 8, 1), 10, hidden=32).shapes()
    {'b1': (32,), 'b2': (10,), 'w1': (64, 32), 'w2': (32, 10)}
    """

    name: str
    shape: tuple[int, ...]
    classes: int
    hidden: int = 0
    channels: int = 0
    kappa: float = 0.0
    seen: Hog | None = None  # the features that the client makes of its samples before the model

    @property
    def numbers(self) -> int:
        """How many numbers a sample of the client has."""
        return math.prod(self.shape)

    @property
    def features(self) -> int:
        """How many numbers the model takes."""
        return self.numbers if self.seen is None else self.seen.width

    def shapes(self) -> Shapes:
        """Names and shapes of the parameters, sorted by name, as in `models.base`."""
        f, c = self.features, self.classes
        if self.name == "svm":
            return {"b": (), "w": (f,)}
        if self.name == "softmax":
            return {"b": (c,), "w": (f, c)}
        if self.name == "mlp":
            h = self.hidden
            return {"b1": (h,), "b2": (c,), "w1": (f, h), "w2": (h, c)}
        height, width, colours = self.shape
        flat = self.channels * (height + GROWTH) * (width + GROWTH)
        kernel = (KERNEL, KERNEL, colours, self.channels)
        return {"b": (c,), "bias": (self.channels,), "kernel": kernel, "w": (flat, c)}

    def to_json(self) -> dict[str, Any]:
        """As it stands in a message.

        >>> Form.from_json(Form("svm", (3,), 2, kappa=0.01).to_json())
        Form(name='svm', shape=(3,), classes=2, hidden=0, channels=0, kappa=0.01, seen=None)
        """
        options = {name: getattr(self, name) for name in _OPTIONS[self.name]}
        if self.seen is not None:
            options |= {key: getattr(self.seen, own) for key, own in _SEEN.items()}
        return {
            "name": self.name,
            "shape": list(self.shape),
            "classes": self.classes,
            **options,
        }

    @classmethod
    def from_json(cls, values: Any) -> Form:
        """Read from a message; anything that is not a form is `Malformed`."""
        name = values.get("name") if isinstance(values, Mapping) else None
        if not isinstance(name, str) or name not in _OPTIONS:
            raise Malformed(f"the message's model is not one of {', '.join(_OPTIONS)}")
        keys = {"name", "shape", "classes", *_OPTIONS[name]}
        if values.keys() not in (keys, keys | _SEEN.keys()):
            raise Malformed(f"the message's model {name} has not the keys of one")
        shape, sizes = values["shape"], [values["classes"]]
        if not isinstance(shape, list) or not 1 <= len(shape) <= 4:
            raise Malformed("the message's model has no shape of a sample")
        sizes += [*shape, *(values[key] for key in ("hidden", "channels") if key in values)]
        if not all(type(size) is int and 1 <= size <= _LARGEST for size in sizes):
            raise Malformed("the message's model has a size that is no whole number from 1 to 2³⁰")
        if math.prod(shape) > _LARGEST or values["classes"] < 2:
            raise Malformed("the message's model has samples too large or fewer than two classes")
        if (name == "svm" and values["classes"] != 2) or (name == "cnn" and len(shape) != 3):
            raise Malformed(f"the message's model {name} does not fit its samples")
        kappa = values.get("kappa", 0.0)
        if type(kappa) not in (int, float) or not 0 <= kappa <= 1e6:
            raise Malformed("the message's kappa is no number from 0 to 1e6")
        options = {key: values[key] for key in _OPTIONS[name]}
        return cls(name, tuple(shape), values["classes"], **options, seen=_seen(values))


def _seen(values: Mapping[str, Any]) -> Hog | None:
    if "features" not in values:
        return None
    name, shape, cell = values["features"], tuple(values["shape"]), values["cell"]
    fits, flags = isinstance(name, str) and values["name"] != "cnn", ("upright", "colours")
    if not fits or type(cell) is not int or any(type(values[f]) is not bool for f in flags):
        raise Malformed("the message's features are none that its model takes")
    try:
        lens = features.build(name, shape, cell, *(values[flag] for flag in flags))
    except InputError as error:
        raise Malformed(f"the message's {error}") from None
    if lens is None or lens.shape != shape or lens.width > _LARGEST:
        raise Malformed("the message's features are not those of a picture")
    return lens
