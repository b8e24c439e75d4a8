"""Write the parts of the documentation that follow from the code.

A page has a line `<!-- generated: NAME -->`; when Sphinx reads the page, `fill` puts the Markdown
of the function NAME there; at `<!-- shown: PAGE.md -->`, a page of the repository's root. Nothing
of it is committed, so that it cannot differ from the code.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import links
import pictures
import typer.main

import sottovoce
from sottovoce import errors
from sottovoce.cli import commands
from sottovoce.plan import Plan
from sottovoce.plan.base import TABLES

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MARK = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
SHOW = re.compile(r"^<!-- shown: (\w+\.md) -->$", re.MULTILINE)
FILE_NAME = re.compile(r"\[[\w/-]+\.md\]\((?!https?:|path:)([^)\s]+)\)")
#: Pages of the repository that the site shows as well.
SHOWN = {"ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"}


def escape_cell(text: object) -> str:
    """Return text for a cell of a table: one line, no bars, no tags."""
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(str(text).split())).replace("<", "&lt;")


def format_table(*rows: tuple[object, ...]) -> str:
    """Return a table in Markdown; the first row is its head."""
    lines = ["| " + " | ".join(map(escape_cell, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]) + "\n"


# --- the keys of a plan


def describe_values(schema: dict[str, Any]) -> str:
    """Say in words what a JSON Schema allows."""
    if "anyOf" in schema:
        return " or ".join(
            map(describe_values, [s for s in schema["anyOf"] if s != {"type": "null"}])
        )
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "any value")
    if kind == "array":
        items = schema.get("items", {})
        return (
            f"a list ({describe_values(items)})" if isinstance(items.get("type"), str) else "a list"
        )
    if kind == "object":
        return "a table of lists"
    word = {
        "integer": "whole number",
        "number": "number",
        "string": "text",
        "boolean": "true or false",
    }
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [
        f"{sign} {int(bound) if (bound := schema[key]) == int(bound) else bound:,}"
        for key, sign in signs.items()
        if key in schema
    ]
    return " ".join([word.get(kind, str(kind)), ", ".join(limits)]).strip()


def write_toml(value: object) -> str:
    """Return a value as a plan has it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {write_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(write_toml, value)) + "]"
    return str(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def list_plan_keys() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield section, key and schema of every key of a plan."""
    schema = Plan.model_json_schema()
    for name, value in schema["properties"].items():
        if "$ref" not in value:
            yield "", name, value
    for name, value in schema["properties"].items():
        if "$ref" in value:
            for key, inner in schema["$defs"][value["$ref"].rpartition("/")[2]][
                "properties"
            ].items():
                yield name, f"{name}.{key}", inner


def plan_keys() -> str:
    """Write one table per section of a plan."""
    parts, open_section = [], None
    conditions = {
        f"{section}.{key}": when
        for section, table in TABLES.items()
        for key, when in table.conditions()
    }
    rows: list[tuple[object, ...]] = []
    for section, key, schema in [*list_plan_keys(), ("end", "", {})]:
        if section != open_section:
            if rows:
                parts.append(format_table(("key", "meaning", "values", "default"), *rows))
            if section == "end":
                break
            about = TABLES[section].__doc__ if section else "Beside the sections."
            parts.append(
                f"## `[{section}]`\n\n{about}\n" if section else f"## At the top\n\n{about}\n"
            )
            open_section, rows = section, []
        default = schema.get("default")
        example = (
            f" Example: `{write_toml(schema['examples'][0])}`." if "examples" in schema else ""
        )
        shown = "absent" if default is None else f"`{write_toml(default)}`"
        if (when := conditions.get(key)) is not None and when.default is not None:
            shown = f"`{write_toml(when.default)}` with `{when.switch} = {write_toml(when.value)}`"
        meaning = schema["description"] + "." + example
        rows.append((f"`{key}`", meaning, describe_values(schema), shown))
    return "\n".join(parts)


# --- the command line


def walk_commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    """Yield every command with the words that call it."""
    yield path, command
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            if not child.hidden:
                yield from walk_commands(child, f"{path} {name}")


def command_line() -> str:
    """Write usage, help and options of every command."""
    parts = []
    for path, command in walk_commands(typer.main.get_command(commands.app), "sottovoce"):
        context = click.Context(command, info_name=path)
        about, _, examples = inspect.cleandoc(command.help or "").partition("\b\n")
        lines = [line.strip() for line in examples.splitlines() if line.startswith("  ")]
        parts.append(f"## {path}\n\n{about}\n")
        if not isinstance(command, click.Group):
            usage = command.get_usage(context).removeprefix("Usage: ")
            parts.append(f"```text\n{usage}\n```\n")
        if lines:
            parts.append("```console\n" + "\n".join(f"$ {line}" for line in lines) + "\n```\n")
        records = [record for p in command.params if (record := p.get_help_record(context))]
        if records:
            rows = [(f"`{name}`", about) for name, about in records]
            parts.append(format_table(("argument or option", "meaning"), *rows))
    return "\n".join(parts)


# --- Python


def format_docstring(text: str) -> str:
    """Turn a docstring into Markdown: doctests become blocks of code, tags are escaped."""
    blocks = []
    for block in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        before, mark, test = block.partition(">>> ")
        if before.strip():
            code = before.startswith("    ")
            blocks.append(
                before.rstrip() if code else re.sub(r"<(?=[a-zA-Z/!])", r"\\<", before.rstrip())
            )
        if mark:
            blocks.append(f"```pycon\n{mark}{textwrap.dedent(test)}\n```")
    return "\n\n".join(blocks)


def format_signature(thing: object) -> str:
    """Return the parameters of a function or class; annotations without quotes."""
    try:
        signature = str(inspect.signature(thing))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return "()"
    signature = re.sub(r"(?<=: |> )(['\"])(.*?)\1(?=[,) ]|$)", r"\2", signature)
    return signature.removesuffix(" -> None") if inspect.isclass(thing) else signature


def list_members(cls: type) -> Iterator[tuple[str, str, object]]:
    """Yield kind, name and object of the public methods and properties that a class itself has."""
    for name, value in vars(cls).items():
        inner = getattr(value, "__func__", getattr(value, "func", getattr(value, "fget", value)))
        if name.startswith("_") or not inspect.isfunction(inner) or not inspect.getdoc(inner):
            continue
        is_method = inspect.isfunction(value) or isinstance(value, (classmethod, staticmethod))
        yield "method" if is_method else "attribute", name, inner


def format_object(kind: str, name: str, thing: object, body: str, fence: str) -> str:
    """Return a directive of Sphinx' Python domain."""
    signature = format_signature(thing) if kind != "attribute" else ""
    signature = re.sub(r"^\((?:self|cls)(?:, )?", "(", signature)
    return f"{fence}{{py:{kind}}} {name}{signature}\n\n{body}\n{fence}\n"


def python_names() -> str:
    """Write every public name with its signature, its docstring and its members."""
    parts = []
    for name in sottovoce.__all__:
        thing = getattr(sottovoce, name)
        if inspect.isclass(thing) and issubclass(thing, Exception):
            continue  # the index of errors has them
        kind = "class" if inspect.isclass(thing) else "function"
        body = format_docstring(inspect.getdoc(thing) or "")
        if inspect.isclass(thing):
            for member, key, value in list_members(thing):
                about = format_docstring(inspect.getdoc(value) or "")
                body += "\n\n" + format_object(member, key, value, about, "`````")
        parts.append(
            f"## {name}\n\n" + format_object(kind, f"sottovoce.{name}", thing, body, "``````")
        )
    return "\n".join(parts)


# --- errors and schemas


def list_raisers() -> dict[str, set[str]]:
    """Return for every error the packages that raise it."""
    found: dict[str, set[str]] = {}
    source = ROOT / "src" / "sottovoce"
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func).removesuffix(".of").rpartition(".")[2]
                found.setdefault(name, set()).add(
                    path.relative_to(source).parts[0].removesuffix(".py")
                )
    return found


