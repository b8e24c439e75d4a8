"""The guarantee card: what holds, in figures and in words; what does not; fuel and attacker."""

from __future__ import annotations

import numpy as np

from sottovoce.privacy import gaussian
from sottovoce.privacy.budget import LEAKS, NOT_COVERED, THIS_RUN_ONLY, TRAINING_ONLY, raised
from sottovoce.reports.run import Run
from sottovoce.reports.text import ceiling, count, escape, number, percent

_UNITS = {"record": "one record of a client’s data", "client": "a client’s whole dataset"}
_ADJACENCIES = {"replace-one": "replace-one: the unit is replaced by any other"}
_ADVERSARIES = {"server": "the server, which sees every upload and knows who sent it"}
_CALIBRATIONS = {
    "exact": "exact (Gaussian differential privacy)",
    "zcdp": "zcdp (zero-concentrated differential privacy)",
    "paper": "paper (Theorem 1, which can add too little noise)",
}


def card(run: Run, mu: float) -> str:
    """The card as one section. `mu` is the attacker's, `Run.attacker_mu`."""
    unit = _UNITS.get(run.unit, run.unit)
    if {*TRAINING_ONLY} & {*run.not_covered}:
        unit = unit.replace("data", "training data")
    facts = [
        ("ε", "privacy loss", ceiling(run.epsilon)),
        ("δ", "added to every probability at most", ceiling(run.delta)),
        ("Unit", "", unit),
        ("Adjacency", "", _ADJACENCIES.get(run.adjacency, run.adjacency)),
        ("Adversary", "", _ADVERSARIES.get(run.adversary, run.adversary)),
        ("Calibration", "", _CALIBRATIONS.get(run.calibration, run.calibration)),
    ]
    rows = "".join(
        f"<div><dt>{name}{f' <small>{escape(hint)}</small>' if hint else ''}</dt>"
        f"<dd>{escape(shown)}</dd></div>"
        for name, hint, shown in facts
    )
    # The list below says it again, one to a line.
    paragraph = run.text.partition(" Not covered: ")[0]
    uncovered = "".join(f"<li>{escape(NOT_COVERED.get(c, c))}</li>" for c in run.not_covered)
    others = tighter(run)
    whose = (
        "<p>For the client with the loosest budget; "
        f"{count(others, 'client')} {'has a tighter one' if others == 1 else 'have tighter ones'} "
        "(see “By budget”).</p>"
        if others
        else ""
    )
    return f"""
<section class="card" aria-labelledby="guarantee">
<h2 id="guarantee">The guarantee</h2>
{_asked(run)}{_leaks(run)}{whose}
<div class="columns">
<div>
<dl class="facts">{rows}</dl>
<p>{escape(paragraph)}</p>
{_free(run)}{_rehearsed(run)}</div>
<div>
{_gauge(run)}
{_attacker(run, mu)}
<h3>Not covered</h3>
<ul>{uncovered}</ul>
</div>
</div>
</section>"""


def _free(run: Run) -> str:
    """What was done after the noise, and why the card is the same without it."""
    if run.finish is None:
        return ""
    cost = (
        "from what clients released and from the validation records, which the guarantee does not "
        "cover; for the records that were trained on it costs no privacy"
    )
    if "raw-signal" in run.not_covered:
        cost = (
            "over rounds that the clients' raw losses steered, which the guarantee does not cover"
        )
    elif "evaluation-in-unit" in run.not_covered:
        cost = (
            "from what clients released and from their own validation rows, for which nobody paid"
        )
    return (
        f"<p>After the noise, on the server: {escape(run.finish)}. That is computed {cost}.</p>\n"
    )


def _rehearsed(run: Run) -> str:
    """How the settings were chosen: a word of the plan, which no run can check."""
    told = run.plan.get("rehearsed")
    if told is None:
        return ""
    return f"<p>Settings were chosen, as the plan says: {escape(told)}.</p>\n"


def tighter(run: Run) -> int:
    """How many clients have another budget than the loosest, whose (ε, δ) stands on the card."""
    own = run.clients
    if own is None or not run.disclosed:
        return 0
    loosest = (run.epsilon, run.delta)
    if run.calibration == "paper":  # what holds is not what was asked for
        most = int(np.nanargmax(own.capacity))
        loosest = (own.epsilon[most], own.delta[most])
    told = np.isfinite(own.epsilon)
    return int((told & ((own.epsilon != loosest[0]) | (own.delta != loosest[1]))).sum())


def asked(run: Run) -> float | None:
    """The largest ε that was asked for, if it is not the one that holds (`paper` only)."""
    if run.calibration != "paper":
        return None
    if run.clients is not None:
        epsilon = float(np.nanmax(run.clients.epsilon))
    else:
        wanted = run.section("privacy").get("epsilon")
        if isinstance(wanted, bool) or not isinstance(wanted, int | float):
            return None
        epsilon = float(wanted)
    return epsilon if epsilon != run.epsilon else None


def _asked(run: Run) -> str:
    wanted = asked(run)
    if wanted is None:
        return ""
    return (
        f'<p class="note">The plan asks for ε = {number(wanted)}, but with the paper’s noise '
        f"ε = {ceiling(run.epsilon)} is what holds. Choose <code>calibration = exact</code> to get "
        "what is asked for.</p>"
    )


def _leaks(run: Run) -> str:
    """A visible warning where something outside the budget left the clients."""
    codes = [code for code in LEAKS if code in run.not_covered]
    if not codes:
        return ""
    what = " and ".join(escape(NOT_COVERED[code]) for code in codes)
    return (
        f'<p class="note">The budget does not cover {what}: ε, the fuel gauge and the attacker’s '
        "view below hold only for a deployment that does not do so.</p>"
    )


def _gauge(run: Run) -> str:
    if run.clients is None or not run.disclosed:
        return ""
    used = float(np.nanmax(run.clients.used))
    if run.calibration == "paper":
        meaning = (
            "It is counted by the paper’s formula, so neither the gauge nor the ε of the plan is "
            "the guarantee: the ε on this card is."
        )
    else:
        meaning = (
            "The guarantee is the cap, not the gauge: a run that stops early still promises the "
            "ε on this card, not less."
        )
    return f"""<h3>Fuel gauge</h3>
<div class="gauge" role="img" aria-label="{percent(used)} of the fuel is spent">\
<span style="width:{100 * used:.2f}%"></span></div>
<p><strong>{percent(used)}</strong> spent by the client that used most of its tank. {meaning}</p>"""


def _attacker(run: Run, mu: float) -> str:
    if not run.disclosed:
        return ""
    thing = "dataset" if run.unit == "client" else "record"
    of = (
        " of a client that discloses its budget" if "undisclosed-budgets" in run.not_covered else ""
    )
    found, area = raised(float(gaussian.tpr(0.01, mu)), 3), raised(float(gaussian.auc(mu)), 3)
    drawn = ", with noise drawn securely" if "simulated-noise" in run.not_covered else ""
    seen = "the messages of this run" if {*THIS_RUN_ONLY} & {*run.not_covered} else "all messages"
    return f"""<h3>The attacker’s view</h3>
<dl class="pair">
<div><dt>found at 1&nbsp;% false alarms</dt><dd>{percent(found)}</dd></div>
<div><dt>area under the curve (AUC)</dt><dd>{area:.3f}</dd></div>
</dl>
<p>At the cap, once all fuel is spent{drawn}: no attacker who reads {seen} and asks whether \
a {thing}{of} was this one or another does better, whatever else it knows or computes. A coin \
would score 1.0&nbsp;% and 0.500.</p>"""
