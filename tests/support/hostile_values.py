"""Puts markup wherever a template shows a text, to see that none of it becomes part of the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser

import pytest

from sottovoce.reports import pages, watch

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;</style></title>--></svg>"


class _Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: Counter[tuple[str, ...]] = Counter()
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found[tag, *sorted(name for name, _ in attrs)] += 1


def assert_escaped(render: Callable[[], str]) -> None:
    """Render with every shown text replaced, by a word and by markup: the tags are the same."""
    drawn = [_render(render, text) for text in ("plain", HOSTILE)]
    assert drawn[1].count("&lt;script&gt;alert(1)") > 10
    assert "<script>alert(1)" not in drawn[1]
    tags = [_Tags(page).found for page in drawn]
    assert (tags[0] - tags[1], tags[1] - tags[0]) == (Counter(), Counter())


def _render(render: Callable[[], str], text: str) -> str:
    templates = pages.load_templates.__wrapped__()  # ours: a template is compiled once
    # Markup stays, and the names of the two tags that `macros.table` chooses between.
    templates.finalize = lambda value: (
        text if type(value) is str and value not in ("th", "td") else value
    )
    with pytest.MonkeyPatch.context() as patch:
        for module in (pages, watch):
            patch.setattr(module, "load_templates", lambda: templates)
        return render()
