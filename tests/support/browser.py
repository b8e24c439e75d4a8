"""A real browser for the tests of pages: Chromium, driven by its command line alone.

Our pages have no scripts and forbid them; to measure one, another page holds it in frames (a window
cannot be as narrow as a phone) and writes what it measured into its own title.
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
from pathlib import Path
from typing import Any

import pytest

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
]
NAMES = ("chromium", "chromium-browser", "google-chrome")
LIGHT, DARK = "--blink-settings=preferredColorScheme=1", "--blink-settings=preferredColorScheme=0"


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
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return done


def measured(browser: str, page: Path, profile: Path, script: str = MEASURE) -> list[Any]:
    """What the script finds on the page at each of the widths."""
    held = html.escape(page.read_text("utf-8"))
    frames = "".join(
        f'<iframe style="border:0;width:{width}px;height:900px" srcdoc="{held}"></iframe>'
        for width in WIDTHS
    )
    outer = profile.with_suffix(".html")
    outer.write_text(
        f'<!doctype html><title></title><body onload="{html.escape(script)}">{frames}', "utf-8"
    )
    dom = chromium(browser, profile, "--dump-dom", outer.as_uri()).stdout
    title = re.search("<title>(.*?)</title>", dom, re.DOTALL)[1]
    return json.loads(html.unescape(title))


def shown(browser: str, page: Path, profile: Path) -> str:
    """The page as the browser has it; it must not have complained or been refused anything."""
    done = chromium(
        *(browser, profile, "--enable-logging=stderr", "--log-level=0"),
        *("--dump-dom", page.as_uri()),
    )
    assert "CONSOLE" not in done.stderr
    return done.stdout


def self_contained(browser: str, page: Path, profile: Path, *, drawings: int) -> str:
    """Its heading and drawings are shown as written, no address stands in it, ids are unique."""
    dom, written = shown(browser, page, profile), page.read_text("utf-8")
    assert re.search("<h1>(.*?)</h1>", written)[1] in dom.replace("&nbsp;", "\u00a0")
    assert dom.count("<svg") == written.count("<svg") == drawings
    assert "://" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", written)
    ids = re.findall(r'\bid="([^"]+)"', written)
    assert len(ids) == len(set(ids))
    return dom


def legible(browser: str, page: Path, profile: Path, *, narrow: float, wide: float) -> None:
    """At every width nothing overflows, figures are large enough, letters have so many pixels."""
    found = measured(browser, page, profile)
    for width, (inner, closed, _, figure, letters) in zip(WIDTHS, found, strict=True):
        assert inner == width
        assert closed <= width
        assert figure > 0.7 * min(width, 400)
        assert letters >= (narrow if width < 390 else wide)


def requests(browser: str, page: Path, profile: Path) -> list[str]:
    """Everything the browser asks a server for when it is shown the page."""
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, form: str, *values: object) -> None:
            asked.append(self.path)

    serve = functools.partial(Handler, directory=page.parent)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/{page.name}"
        chromium(browser, profile, "--dump-dom", address)
        server.shutdown()
    return asked
