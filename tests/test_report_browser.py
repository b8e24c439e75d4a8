"""The page in a real browser: what it shows, on a phone and a desk, in the light and in the dark.

Chromium is driven by its command line alone. The page has no scripts and forbids them; to measure
it, another page holds it in a frame and writes what it measured into its own title.
"""

from __future__ import annotations

import functools
import html
import http.server
import json
import os
import re
import shutil
import subprocess
import threading
import zlib
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from example_record import example

from sottovoce.report import render

pytestmark = pytest.mark.slow  # left out of the editing loop

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
]
NAMES = ("chromium", "chromium-browser", "google-chrome")
CASES = {
    "default": {},
    "budgets": {"epsilon": [2.0] * 4 + [4.0] * 3 + [16.0] * 3, "per_round": 6, "noise": "secure"},
    "paper": {"calibration": "paper", "epsilon": 20.0, "per_round": 6},
    "no round": {"stop_after": 0},
}
LIGHT, DARK = "--blink-settings=preferredColorScheme=1", "--blink-settings=preferredColorScheme=0"


@pytest.fixture(scope="session")
def browser() -> str:
    """The browser's command; CI must have one, elsewhere its absence skips."""
    found = next((path for path in map(shutil.which, NAMES) if path), None)
    if found is None:
        missing = f"no browser on PATH (looked for {', '.join(NAMES)}): apt-get install chromium"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    return found


def chromium(browser: str, profile: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [browser, *FLAGS, f"--user-data-dir={profile}", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="session", params=CASES)
def page(request, tmp_path_factory) -> Path:
    """The page of one of the cases, as a file."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render(*example(**CASES[request.param])), "utf-8")
    return path


@pytest.fixture(scope="session")
def default_page(tmp_path_factory) -> Path:
    """The page of the default run alone."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render(*example()), "utf-8")
    return path


def test_the_browser_shows_headline_and_figures_without_complaint(browser, page, tmp_path):
    done = chromium(
        *(browser, tmp_path / "profile", "--enable-logging=stderr", "--log-level=0"),
        *("--dump-dom", page.as_uri()),
    )
    assert "CONSOLE" not in done.stderr  # neither errors nor blocked requests
    written = page.read_text("utf-8")
    headline = re.search("<h1>(.*?)</h1>", written)[1]
    assert headline in done.stdout.replace("&nbsp;", "\u00a0")
    assert done.stdout.count("<svg") == written.count("<svg") >= 1
    assert done.stdout.count("<table") == written.count("<table")


WIDTHS = (320, 390, 840, 1280)
MEASURE = """
document.title = JSON.stringify([...document.querySelectorAll("iframe")].map(frame => {
  const doc = frame.contentDocument, root = doc.documentElement, closed = root.scrollWidth;
  const all = (what, how) => [...doc.querySelectorAll(what)].map(how);
  all("details", d => { d.open = true; });
  const size = svg => svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
  return [
    root.clientWidth, closed, root.scrollWidth,
    Math.min(...all("figure svg", svg => svg.getBoundingClientRect().width)),
    Math.min(...all("figure svg text",
      text => parseFloat(getComputedStyle(text).fontSize) * size(text.closest("svg")))),
  ];
}))
"""


def test_nothing_overflows_and_letters_stay_legible(browser, page, tmp_path):
    """In frames, because a browser's window cannot be as narrow as a phone."""
    held = html.escape(page.read_text("utf-8"))
    frames = "".join(
        f'<iframe style="border:0;width:{width}px;height:900px" srcdoc="{held}"></iframe>'
        for width in WIDTHS
    )
    outer = tmp_path / "frames.html"
    outer.write_text(
        f'<!doctype html><title></title><body onload="{html.escape(MEASURE)}">{frames}', "utf-8"
    )
    dom = chromium(browser, tmp_path / "profile", "--dump-dom", outer.as_uri()).stdout
    found = json.loads(re.search("<title>(.*?)</title>", dom, re.DOTALL)[1])
    for width, (inner, closed, opened, figure, letters) in zip(WIDTHS, found, strict=True):
        assert inner == width
        assert closed <= width
        assert opened <= width  # with the clients' table unfolded
        assert figure > 0.7 * min(width, 400)
        assert letters >= (8 if width < 390 else 10)  # pixels


def test_a_served_page_asks_for_nothing_else(browser, default_page, tmp_path):
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, form: str, *values: object) -> None:
            asked.append(self.path)

    serve = functools.partial(Handler, directory=default_page.parent)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/report.html"
        chromium(browser, tmp_path / "profile", "--dump-dom", address)
        server.shutdown()
    assert asked == ["/report.html"]


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
