"""A real browser for the tests of pages: Chromium, driven by its command line or through a pipe.

Our pages have no scripts and forbid them; to measure one, another page holds it in frames (a window
cannot be as narrow as a phone) and writes what it measured into its own title. A page that changes
while it is open is followed with the DevTools protocol (`open_tab`).
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
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

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


class Tab:
    """A page that stays open, driven by DevTools messages that end with a zero byte."""

    def __init__(self, send: BinaryIO, receive: BinaryIO) -> None:
        self.send, self.receive, self.number = send, receive, 0
        self.complaints: list[str] = []  # of the browser's console
        self.session: str | None = None
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        attached = self.command("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for name in ("Page.enable", "Runtime.enable", "Log.enable"):
            self.command(name)

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        self.send.write(json.dumps(message).encode() + b"\0")
        self.send.flush()
        while True:
            answer = self._read()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self.receive.read(1)) != b"\0":
            assert byte, "the browser is gone"
            text += byte
        message: dict[str, Any] = json.loads(text)
        if message.get("method") == "Log.entryAdded":
            self.complaints.append(message["params"]["entry"]["text"])
        if message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(message["params"]["exceptionDetails"]))
        return message

    def show(self, address: str, *, width: int = 1400, dark: bool = False) -> None:
        """Open an address in a window of this width."""
        self.command(
            *("Emulation.setDeviceMetricsOverride",),
            **{"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600},
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])
        self.command("Page.navigate", url=address)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression on the page."""
        found = self.command("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, script: str, seconds: float = 900) -> Any:
        """Return the first value of the expression that is true."""
        until = time.monotonic() + seconds
        while not (value := self.evaluate(script)):
            if time.monotonic() > until:  # a wait ends on an event; this only ends a hung test
                raise TimeoutError(f"{script}: {self.evaluate('document.body.innerText')}")
            time.sleep(0.1)
        return value

    def screenshot(self, path: Path) -> None:
        """Write a picture of the whole page."""
        shot = self.command("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(b64decode(shot["data"]))


@contextmanager
def open_tab(browser: str, profile: Path) -> Iterator[Tab]:
    """Start a browser with one open page."""
    command = [browser, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe"]
    (from_test, to_browser), (from_browser, to_test) = os.pipe(), os.pipe()
    # The browser reads descriptor 3 and writes descriptor 4.
    shell = f'exec "$@" 3<&{from_test} 4>&{to_test}'
    with (
        os.fdopen(to_browser, "wb") as send,
        os.fdopen(from_browser, "rb") as receive,
        subprocess.Popen(
            ["bash", "-c", shell, "bash", *command],
            pass_fds=(from_test, to_test),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as started,
    ):
        os.close(from_test)
        os.close(to_test)
        try:
            yield Tab(send, receive)
        finally:
            started.terminate()
            started.wait(900)
