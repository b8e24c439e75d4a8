"""The documentation site: what is generated is whole, and the check of its links can fail.

`make docs` builds the site, executes its tutorials, and fails at any warning or dead link.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import sys

import pytest

import sottovoce
from sottovoce import errors
from support import ROOT

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def generated():
    """The extension of docs/conf.py, which needs no Sphinx to write its parts."""
    sys.path.insert(0, str(DOCS / "_ext"))
    try:
        yield importlib.import_module("generated")
    finally:
        sys.path.pop(0)


def test_the_reference_has_every_key_command_name_and_error(generated):
    keys = [key for _, key, _ in generated.list_plan_keys()]
    assert len(keys) > 60
    text = generated.plan_keys()
    assert [key for key in keys if f"| `{key}` |" not in text] == []
    assert '| `0.8` with `schedule = "discounted"` |' in text
    text = generated.command_line()
    for command in ("train", "federate", "ledger rebind", "server init", "node init"):
        assert f"## sottovoce {command}\n" in text
    names, index = generated.python_names(), generated.error_index()
    for name in sottovoce.__all__:
        assert f"sottovoce.{name}" in names or f"| `{name}` |" in index
    for name, thing in vars(errors).items():
        if inspect.isclass(thing) and issubclass(thing, Exception):
            assert f"| `{name}` |" in index
    assert json.loads((ROOT / "src/sottovoce/schemas/plan.json").read_text())["title"]
    assert "## record\n" in generated.json_schemas()


def test_what_a_value_may_be_is_said_in_words(generated):
    number = {"type": "integer", "minimum": 1, "exclusiveMaximum": 9}
    assert generated.describe_values(number) == "whole number ≥ 1, < 9"
    large = {"type": "number", "exclusiveMinimum": 0.5, "maximum": 1e6}
    assert generated.describe_values(large) == "number > 0.5, ≤ 1,000,000"
    either = {"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}, {"type": "array", "items": number}]}
    assert generated.describe_values(either) == "`a`, `b` or a list (whole number ≥ 1, < 9)"


def test_docstrings_become_markdown(generated):
    text = "Return x.\n\nOf a <list> it\nis:\n\n    f(x)\n\n>>> f(1)\n2\n"
    made = generated.format_docstring(text)
    assert made == "Return x.\n\nOf a \\<list> it\nis:\n\n    f(x)\n\n```pycon\n>>> f(1)\n2\n```"


def test_the_pictures_show_what_the_code_computes(generated):
    """A fixed horizon has constant noise; one that shrinks has less in the rounds that remain."""
    pictures = generated.pictures
    losses = [1.0] * 200
    fixed = pictures.spend_budget(losses, pictures.FixedRounds(40), 8.0)
    shrinking = pictures.spend_budget(losses, pictures.DiscountedRounds(40, zeta=1e-3), 8.0)
    assert max(row[2] for row in fixed) == pytest.approx(fixed[0][2], rel=1e-6)
    assert shrinking[-1][2] < 0.8 * fixed[0][2]
    assert fixed[-1][1] == pytest.approx(0, abs=1e-9)
    assert 0 <= shrinking[-1][1] < 1
    for picture in (pictures.who_sees_what(), pictures.budget_to_noise(), pictures.house()):
        assert "\n\n" not in picture  # an empty line would end the HTML inside Markdown
    assert all(f">{room}<" in pictures.house() for room in ("privacy", "client", "server", "cli"))


def test_a_new_page_is_listed_without_another_change(generated, tmp_path):
    (tmp_path / "new.md").write_text("# New\n")
    assert "\nnew\n" in generated.list_other_pages(tmp_path)


def test_dead_links_and_loads_from_the_network_are_found(generated, tmp_path):
    (tmp_path / "good.html").write_text(
        '<a href="other.html#there">x</a><a href="https://example.org">y</a><img src="a.png">'
        '<img src="data:image/png;base64,AA"><a href="#here" id="here">z</a>'
    )
    (tmp_path / "other.html").write_text('<p id="there">')
    (tmp_path / "a.png").write_bytes(b"")
    assert generated.links.find_faults(tmp_path) == []
    (tmp_path / "bad.html").write_text(
        '<a href="other.html#nowhere">x</a><a href="gone.html">y</a>'
        '<script src="https://cdn.example.org/x.js"></script><link href="//fonts.example.org/f">'
    )
    (tmp_path / "bad.css").write_text("p { background: url(https://example.org/x.png) }")
    faults = generated.links.find_faults(tmp_path)
    assert len(faults) == 5
    assert all("bad." in fault for fault in faults)


PAGES = sorted(path for path in DOCS.rglob("*.md") if "decisions" not in path.parts)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_a_page_begins_with_what_the_reader_can_do_after_it(path):
    text = re.sub(r"\A---\n.*?\n---\n", "", path.read_text("utf-8"), flags=re.DOTALL)
    title, _, rest = text.strip().partition("\n\n")
    assert re.fullmatch("# .+", title)
    opening = " ".join(rest.partition("\n\n")[0].split())
    assert re.match("After (this|these) pages?|Look up here|Find here|From here", opening), opening


def test_a_page_may_link_to_markdown_that_is_no_page_of_the_site(generated):
    source = ["[a](../results/a.md) [b.md](b.md#c) [d](../ARCHITECTURE.md)"]
    generated.fill(None, "horizon", source)
    assert source == ["[a](path:../results/a.md) [](b.md#c) [d](project/architecture.md)"]
