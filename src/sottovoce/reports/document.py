"""The frame of every page we write: one HTML file that asks nothing of the network.

The page states its own rule in a Content-Security-Policy: no scripts, no images, no connections.
"""

from __future__ import annotations

from importlib import resources

from sottovoce.reports.text import escape

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def document(*, title: str, css: str, body: str) -> str:
    """A whole page; `title` is plain text, `body` is HTML that has been escaped already.

    >>> page = document(title="a < b", css="", body="<p>hello</p>")
    >>> "<title>a &lt; b</title>" in page, "Content-Security-Policy" in page
    (True, True)
    """
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{css}</style>
</head>
<body>
{body}
</body>
</html>
"""


def sheet(package: str, file: str) -> str:
    """One style sheet as it lies in its package."""
    return resources.files(package).joinpath(file).read_text("utf-8")
