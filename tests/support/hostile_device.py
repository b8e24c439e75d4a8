"""What a hostile client says in place of what its device said: greetings and answers.

    SOTTOVOCE_HOSTILE=MODE python -m sottovoce.flower.worker … --app support.hostile_device:app

is a worker whose node has rows, a key and a vault as every other, and which replies by the mode.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from sottovoce.client import messages
from sottovoce.client.messages import Request
from sottovoce.flower import client_app
from support.devices import opened, written


def changed(blob, arrays=lambda a: a, **head):
    """An honest upload with other arrays or another head, sealed again."""
    said, own = messages.unpack(blob)
    budget = {**said["budget"], **head.pop("budget", {})}
    return messages.pack({**said, "budget": budget, **head}, arrays(own))


def every(number):
    return lambda arrays: {k: np.full_like(v, number) for k, v in arrays.items()}


WAYS = {
    "nothing at all": lambda asked, told: b"",
    "a text": lambda asked, told: "upload",
    "the request": lambda asked, told: asked,
    "half": lambda asked, told: told[: len(told) // 2],
    "ten million bytes": lambda asked, told: told + b"\0" * 10**7,
    "no numbers": lambda asked, told: changed(told, every(np.nan)),
    "infinities": lambda asked, told: changed(told, every(-np.inf)),
    "large numbers": lambda asked, told: changed(told, every(1e38)),
    "one number for all": lambda asked, told: changed(
        told, lambda a: {k: v.reshape(-1)[:1] for k, v in a.items()}
    ),
    "another round": lambda asked, told: changed(told, t=1000),
    "huge σ": lambda asked, told: changed(told, every(1e30), sigma=[1e30]),
    "no σ": lambda asked, told: changed(told, sigma=[0.0]),
    "free of charge": lambda asked, told: changed(told, budget={"spent": 0.0}),
    "beyond floats": lambda asked, told: changed(told, sigma=[10**400]),
    "spent beyond floats": lambda asked, told: changed(told, budget={"spent": 10**400}),
    "samples for weight": lambda asked, told: changed(told, samples=2**32),
    "a refusal of its own making": lambda asked, told: messages.pack(
        {"schema": messages.ANSWER, "kind": "refusal", "code": ["\x1b"], "text": 7}
    ),
    "silence": lambda asked, told: None,
    **{
        f"a refusal: {code}": lambda asked, told, code=code: messages.make_refusal(code, "\x1b[2J")
        for code in messages.CODES
    },
}


def greeting(blob, key, value):
    text, _ = opened(blob)
    *way, last = key.split(".")
    place = text["head"]
    for step in way:
        place = place[step]
    place[last] = value
    return written(text)


def claim_samples(samples):
    """How to greet with another number of samples, and repeat it in every upload."""

    def hello(told):
        return greeting(told, "policy.samples", samples)

    def answer(asked, told):
        said, own = messages.unpack(told)
        sigma = [s * said["samples"] / samples for s in said["sigma"]]  # the same σ/Δ
        start = Request.from_blob(asked).params
        far = {k: w + (own[k] - w) * np.float32(said["samples"] / samples)
               for k, w in start.items()}  # fmt: skip
        return messages.pack({**said, "samples": samples, "sigma": sigma}, far)

    return hello, answer


def every_way(asked, told):
    """Another of the `WAYS` in every round; what is no bytes is silence."""
    said = list(WAYS.values())[Request.from_blob(asked).round.t % len(WAYS)](asked, told)
    if not isinstance(said, bytes):
        raise TypeError("nothing to send")
    return said


def as_they_are(told):
    return told


#: Mode → what becomes of a greeting, and of an answer to a request.
LIES = {
    "every way": (as_they_are, every_way),
    "more samples": claim_samples(10**6),
    # The file has the greeting of another client: whoever knows its vault's id could write it.
    "thief": (lambda told: Path("/srv/stolen").read_bytes(), lambda asked, told: told),
}


class Lying(client_app.Installed):
    """The installed device, and what this client makes of its words."""

    def hello(self, node):
        told = super().hello(node)
        return LIES[os.environ["SOTTOVOCE_HOSTILE"]][0](told)

    def answer(self, request, node):
        told = super().answer(request, node)
        return LIES[os.environ["SOTTOVOCE_HOSTILE"]][1](request, told)


app = client_app.build_app(Lying())
