"""A tiny audit of the embedded plan, made once a process: enough to be drawn and read."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from sottovoce.studies.audit import auditing
from sottovoce.studies.audit.auditing import Sizes, load_target
from sottovoce.studies.audit.findings import Findings

TINY = Sizes(
    runs=120, judged=120, candidates=20, shadows=6, pool=40, rounds=5, turns=2, together=2,
    groups=1, steps=40, canaries=100,
)  # fmt: skip


@lru_cache(maxsize=1)
def example() -> Findings:
    """What the tiny audit found."""
    return auditing.run_attacks(load_target(None), TINY)


def refuted() -> Findings:
    """The same as if the uploads at ε = 4 had given everything away."""
    found = example()
    first = found.measurements[0]
    told = replace(first, without=np.full(5000, -9.0), having=np.full(5000, 9.0))
    return replace(found, measurements=[told, *found.measurements[1:]])
