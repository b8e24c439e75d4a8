"""A run folder as one page that anyone can open: `write` makes it, `render` is its pure core."""

from __future__ import annotations

from sottovoce.reports.page import render, write

__all__ = ["render", "write"]
