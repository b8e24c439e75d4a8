"""What a rehearsal costs in privacy, and on whose word that rests.

made        drawn digits, synthetic rows: nothing
published   a data set that sottovoce knows by name, other than the plan's: nothing
said        a file or arrays: nothing, provided that they are public, which cannot be checked
own         the plan's own rows (the embedded digits): a demonstration, nothing is claimed
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sottovoce.studies.rehearsal.standin import StandIn

DEMONSTRATION = "a demonstration: these are the plan's own rows, which are public"
UNCHECKED = "you say so, sottovoce cannot check"
_NOTHING = (
    "every row that was read is public or made up, no client was asked, and no vault or budget was "
    "touched. What depends on no private row tells nothing about one."
)


@dataclass(frozen=True)
class Cost:
    """The same claim, as long as it is told: in a tile, a sentence, a paragraph."""

    mu2: float | None  # None: not counted
    provided: str | None  # what the claim rests on
    tile: str
    short: str  # ends a headline
    told: str
    why: str
    when: str  # how the plan's first comment ends

    def to_json(self) -> dict[str, Any]:
        """As it stands in rehearsal.json."""
        return {"mu2": self.mu2, "provided": self.provided, "why": self.why}


def cost_of(rows: StandIn) -> Cost:
    """What a rehearsal on these rows may claim.

    >>> pair = ([[0.0]], [0])
    >>> rows = StandIn("public", "", "", pair, pair, pair, (1,), 2, origin="said", name="a.csv")
    >>> cost_of(rows).told
    'none, provided that a.csv is public: you say so, sottovoce cannot check'
    """
    if rows.origin == "own":
        return Cost(
            mu2=None,
            provided=None,
            tile="not counted",
            short="a demonstration on the plan's own rows",
            told=f"not counted, {DEMONSTRATION}",
            why=f"Not counted, {DEMONSTRATION}. With your own data, other rows stand in.",
            when="chosen on the plan's own rows",
        )
    if rows.origin == "said":
        name = rows.name
        return Cost(
            mu2=0.0,
            provided=f"{name} is public",
            tile="0, if public",
            short=f"no privacy spent if {name} is public",
            told=f"none, provided that {name} is public: {UNCHECKED}",
            why=f"None, provided that {name} is public: {UNCHECKED}. No client was asked, and no "
            "vault or budget was touched; but rows of a client would have been used unpaid.",
            when="chosen on a stand-in",
        )
    return Cost(
        mu2=0.0,
        provided=None,
        tile="0",
        short="no privacy spent",
        told="none; no private row was read",
        why=f"Nothing: {_NOTHING}",
        when="chosen on a stand-in, before any private row was touched",
    )
