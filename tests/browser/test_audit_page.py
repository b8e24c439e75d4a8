"""The audit's page in a real browser: pictures drawn, nothing fetched, nothing overflowing."""

from __future__ import annotations

import pytest

from sottovoce.studies.audit import findings
from support.browser import browser, legible, self_contained
from support.example_audit import example

__all__ = ["browser"]  # the fixture
pytestmark = pytest.mark.slow  # left out of the editing loop


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of a tiny audit, beside its drawings."""
    return findings.write_audit(example(), tmp_path_factory.mktemp("audit"))


def test_the_browser_shows_verdict_and_pictures_without_complaint(browser, page, tmp_path):
    dom = self_contained(browser, page, tmp_path / "profile", drawings=10)
    assert dom.count("<image") == page.read_text("utf-8").count("<image") == 3  # mosaics


def test_nothing_overflows_and_letters_stay_legible(browser, page, tmp_path):
    legible(browser, page, tmp_path / "profile", narrow=8, wide=10)


def test_every_drawing_is_a_file_too(page):
    drawn = sorted(path.name for path in page.parent.glob("*.svg"))
    assert {"claimed.svg", "paper.svg", "inversion.svg", "matching.svg", "traps.svg"} <= set(drawn)
    assert all((page.parent / name).read_text("utf-8").startswith("<?xml") for name in drawn)
