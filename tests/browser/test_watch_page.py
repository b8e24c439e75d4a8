"""`sottovoce watch` in real browsers: they follow a run from its first round to its sudden end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sottovoce import calibrate
from sottovoce.privacy.budget import format_claim
from support.browser import Tab, browser, open_tab
from support.example_record import example

__all__ = ["browser"]  # the fixture
pytestmark = pytest.mark.slow  # left out of the editing loop

COMMAND = [sys.executable, "-m", "sottovoce"]
LONG_RUN = ("noise=secure", "rounds.schedule=fixed", "rounds.rounds=50000", "privacy.epsilon=4")
STATUS = "document.querySelector('h1 .status')?.textContent"
ROUNDS = "Number(document.querySelector('.tiles dd').textContent.replace(',', ''))"
OVERFLOW = "document.documentElement.scrollWidth > document.documentElement.clientWidth"


@pytest.fixture
def watched(tmp_path) -> Iterator[tuple[Path, str, subprocess.Popen[str]]]:
    """A folder with two runs that are over, the address of its page, and the server."""
    folder = tmp_path / "runs"
    for epsilon in (2.0, 8.0):
        record, _ = example(rounds=20, measured=True, epsilon=epsilon)
        record["plan"]["privacy"]["epsilon"] = epsilon
        (folder / f"eps-{epsilon:g}").mkdir(parents=True)
        (folder / f"eps-{epsilon:g}" / "record.json").write_text(json.dumps(record), "utf-8")
    with subprocess.Popen(
        [*COMMAND, "watch", str(folder)], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        try:
            yield folder, server.stdout.readline().strip(), server
        finally:
            server.kill()


@pytest.fixture
def tab(browser, tmp_path) -> Iterator[Tab]:
    """A browser with one open page; it must not have complained in the end."""
    with open_tab(browser, tmp_path / "profile") as opened:
        yield opened
        assert opened.complaints == []


def test_two_browsers_follow_a_run_until_it_is_killed(browser, watched, tab, tmp_path):
    folder, address, _ = watched
    tab.show(address)
    assert tab.evaluate("document.title") == "2 runs, none going on"
    tab.evaluate("document.querySelector('input[value=eps-8]').click()")
    settings = [word for setting in LONG_RUN for word in ("--set", setting)]
    with (
        open_tab(browser, tmp_path / "second") as other,
        subprocess.Popen([*COMMAND, "train", "--quiet", "--out", folder / "new", *settings]) as run,
    ):
        try:
            tab.wait_for("document.title === '3 runs, 1 going on'")  # without a reload
            assert tab.evaluate("document.querySelector('input[value=eps-8]').checked")
            for page in (tab, other):
                page.show(f"{address}run/new")
                assert page.wait_for(STATUS) == "running"
            before = [page.wait_for(f"{ROUNDS} > 2 && {ROUNDS}") for page in (tab, other)]
            for page, rounds in zip((tab, other), before, strict=True):
                page.wait_for(f"{ROUNDS} > {rounds + 2}")
                assert page.evaluate("document.querySelectorAll('svg.plot path').length") >= 4
        finally:
            run.kill()
        run.wait()
        for page in (tab, other):
            page.wait_for(f"{STATUS} === 'killed'")
            assert "killed, or the machine stopped" in page.evaluate("document.body.innerText")
            assert "--resume" in page.evaluate("document.querySelector('.command').textContent")
        written = len((folder / "new" / "rounds.jsonl").read_text("utf-8").splitlines())
        assert tab.wait_for(f"{ROUNDS} === {written}")
        assert other.complaints == []


def test_a_page_whose_server_is_gone_says_so(browser, watched, tmp_path):
    _, address, server = watched
    with open_tab(browser, tmp_path / "profile") as tab:
        tab.show(address)
        gone = "document.getElementById('gone')"
        assert tab.evaluate(f"{gone}.hidden")
        server.kill()
        tab.wait_for(f"!{gone}.hidden && {gone}.textContent.includes('does not answer')")


def test_pages_fit_a_phone_and_a_desk_in_light_and_dark(watched, tab):
    _, address, _ = watched
    for path in ("", "run/eps-8", "compare", "budget"):
        grounds = set()
        for width in (400, 1400):
            for dark in (False, True):
                tab.show(address + path, width=width, dark=dark)
                assert not tab.evaluate(OVERFLOW), (path, width)
                grounds.add(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert len(grounds) == 2
    tab.show(f"{address}run/eps-8", width=400)
    letters = "document.querySelector('.plot text').getBoundingClientRect().height"
    assert tab.evaluate(letters) >= 10


def test_axes_and_sliders_change_the_page_at_once(watched, tab):
    _, address, _ = watched
    tab.show(f"{address}compare")
    assert tab.evaluate("document.querySelectorAll('.plot a').length") == 2
    tab.evaluate(
        "const axis = document.querySelector('select[name=x]'); axis.value = 'rounds done';"
        "axis.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    tab.wait_for("document.querySelector('figure h3').textContent.endsWith('rounds done')")
    tab.show(f"{address}budget")
    tab.evaluate(
        "const slider = document.querySelector('[data-for=epsilon]'); slider.value = 0.5;"
        "slider.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    epsilon = float(tab.evaluate("document.querySelector('[name=epsilon]').value"))
    assert 2 < epsilon < 4  # the middle of 0.1 … 100 by logarithms
    answer = format_claim(calibrate(epsilon=epsilon).sigma)
    tab.wait_for(f"document.getElementById('live_answer').textContent.includes('{answer}')")
    assert f"epsilon={epsilon:g}" in tab.evaluate("location.search")