def error_index() -> str:
    """Write the tree of errors, and one row per class."""
    classes = [t for t in vars(errors).values() if inspect.isclass(t) and issubclass(t, Exception)]
    raisers = list_raisers()
    rows = [
        (
            f"`{cls.__name__}`",
            inspect.getdoc(cls),
            f"`{cls.__bases__[0].__name__}`",
            2 if issubclass(cls, errors.InputError) else 1,
            ", ".join(f"`{name}`" for name in sorted(raisers.get(cls.__name__, ()))),
        )
        for cls in classes
    ]
    tree = textwrap.dedent((errors.__doc__ or "").split("\n\n")[1])
    head = ("error", "meaning", "is a", "exit code", "raised in")
    return f"```text\n{tree}\n```\n\n{format_table(head, *rows)}"


def json_schemas() -> str:
    """Write the keys of every JSON document."""
    parts = []
    for path in sorted((ROOT / "src/sottovoce/schemas").glob("*.json")):
        schema = json.loads(path.read_text("utf-8"))
        link = f"[{path.name}](../../src/sottovoce/schemas/{path.name})"
        about = f"{schema['title']}. {schema.get('description', '')} Schema: {link}."
        parts.append(f"## {path.stem}\n\n{about}\n")
        rows = [
            (f"`{key}`", resolve(value, schema).get("description", ""))
            for key, value in schema["properties"].items()
        ]
        parts.append(format_table(("key", "meaning"), *rows))
    return "\n".join(parts)


