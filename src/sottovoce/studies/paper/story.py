"""What all figures say together, in a few sentences; every number is counted or computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sottovoce.reports.text import ceiling, escape, number
from sottovoce.studies.paper.claims import Judged


def tally(found: Sequence[Judged]) -> str:
    """How many of the paper's claims hold, as printed and corrected."""
    printed = _count(found, "printed")
    total = sum(printed.values())
    if not total:
        return "The figures that are ours."
    return (
        f"Of the paper’s claims, {printed['holds']} of {total} hold as printed; "
        f"{printed['contradicted']} contradicted, {printed['undecided']} undecided."
    )


def _count(found: Sequence[Judged], variant: str) -> Counter[str]:
    return Counter(
        verdicts[variant].word
        for one in found
        for claim, verdicts in one.verdicts
        if variant in verdicts and not claim.ours
    )


def lead(found: Sequence[Judged]) -> list[str]:
    """The story, paragraph by paragraph, as HTML."""
    corrected = _count(found, "corrected")
    ours = Counter(
        verdict.word
        for one in found
        for claim, verdicts in one.verdicts
        if claim.ours
        for verdict in verdicts.values()
    )
    texts = [
        "Every experiment of Wei et al., <em>User-Level Privacy-Preserving Federated "
        "Learning</em>, twice: <strong>as printed</strong>, with the paper’s noise, its rule for T "
        "and its test set steering; and <strong>corrected</strong>, at an exact guarantee, with "
        "smoothed CRD and a public validation set apart from the test set. A claim "
        "<em>holds</em> only if the 95 % interval of its paired differences over the seeds "
        "excludes zero at every point; it is <em>contradicted</em> if some point excludes zero "
        "on the other side."
    ]
    if sum(corrected.values()):
        texts.append(
            f"Corrected, {corrected['holds']} of {sum(corrected.values())} of them hold; "
            f"{corrected['contradicted']} contradicted, {corrected['undecided']} undecided. Of "
            f"what we claim ourselves {ours['holds']} of {sum(ours.values())} checks hold; "
            f"{ours['contradicted']} contradicted, {ours['undecided']} undecided."
        )
    promised = _promised(found)
    if promised:
        texts.append(promised)
    broken = [one for one in found if one.result.moments]
    if broken:
        orders = [
            next((lam for lam, b, t in zip(p["order"], p["bound"], p["truth"], strict=True)
                  if b < t), None)
            for p in broken[0].result.moments
        ]  # fmt: skip
        if any(orders):
            shown = ", ".join("never" if o is None else str(o) for o in orders)
            texts.append(
                "The moment bound that the noise rests on is no bound: in the four panels of "
                f"Fig. 2 it falls below the true moment from λ = {shown} on."
            )
    return texts


def _promised(found: Sequence[Judged]) -> str:
    """What the paper's noise guarantees for what it is asked, from the printed comparisons."""
    for one in found:
        table = one.tables.get("printed")
        axis = one.figure.x
        if table is None or axis is None or axis.key != "privacy.epsilon":
            continue
        panel = table.axis("panel")[0]
        if "udp" not in table.axis("line"):
            continue
        pairs = [(x, table.points[panel, "udp", x].epsilon) for x in table.axis("x")]
        search = next((line for line in table.axis("line") if line.startswith("optimal")), None)
        text = ", ".join(f"{number(asked)} → {ceiling(true, 3)}" for asked, true in pairs)
        story = (
            "The ε on the axes of the printed figures is what the paper’s formula promises, not "
            f"what holds. Asked for → true, original UDP, all clients in every round: {text}."
        )
        if search is not None:
            point = table.points[panel, search, pairs[0][0]]
            if point.tried > 1:
                story += (
                    f" And the search behind “optimal UDP” shows the server {point.tried} runs: "
                    f"what guarantees ε = {ceiling(point.epsilon, 3)} for one of them guarantees "
                    f"{ceiling(point.epsilon_search, 3)} for all."
                )
        return escape(story)
    return ""
