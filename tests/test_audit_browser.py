"""The audit's page in a real browser: pictures drawn, nothing fetched, nothing overflowing."""

from __future__ import annotations

import re

import pytest
from example_audit import example

from browser import WIDTHS, browser, measured, shown
from sottovoce.audit import page as pages

__all__ = ["browser"]  # the fixture
pytestmark = pytest.mark.slow  # left out of the editing loop


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of a tiny audit, beside its drawings."""
    return pages.write(example(), tmp_path_factory.mktemp("audit"))


def test_the_browser_shows_verdict_and_pictures_without_complaint(browser, page, tmp_path):
    dom = shown(browser, page, tmp_path / "profile")
    written = page.read_text("utf-8")
    assert re.search("<h1>(.*?)</h1>", written)[1] in dom.replace("&nbsp;", "\u00a0")
    assert dom.count("<svg") == written.count("<svg") == 9
    assert dom.count("<image") == written.count("<image") > 50  # reconstructions
    assert "://" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", written)


def test_ids_are_unique(page):
    ids = re.findall(r'\bid="([^"]+)"', page.read_text("utf-8"))
    assert len(ids) == len(set(ids))


def test_nothing_overflows_and_letters_stay_legible(browser, page, tmp_path):
    found = measured(browser, page, tmp_path / "profile")
    for width, (inner, closed, _, figure, letters) in zip(WIDTHS, found, strict=True):
        assert inner == width
        assert closed <= width
        assert figure > 0.7 * min(width, 400)
        assert letters >= (8 if width < 390 else 10)  # pixels


def test_every_drawing_is_a_file_too(page):
    drawn = sorted(path.name for path in page.parent.glob("*.svg"))
    assert {"claimed.svg", "paper.svg", "inversion.svg", "matching.svg", "traps.svg"} <= set(drawn)
    assert all((page.parent / name).read_text("utf-8").startswith("<?xml") for name in drawn)
