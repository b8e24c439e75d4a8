"""Check a built site: every link inside it leads somewhere, and no page loads from the network."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote


class Page(HTMLParser):
    """What one page links to, what it loads, and the places in it that can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Collect the addresses of a tag."""
        found = {name: value for name, value in attributes if value}
        self.places |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif "href" in found and tag != "use":
            self.loads.append(found["href"])
        self.loads += [found[name] for name in ("src", "data") if name in found]
        self.loads += re.findall(r"url\(([^)]*)\)", found.get("style", ""))


def find_faults(site: Path) -> list[str]:
    """Return one line for every dead link, missing file and load from the network."""
    pages = {path: Page(path.read_text("utf-8")) for path in sorted(site.rglob("*.html"))}
    faults = []
    for path, page in pages.items():
        for link in [*page.links, *page.loads]:
            if re.match(r"(?:https?:)?//", link):
                if link in page.loads:
                    faults.append(f"{path.relative_to(site)} loads {link}")
                continue
            if re.match(r"\w+:", link):
                continue
            file, _, place = link.partition("#")
            target = (path.parent / unquote(file.partition("?")[0])).resolve() if file else path
            if not target.exists():
                faults.append(f"{path.relative_to(site)} links to {file}, which is missing")
            elif place and target in pages and unquote(place) not in pages[target].places:
                faults.append(f"{path.relative_to(site)} links to {link}, which has no such place")
    for path in site.rglob("*.css"):
        for found in re.findall(
            r"(?:url\(|@import )[\"']?(https?://[^)\"']*)", path.read_text("utf-8")
        ):
            faults.append(f"{path.relative_to(site)} loads {found}")
    return faults
