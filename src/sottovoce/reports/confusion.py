"""The confusion matrix of the test: which class is taken for which."""

from __future__ import annotations

import numpy as np

from sottovoce.reports.run import Run
from sottovoce.reports.text import escape, percent


def confusion(run: Run) -> str:
    """The matrix as a table, each row shaded by its shares; nothing where the record has none."""
    table = run.confusion
    if table is None or not table.sum():
        return ""
    names = run.classes if len(run.classes) == len(table) else [str(i) for i in range(len(table))]
    shares = table / np.maximum(1, table.sum(axis=1, keepdims=True))
    head = "".join(f'<th scope="col" class="n">{escape(name)}</th>' for name in names)
    body = "".join(
        f'<tr><th scope="row">{escape(name)}</th>'
        + "".join(
            f'<td class="n" style="--part:{100 * share:.0f}%">{count:,}</td>'
            for count, share in zip(counts, own, strict=True)
        )
        + f'<td class="n">{percent(float(own[i]))}</td></tr>'
        for i, (name, counts, own) in enumerate(zip(names, table, shares, strict=True))
    )
    return f"""
<section aria-labelledby="confusion">
<h2 id="confusion">Which class is taken for which</h2>
<div class="card scroll" role="region" aria-label="Confusion matrix" tabindex="0">
<table class="confusion"><caption class="hidden">Test rows by their class (row) and the class they \
were taken for (column)</caption>
<thead><tr><th scope="col">is … taken for</th>{head}<th scope="col" class="n">right</th></tr>
</thead>
<tbody>{body}</tbody></table></div>
</section>"""
