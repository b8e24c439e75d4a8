"""The page of all figures in a real browser: no complaint, no request, switches that switch.

The results are made up (`example_results`): the page is what is tested here, and it is whole.
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from sottovoce.studies.paper.definition import list_figures, load_figure
from support.browser import DARK, LIGHT, WIDTHS, browser, chromium, measured, requests, shown
from support.example_results import fill

__all__ = ["browser"]  # the fixture
pytestmark = pytest.mark.slow  # left out of the editing loop

SWEPT = next(
    name for name in list_figures() if len(getattr(load_figure(name).panel, "values", ())) > 1
)


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """All figures, made up."""
    return fill(tmp_path_factory.mktemp("results"))


def test_the_browser_shows_every_figure_without_complaint(browser, page, tmp_path):
    dom = shown(browser, page, tmp_path / "profile")
    written = page.read_text("utf-8")
    assert dom.count("<svg") == written.count("<svg") >= 40
    for name in list_figures():
        assert f'id="{name}"' in dom


def test_a_served_page_asks_for_nothing_else(browser, page, tmp_path):
    assert requests(browser, page, tmp_path / "profile") == [f"/{page.name}"]


MEASURE = """
document.title = JSON.stringify([...document.querySelectorAll("iframe")].map(frame => {
  const doc = frame.contentDocument, root = doc.documentElement, win = frame.contentWindow;
  const all = (what, how) => [...doc.querySelectorAll(what)].map(how);
  const seen = what => all(what, e => e.getBoundingClientRect().height > 0);
  const ground = () => win.getComputedStyle(doc.body).backgroundColor;
  const size = svg => svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
  const closed = root.scrollWidth;
  all("details", d => { d.open = true; });
  const radio = id => { const r = doc.getElementById(id); r.focus(); r.click();
                        return doc.activeElement === r && r.checked; };
  const grounds = ["light", "dark", "light"].map(t => [radio("theme-" + t), ground()]);
  const shown = ["printed", "corrected", "both"].map(v => [
    radio("SWEPT-variant-" + v), seen("#SWEPT figure.printed"), seen("#SWEPT figure.corrected")]);
  return { inner: root.clientWidth, closed, opened: root.scrollWidth, grounds, shown,
    letters: Math.min(...all("figure svg text",
      text => parseFloat(win.getComputedStyle(text).fontSize) * size(text.closest("svg")))
      .filter(n => n > 0)),
    pictures: all("figure svg image", i => i.getBoundingClientRect().width > 0).length };
}))
"""


def test_nothing_overflows_letters_are_legible_and_the_switches_switch(browser, page, tmp_path):
    """In frames, because a browser's window cannot be as narrow as a phone."""
    found = measured(browser, page, tmp_path / "profile", MEASURE.replace("SWEPT", SWEPT))
    for width, seen in zip(WIDTHS, found, strict=True):
        assert seen["inner"] == width
        assert seen["closed"] <= width
        assert seen["opened"] <= width  # with every table unfolded
        assert seen["letters"] >= (7 if width < 390 else 8.5)  # pixels
        assert seen["pictures"] > 0  # the digits of Fig. 3
        (is_light, light), (is_dark, dark), (_, again) = seen["grounds"]
        assert is_light
        assert is_dark
        assert light == again != dark
        for checked, printed, corrected in seen["shown"]:
            assert checked
            assert printed
            assert corrected
        (_, *first), (_, *second), (_, *both) = seen["shown"]
        assert [all(first[0]), any(first[1])] == [True, False]
        assert [any(second[0]), all(second[1])] == [False, True]
        assert [all(both[0]), all(both[1])] == [True, True]


def test_the_data_can_be_downloaded_from_the_page_itself(page):
    written = page.read_text("utf-8")
    found = re.findall(
        r'download="(\w+)\.json" href="data:application/json;base64,([^"]+)"', written
    )
    assert [name for name, _ in found] == list(list_figures())
    for name, content in found:
        held = json.loads(base64.b64decode(content))
        assert held == json.loads((page.parent / f"{name}.json").read_text("utf-8"))


def test_light_and_dark_are_both_drawn(browser, page, tmp_path):
    """Pixels: the ground is light or dark, and both have ink and colour on it."""
    for flag, bright in ((LIGHT, True), (DARK, False)):
        shot = tmp_path / "shot.png"
        chromium(
            *(browser, tmp_path / "profile", flag, "--window-size=1000,5000"),
            *(f"--screenshot={shot}", page.as_uri()),
        )
        pixels = matplotlib.image.imread(shot)[..., :3].astype(np.float64)
        grey = pixels.mean(axis=2)
        assert (np.median(grey) > 0.9) == bright
        assert np.mean(np.abs(grey - np.median(grey)) > 0.5) > 0.01  # letters
        assert np.mean(pixels[..., 2] - pixels[..., 0] > 0.4) > 1e-4  # blue lines
