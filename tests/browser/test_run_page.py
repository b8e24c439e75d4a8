"""The page in a real browser: what it shows, on a phone and a desk, in light and dark."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from sottovoce.reports import render_report
from support.browser import DARK, LIGHT, WIDTHS, browser, chromium, measured, requests, shown
from support.example_record import example

__all__ = ["browser"]  # the fixture
pytestmark = pytest.mark.slow  # left out of the editing loop

CASES = {
    "default": {},
    "budgets": {"epsilon": [2.0] * 4 + [4.0] * 3 + [16.0] * 3, "per_round": 6, "noise": "secure"},
    "paper": {"calibration": "paper", "epsilon": 20.0, "per_round": 6},
    "no round": {"stop_after": 0},
    "measured": {"measured": True},
}


@pytest.fixture(scope="session", params=CASES)
def page(request, tmp_path_factory) -> Path:
    """The page of one of the cases, as a file."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render_report(*example(**CASES[request.param])), "utf-8")
    return path


@pytest.fixture(scope="session")
def default_page(tmp_path_factory) -> Path:
    """The page of the default run alone."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render_report(*example()), "utf-8")
    return path


def test_the_browser_shows_headline_and_figures_without_complaint(browser, page, tmp_path):
    dom = shown(browser, page, tmp_path / "profile")
    written = page.read_text("utf-8")
    headline = re.search("<h1>(.*?)</h1>", written)[1]
    assert headline in dom.replace("&nbsp;", "\u00a0")
    assert dom.count("<svg") == written.count("<svg") >= 1
    assert dom.count("<table") == written.count("<table")


def test_nothing_overflows_and_letters_stay_legible(browser, page, tmp_path):
    """In frames, because a browser's window cannot be as narrow as a phone."""
    found = measured(browser, page, tmp_path / "profile")
    for width, (inner, closed, opened, figure, letters) in zip(WIDTHS, found, strict=True):
        assert inner == width
        assert closed <= width
        assert opened <= width  # with the clients' table unfolded
        assert figure > 0.7 * min(width, 400)
        assert letters >= (8 if width < 390 else 10)  # pixels


def test_a_served_page_asks_for_nothing_else(browser, default_page, tmp_path):
    assert requests(browser, default_page, tmp_path / "profile") == [f"/{default_page.name}"]


def test_light_and_dark_are_both_drawn(browser, default_page, tmp_path):
    """Pixels: the ground is light or dark, and both have ink and the figures' blue on it."""
    for flag, bright in ((LIGHT, True), (DARK, False)):
        shot = tmp_path / "shot.png"
        chromium(
            *(browser, tmp_path / "profile", flag, "--window-size=1000,2400"),
            *(f"--screenshot={shot}", default_page.as_uri()),
        )
        pixels = matplotlib.image.imread(shot)[..., :3].astype(np.float64)
        grey = pixels.mean(axis=2)
        assert (np.median(grey) > 0.9) == bright
        assert (np.median(grey) < 0.2) != bright
        assert np.mean(np.abs(grey - np.median(grey)) > 0.5) > 0.01  # letters
        assert np.mean(pixels[..., 2] - pixels[..., 0] > 0.4) > 1e-4  # blue lines


def test_it_prints_in_the_light(browser, default_page, tmp_path):
    """To paper the page goes in its light colours, whatever the screen's are."""
    out = tmp_path / "page.pdf"
    chromium(
        *(browser, tmp_path / "profile", DARK, "--no-pdf-header-footer"),
        *(f"--print-to-pdf={out}", default_page.as_uri()),
    )
    paper = out.read_bytes()
    assert paper.startswith(b"%PDF")
    streams = re.findall(rb"stream\r?\n(.*?)\r?\nendstream", paper, re.DOTALL)
    drawn = b"".join(unpacked(stream) for stream in streams)
    colours = {
        "#" + "".join(f"{round(255 * float(part)):02x}" for part in found.split())
        for found in re.findall(rb"((?:[\d.]+ ){3})rg", drawn)
    }
    assert "#24292f" in colours  # --ink of the light scheme
    assert "#e4e7ea" not in colours  # and of the dark one


def unpacked(stream: bytes) -> bytes:
    try:
        return zlib.decompress(stream)
    except zlib.error:
        return b""  # fonts and the like are packed otherwise
