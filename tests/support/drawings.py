"""Pages without their drawings: painting a chart costs ten times what a small run does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from matplotlib.figure import Figure

_PAINT = Figure.savefig


def _save_blank(figure, out, **options):
    out.write('<svg viewBox="0 0 1 1"></svg>')


@contextlib.contextmanager
def leave_drawings_blank() -> Iterator[None]:
    """Build every chart from its data, but let matplotlib rule and paint none of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", _save_blank)
        yield


@contextlib.contextmanager
def paint_drawings() -> Iterator[None]:
    """Let matplotlib paint, also where a test's folder leaves charts blank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", _PAINT)
        yield
