"""A device that answers with its name and what it was sent; `boom` makes it fail with a secret."""

import time
from pathlib import Path

from sottovoce.flower.client_app import build_app


class Echo:
    """The node file holds the client's name, and perhaps how long to think."""

    def hello(self, node: Path) -> bytes:
        return node.read_text().split()[0].encode()

    def answer(self, request: bytes, node: Path) -> bytes:
        name, *seconds = node.read_text().split()
        if request.startswith(b"boom"):
            raise RuntimeError("the secret sample is 42")
        time.sleep(float(seconds[0]) if seconds else 0.0)
        return name.encode() + b" " + request


app = build_app(Echo())
