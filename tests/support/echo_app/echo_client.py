"""A device that answers with its name and what it was sent; `boom` makes it fail with a secret."""

import time
from pathlib import Path

from sottovoce.flower.client_app import build_app


class Echo:
    """The node file holds the client's name; beside it, `.asked` appears and `.hold` holds it."""

    def hello(self, node: Path) -> bytes:
        return node.read_text().encode()

    def answer(self, request: bytes, node: Path) -> bytes:
        if request.startswith(b"boom"):
            raise RuntimeError("the secret sample is 42")
        node.with_suffix(".asked").touch()
        while node.with_suffix(".hold").exists():
            time.sleep(0.02)
        return self.hello(node) + b" " + request


app = build_app(Echo())