def resolve(value: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Follow a reference inside a JSON Schema."""
    return schema["$defs"][value["$ref"].rpartition("/")[2]] | value if "$ref" in value else value


# --- the site itself


def list_other_pages(folder: Path) -> str:
    """Write a toctree of the pages of a folder that no index lists."""
    listed = set()
    for index in DOCS.rglob("index.md"):
        for block in re.findall(r"```{toctree}\n(.*?)```", index.read_text("utf-8"), re.DOTALL):
            for entry in re.findall(r"^[\w/-]+$", block, re.MULTILINE):
                listed.add(DOCS / entry[1:] if entry.startswith("/") else index.parent / entry)
    pages = sorted(page.stem for page in folder.glob("*.md") if page.with_suffix("") not in listed)
    pages = [page for page in pages if page != "index"]
    return "\n".join(["```{toctree}", ":maxdepth: 1", "", *pages, "```"]) if pages else ""


def show_page(name: str) -> str:
    """Return a page of the root without its title, its links as seen from docs/project/."""

    def mend(found: re.Match[str]) -> str:
        target = found[1]
        if target.startswith("docs/"):
            return "](../" + target.removeprefix("docs/")
        page = target.partition("#")[0]
        return "](" + (target.replace(page, page.lower()) if page in SHOWN else f"../../{target}")

    text = (ROOT / name).read_text("utf-8").partition("\n")[2]
    return FILE_NAME.sub(r"[](\1)", re.sub(r"\]\((?!https?://|#)([^)\s]+)", mend, text))


MAKERS = {
    make.__name__: make
    for make in (
        plan_keys,
        command_line,
        python_names,
        error_index,
        json_schemas,
        pictures.who_sees_what,
        pictures.budget_to_noise,
        pictures.house,
    )
}


def fill(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put what follows from the code in the place of each mark, and mend links to shown pages."""
    up = "../" * docname.count("/")
    text = source[0]
    for page in SHOWN:
        text = text.replace(f"]({up}../{page}", f"]({up}project/{page.lower()}")
    here = (DOCS / docname).parent

    def fetch(found: re.Match[str]) -> str:
        """Let a Markdown file outside of docs/ be downloaded: it is no page of the site."""
        inside = (here / found[1]).resolve().is_relative_to(DOCS)
        return found[0] if inside else f"](path:{found[1]}"

    text = re.sub(r"\]\((\.\./[^)#\s:]*\.md)", fetch, text)
    text = FILE_NAME.sub(r"[](\1)", text)  # a link that is named by its file gets the page's title
    text = SHOW.sub(lambda found: show_page(found[1]), text)
    text = text.replace("<!-- other pages -->", list_other_pages(here))
    source[0] = MARK.sub(lambda found: MAKERS[found[1]](), text)


def check_site(app: Sphinx, error: Exception | None) -> None:
    """Fail the build if a link is dead or a page would load something from the network."""
    faults = [] if error or app.builder.name != "html" else links.find_faults(Path(app.outdir))
    if faults:
        raise RuntimeError("\n".join(faults))


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("source-read", fill)
    app.connect("build-finished", check_site)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
