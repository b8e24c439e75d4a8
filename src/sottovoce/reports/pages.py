"""Render the templates, and format numbers for a reader.

A page is one HTML file that loads nothing and runs no script. Jinja2 escapes every value on its
way into a page; only the drawings of `charts` are markup.
"""

from __future__ import annotations

import base64
import math
from functools import cache
from typing import TYPE_CHECKING, Any

from sottovoce.privacy.budget import format_claim

if TYPE_CHECKING:
    from jinja2 import Environment


def render_page(template: str, **context: Any) -> str:
    """Return the page that a template of `reports/templates` makes of its context.

    >>> page = render_page("base.html.j2", title="a < b", headline="", banner="", version="1")
    >>> "<title>a &lt; b</title>" in page, "Content-Security-Policy" in page
    (True, True)
    """
    page = load_templates().get_template(template).render(**context)
    return page.encode("utf-8", "replace").decode()  # JSON may hold half a character


@cache
def load_templates() -> Environment:
    """Return the environment of all templates, with their filters."""
    # Imported here: whoever imports sottovoce.reports for its progress table need not wait.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = Environment(
        loader=PackageLoader("sottovoce.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {
        "number": format_number,
        "ceiling": format_ceiling,
        "percent": format_percent,
        "duration": format_duration,
        "plan_value": format_value,
        "whole": format_whole,
        "plural": format_count,
        "base64": lambda text: base64.b64encode(text.encode()).decode(),
    }
    return templates


_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_LONGEST = 200  # characters of one value: a plan may hold a list with a budget for every client


def format_number(value: float | None, digits: int = 4) -> str:
    """Return a number with at most so many digits; a dash for None, NaN and infinities.

    >>> [format_number(value) for value in (8.0, 0.0301234, 1e-5, 2.5e-7, float("nan"))]
    ['8', '0.03012', '10⁻⁵', '2.5 × 10⁻⁷', '–']
    >>> format_number(12345.0), format_number(1e300), format_number(108.2, 2)
    ('12,345', '10³⁰⁰', '108')
    """
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    if value == 0 or 1e-3 <= size < 1e9:
        if size >= min(1000, 10**digits - 0.5):  # "g" would write a power of ten
            return f"{value:,.0f}"
        return f"{value:.{digits}g}"
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    power = "10" + str(int(exponent)).translate(_RAISED)
    mantissa = mantissa.rstrip("0").rstrip(".")
    return power if mantissa == "1" else f"{mantissa} × {power}"


def format_ceiling(value: float | None, digits: int = 4) -> str:
    """Return a claimed ε or δ as a number that is rounded up, so that what is printed holds.

    >>> [format_ceiling(value) for value in (25.3312, 8.0, 1.0004e-5, 12345.1, float("nan"))]
    ['25.34', '8', '1.001 × 10⁻⁵', '12,346', '–']
    """
    if value is None or not math.isfinite(value):
        return "–"
    whole = len(str(int(abs(value)))) if abs(value) < 1e9 else 0
    return format_number(float(format_claim(value, max(digits, whole))), digits)


def format_percent(fraction: float | None, digits: int = 1) -> str:
    """Return a share in per cent; a dash for None and NaN.

    >>> format_percent(0.9134) == "91.3\\N{NO-BREAK SPACE}%", format_percent(float("nan"))
    (True, '–')
    """
    if fraction is None or not math.isfinite(fraction):
        return "–"
    return f"{100 * fraction:.{digits}f}\u00a0%"


def format_duration(seconds: float) -> str:
    """Return a time span in the units that suit it; a dash for NaN.

    >>> [format_duration(seconds) for seconds in (0.0021, 0.98, 7.26, 754.0, 7300.0)]
    ['2.1 ms', '980 ms', '7.3 s', '12 min 34 s', '2 h 1 min']
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


def format_value(thing: Any) -> str:
    """Return a value of the plan as one would write it there, cut short where it is very long.

    >>> [format_value(value) for value in (True, 2.0, "iid", [0, 1], None)]
    ['true', '2', 'iid', '0, 1', '–']
    >>> format_value({"age": [0, 99]})
    'age = 0, 99'
    """
    if thing is None:
        return "–"
    if isinstance(thing, bool):
        return str(thing).lower()
    if isinstance(thing, float):
        return f"{thing:.10g}"
    if isinstance(thing, dict):
        text = "; ".join(f"{key} = {format_value(item)}" for key, item in list(thing.items())[:100])
    elif isinstance(thing, list | tuple):
        text = ", ".join(format_value(item) for item in thing[:100])
    else:
        text = str(thing)
    if len(text) <= _LONGEST:
        return text
    many = f" ({len(thing):,} in all)" if isinstance(thing, dict | list | tuple) else ""
    return text[:_LONGEST] + "…" + many


def format_whole(n: float | None) -> str:
    """Return a whole number with commas between its thousands, or a dash for None and NaN.

    >>> format_whole(12000), format_whole(float("nan"))
    ('12,000', '–')
    """
    return "–" if n is None or not math.isfinite(n) else f"{n:,.0f}"


def format_count(n: int, noun: str) -> str:
    """Return a number with its noun.

    >>> format_count(1, "round"), format_count(12000, "client")
    ('1 round', '12,000 clients')
    """
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"
