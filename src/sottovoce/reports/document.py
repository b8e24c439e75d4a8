"""The frame of every page we write: one HTML file that asks nothing of the network.

The page states its own rule in a Content-Security-Policy: no scripts, no images, no connections.
"""

from __future__ import annotations

import html
import math
from importlib import resources
from typing import Any

from sottovoce.privacy.budget import format_claim

# Numbers and record strings as they stand on the page.


_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_LONGEST = 200  # characters of one value: a plan may hold a list with a budget for every client


def escape(value: object) -> str:
    """Any value as text that cannot be markup, inside an attribute or outside."""
    return html.escape(str(value), quote=True)


def number(value: float, digits: int = 4) -> str:
    """A number for reading: at most so many digits, powers of ten written out, a dash for none.

    >>> number(8.0), number(0.0301234), number(1e-5), number(2.5e-7), number(float("nan"))
    ('8', '0.03012', '10⁻⁵', '2.5 × 10⁻⁷', '–')
    >>> number(12345.0), number(1e300)
    ('12,345', '10³⁰⁰')
    """
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    if value == 0 or 1e-3 <= size < 1e9:
        if size >= 1000:
            return f"{value:,.0f}"
        return f"{value:.{digits}g}"
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    power = "10" + str(int(exponent)).translate(_RAISED)
    mantissa = mantissa.rstrip("0").rstrip(".")
    return power if mantissa == "1" else f"{mantissa} × {power}"


def ceiling(value: float, digits: int = 4) -> str:
    """An ε or a δ that is claimed: as `number`, rounded up, so that what is printed holds.

    >>> ceiling(25.3312), ceiling(8.0), ceiling(1.0004e-5), ceiling(12345.1), ceiling(float("nan"))
    ('25.34', '8', '1.001 × 10⁻⁵', '12,346', '–')
    """
    if not math.isfinite(value):
        return "–"
    whole = len(str(int(abs(value)))) if abs(value) < 1e9 else 0
    return number(float(format_claim(value, max(digits, whole))), digits)


def percent(fraction: float, digits: int = 1) -> str:
    """A share for reading.

    >>> percent(0.9134) == "91.3\\N{NO-BREAK SPACE}%", percent(float("nan"))
    (True, '–')
    """
    return f"{100 * fraction:.{digits}f}\u00a0%" if math.isfinite(fraction) else "–"


def duration(seconds: float) -> str:
    """A time span for reading.

    >>> duration(0.0021), duration(0.98), duration(7.26), duration(754.0), duration(7300.0)
    ('2.1 ms', '980 ms', '7.3 s', '12 min 34 s', '2 h 1 min')
    """
    if not math.isfinite(seconds):
        return "–"
    if seconds < 1:
        return f"{float(f'{1000 * seconds:.2g}'):g} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def value(thing: Any) -> str:
    """A value of the plan, as one would write it there, cut short where it is very long.

    >>> value(True), value(2.0), value("iid"), value([0, 1]), value(None)
    ('true', '2', 'iid', '0, 1', '–')
    >>> value({"age": [0, 99]})
    'age = 0, 99'
    """
    if thing is None:
        return "–"
    if isinstance(thing, bool):
        return str(thing).lower()
    if isinstance(thing, float):
        return f"{thing:.10g}"
    if isinstance(thing, dict):
        text = "; ".join(f"{key} = {value(item)}" for key, item in list(thing.items())[:100])
    elif isinstance(thing, list | tuple):
        text = ", ".join(value(item) for item in thing[:100])
    else:
        text = str(thing)
    if len(text) <= _LONGEST:
        return text
    many = f" ({len(thing):,} in all)" if isinstance(thing, dict | list | tuple) else ""
    return text[:_LONGEST] + "…" + many


def count(n: int, noun: str) -> str:
    """A number with its noun.

    >>> count(1, "round"), count(12000, "client")
    ('1 round', '12,000 clients')
    """
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def document(*, title: str, css: str, body: str) -> str:
    """A whole page; `title` is plain text, `body` is HTML that has been escaped already.

    >>> page = document(title="a < b", css="", body="<p>hello</p>")
    >>> "<title>a &lt; b</title>" in page, "Content-Security-Policy" in page
    (True, True)
    """
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{css}</style>
</head>
<body>
{body}
</body>
</html>
"""


def sheet(package: str, file: str) -> str:
    """One style sheet as it lies in its package."""
    return resources.files(package).joinpath(file).read_text("utf-8")
