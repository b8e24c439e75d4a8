"""What a client makes of a round: the announced horizon and its own tank become its noise.

The server announces `Round(t, horizon, …)`; how many turns that leaves, and what each may cost, the
client works out for itself. A lying server can waste a client's budget, never exceed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from sottovoce.privacy.budget import Calibration
from sottovoce.privacy.calibration import charges_absent
from sottovoce.privacy.tank import Offer, Tank
from sottovoce.schedules.base import Round
from sottovoce.schedules.cohort import CohortKind, planned

LOSS_SHARE = 10  # one part in ten of a turn's first release pays for the loss, where it is told


@dataclass(frozen=True)
class Terms:
    """The public numbers of a federation that a client's noise depends on."""

    clients: int
    per_round: int
    cohort: CohortKind = "balanced"
    calibration: Calibration = "exact"
    releases: int = 1  # of one participation

    def planned(self, rounds: int) -> int:
        """Releases a client should plan for in a run of so many rounds.

        >>> Terms(clients=50, per_round=30).planned(200)
        120
        """
        turns = planned(
            self.cohort,
            rounds=rounds,
            clients=self.clients,
            per_round=self.per_round,
            charges_absent=charges_absent(self.calibration),
        )
        return turns * self.releases


def offer(tank: Tank, turn: Round, terms: Terms, sensitivity: ArrayLike) -> Offer:
    """The price of this round's next release for each client, declined where the tank is too low.

    r = planned(T) − debits releases are to come, this one included: σ = Δ·√(r/left). A round that
    announces a scale which no schedule has is priced so, too.

    >>> tank = Tank.full(capacity=2.0)
    >>> offer(tank, Round(t=0, horizon=200), Terms(50, 30), sensitivity=1.0).sigma.round(4)
    np.float64(7.746)
    """
    return offers(tank, [turn], terms, sensitivity)


def offers(tank: Tank, turns: Sequence[Round], terms: Terms, sensitivity: ArrayLike) -> Offer:
    """`offer` for several runs whose turns differ in the horizon alone; they are the first axis.

    >>> runs = Tank.stack([Tank.full([2.0]), Tank.full([2.0])])
    >>> offers(runs, [Round(0, 200), Round(0, 100)], Terms(50, 30), 1.0).sigma.round(4).tolist()
    [[7.746], [5.4772]]
    """
    scale, spread = turns[0].scale, turns[0].spread
    if any((turn.scale, turn.spread) != (scale, spread) for turn in turns):
        raise ValueError("turns of one offer differ in the horizon alone")
    if spread is None or not 1e-6 <= scale <= 1e6:
        planned = [terms.planned(turn.horizon) for turn in turns]
        each = planned[0] if len(turns) == 1 else np.array(planned)[:, None]
        return tank.offer(sensitivity, np.asarray(each - tank.debits))
    return tank.offer_scaled(sensitivity, terms.planned(spread), scale)
