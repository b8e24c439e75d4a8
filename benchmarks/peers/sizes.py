"""How many rows each peer takes at once: what was tried, and what is used.

`side_by_side.py --tune` measures what was tried into results/bench/tuning.json; a test holds what
is used to be the fastest there. The standard library only: every peer's environment reads this.
"""

from __future__ import annotations

import os

VARIABLE = "BENCH_SIZE"  # the harness tries a size by it

#: By peer and model. jax-privacy has a second choice: a row as a batch of one (as it comes) or as a
#: vector.
TRIED: dict[str, dict[str, tuple[str, ...]]] = {
    "opacus-ghost": {
        "mlp": ("400", "800", "3200", "40000"),
        "cnn": ("20", "80", "400", "4000"),
        "svm": ("600", "3000", "30000"),
    },
    "opacus-hooks": {
        "mlp": ("8", "32", "128"),
        "cnn": ("10", "40", "80"),
        "svm": ("600", "3000", "30000"),
    },
    "torch-func": {
        "mlp": ("8", "32", "128"),
        "cnn": ("10", "40", "80"),
        "svm": ("600", "3000", "30000"),
    },
    "jax-privacy": {
        "mlp": ("1", "1 as vector", "2", "2 as vector", "16", "16 as vector"),
        "cnn": ("1", "1 as vector", "4", "4 as vector"),
        "svm": ("1000", "10000", "30000", "30000 as vector"),
    },
    "fedjax": {
        "mlp": ("5", "20", "80"),
        "cnn": ("10", "40", "80"),
        "svm": ("100", "600"),
    },
}
USED: dict[str, dict[str, str]] = {
    "opacus-ghost": {"mlp": "3200", "cnn": "80", "svm": "30000"},
    "opacus-hooks": {"mlp": "32", "cnn": "40", "svm": "30000"},
    "torch-func": {"mlp": "32", "cnn": "80", "svm": "30000"},
    "jax-privacy": {"mlp": "1", "cnn": "1", "svm": "30000 as vector"},
    "fedjax": {"mlp": "20", "cnn": "40", "svm": "600"},
}


def chosen(peer: str, model: str) -> str:
    """The size this peer is to use for a model, or the one that the harness tries."""
    return os.environ.get(VARIABLE) or USED[peer][model]


def rows(peer: str, model: str, most: int) -> int:
    """As a number of rows, never more than there are.

    >>> rows("jax-privacy", "mlp", 100)
    1
    """
    return min(int(chosen(peer, model).split()[0]), most)
