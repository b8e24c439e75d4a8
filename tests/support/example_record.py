"""Records as `train` writes them, made by the real schedule and the real tanks; only the losses
are invented (a fall with jitter)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sottovoce.models import metrics
from sottovoce.privacy import gaussian
from sottovoce.privacy.budget import ALWAYS_NOT_COVERED, Budget, Guarantee
from sottovoce.privacy.calibration import capacity
from sottovoce.privacy.tank import Tank
from sottovoce.schedules.algorithms import DiscountedRounds


def example(
    *,
    clients: int = 10,
    rounds: int = 120,
    per_round: int | None = None,
    epsilon: Any = 8.0,
    calibration: Any = "exact",
    stop_after: int | None = None,
    beta: float = 0.8,
    noise: str = "simulated",
    measured: bool = False,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A record and its trace. `stop_after` interrupts the run after so many rounds; `measured` adds
    metrics, curves and results by client."""
    rng = np.random.default_rng(5)
    k = per_round or clients
    budgets = np.broadcast_to(np.asarray(epsilon, dtype=float), (clients,))
    delta, sensitivity = 1e-5, np.full(clients, 2 * 2.0 / 143)
    tank = Tank.full(capacity(budgets, delta, calibration=calibration, sampling=k / clients))
    schedule = DiscountedRounds(rounds=rounds, beta=beta)
    progress = schedule.start(2.35)
    listed, sigmas, taken = [], [], np.zeros((0, clients), dtype=bool)
    while (now := schedule.round(progress)) is not None and len(listed) != stop_after:
        asked = np.arange(clients)
        cohort = np.sort(np.roll(asked, -now.t * k)[:k])
        present = np.isin(asked, cohort)
        charged = np.ones_like(present) if calibration == "paper" else present
        if calibration == "paper":
            remaining = np.full(clients, now.horizon - now.t)
        else:
            remaining = math.ceil(k * now.horizon / clients) - tank.debits
        offer = tank.offer(sensitivity, remaining)
        charged = charged & offer.granted
        tank = tank.spend(np.where(charged, offer.units, 0))
        sigma = np.where(charged, offer.sigma, np.nan)
        loss = 0.45 + 1.9 * math.exp(-now.t / 14) + 0.02 * rng.standard_normal()
        progress = schedule.advance(progress, loss)
        listed.append(
            {
                "t": now.t,
                "horizon": now.horizon,
                "next_horizon": progress.horizon,
                "cohort": cohort.tolist(),
                "sigma": {
                    "min": float(np.nanmin(sigma)),
                    "median": float(np.nanmedian(sigma)),
                    "max": float(np.nanmax(sigma)),
                },
                "validation_loss": loss,
                "validation_accuracy": min(1.0, max(0.0, 1.02 - 0.3 * loss)),
            }
        )
        sigmas.append(sigma)
        taken = np.vstack((taken, present))
    trace = {"sigma": np.array(sigmas).reshape(len(sigmas), clients)}
    codes = ALWAYS_NOT_COVERED + (("simulated-noise",) if noise == "simulated" else ())
    holds = Budget(float(budgets.max()), delta)
    if calibration == "paper":
        codes += ("paper-calibration",)
        most = float(tank.capacity.max())  # charged in every round, nobody releases more
        holds = Budget(max(1e-6, float(gaussian.epsilon(delta, math.sqrt(most)))), delta)
    guarantee = Guarantee(holds, unit="record", calibration=calibration, not_covered=codes)
    interrupted = stop_after is not None
    privacy = {"epsilon": epsilon, "delta": delta, "calibration": calibration}
    record = {
        "schema": "sottovoce.record/1",
        "status": "interrupted" if interrupted else "finished",
        "engine": "simulation",
        "noise": noise,
        "seed": 1234 if noise == "simulated" else None,
        "plan": {
            "schema": 1,
            "noise": noise,
            "data": {"name": "digits", "clients": clients, "samples": 143, "split": "iid"},
            "model": {"name": "mlp", "hidden": 32},
            "local": {"learning_rate": 2.0, "clip": 1.0, "unit": "record", "steps": 1},
            "privacy": privacy | ({"epsilon": budgets.tolist()} if np.ndim(epsilon) else {}),
            "rounds": {
                "schedule": "discounted",
                "rounds": rounds,
                "beta": beta,
                "zeta": 0.0,
                "window": 3,
                "cohort": "balanced",
                "per_round": per_round,
            },
            "server": {"weights": "samples", "signal": "public"},
        },
        "initial": {"validation_loss": 2.35, "validation_accuracy": 0.093},
        "rounds": listed,
        "result": {
            "test_loss": 0.472,
            "test_accuracy": 0.875,
            "rounds_used": len(listed),
            "model_sha256": "0123456789abcdef" * 4,
        },
        "clients": [
            {
                "samples": 143,
                "epsilon": float(budgets[i]),
                "delta": delta,
                "sensitivity": float(sensitivity[i]),
                "participations": int(taken[:, i].sum()),
                "capacity": float(tank.capacity[i]),
                "spent": float(tank.spent_mu2[i]),
            }
            for i in range(clients)
        ],
        "guarantee": guarantee.to_json(),
        "versions": {"sottovoce": "0.1.0", "python": "3.11.2", "numpy": "2.4.6", "jax": "0.10.2"},
        "timing": {
            "started": "2025-01-31T09:15:00Z",
            "seconds": 6.42,
            "seconds_per_round": 6.42 / len(listed) if listed else None,
        },
    }
    if measured:
        record["result"] |= _measure(rng)
    return record, trace


def _measure(rng: np.random.Generator) -> dict[str, Any]:
    labels = (rng.random(600) < 0.1).astype(int)
    scores = np.stack([np.zeros(600), rng.normal(size=600) + labels - 2], axis=1)
    found = metrics.measure_classes(labels, scores.argmax(axis=1), scores)
    entries = {name: value._asdict() for name, value in found.items()}
    entries["calibration_error"]["error"] = None
    text = metrics.describe_headline(
        "auroc", found["auroc"], rows=600, most_frequent="no", only=None
    )
    served = {"client": 0, "name": "a site with a name of several words", "rows": 60}
    return {
        "headline": {"metric": "auroc", "is_better": True, "text": text} | entries["auroc"],
        "metrics": entries,
        "calibration": {"temperature": 1.2, "bias": [0.1, -0.1], "rows": 200},
        "curves": metrics.draw_curves(labels, scores),
        "confusion": [[530, 5], [55, 10]],
        "fairness": {
            "shown": True,
            "clients": 1,
            "accuracy": dict.fromkeys(("min", "q1", "median", "q3", "max"), 0.9),
            "by_budget": [],
            "by_client": [served | {"accuracy": 0.9} | entries["auroc"]],
        },
    }
