"""What a ledger knows by key: the newest values in memory, all others in a hash tree in the file.

A leaf of the tree holds up to 16 records; one that would hold more becomes an inner node with 16
children, chosen by the next digit of SHA-256 of the key. A node is named by the digits before it
and checked by its own SHA-256, which its parent holds; the hash of the root stands for all of it:

    look up:  root → … → leaf, at most log₁₆(records) + 1 nodes, each checked by its hash

So neither a changed nor a missing record goes unnoticed where it is asked for, and "there is no
such record" is as certain as a record. Nothing is removed, so equal records make an equal tree.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from sottovoce.client.vault.chain import canonical
from sottovoce.errors import VaultRefusal

_MOST = 16  # records of a leaf


class Records:
    """Values by key, over a tree whose nodes `read` returns by name (None: there is no such)."""

    def __init__(self, read: Callable[[str], str | None], root: str = "") -> None:
        self.changed: dict[str, Any] = {}  # since the tree was written
        self._read, self._root = read, root  # no root: an empty tree

    def get(self, *key: object) -> Any:
        """Return the value of a key, None if it has none; refuse a damaged node."""
        name = canonical(key)
        if name in self.changed:
            return self.changed[name]
        digits, depth, wanted = _hash(name), 0, self._root
        while wanted:
            node = self._node(digits[:depth], wanted)
            if isinstance(node, dict):
                return node.get(name)
            wanted, depth = node[int(digits[depth], 16)], depth + 1
        return None

    def put(self, *key: object, value: Any) -> None:
        """Set the value of a key, in memory."""
        self.changed[canonical(key)] = value

    def fold(self) -> tuple[str, dict[str, str]]:
        """Move all changes into the tree: its new root, and the nodes to write."""
        nodes: dict[str, str] = {}
        if self.changed:
            by_digits = {_hash(name): (name, value) for name, value in self.changed.items()}
            self._root = self._merge("", self._root, by_digits, nodes)
            self.changed = {}
        return self._root, nodes

    def _merge(
        self, place: str, wanted: str, more: Mapping[str, tuple[str, Any]], nodes: dict[str, str]
    ) -> str:
        """Add records to the node of this name and those below it; the node's new hash."""
        node = self._node(place, wanted) if wanted else {}
        if isinstance(node, dict):
            more = {**{_hash(name): (name, value) for name, value in node.items()}, **more}
            node = dict(more.values()) if len(more) <= _MOST else [""] * 16
        if isinstance(node, list):
            parts: dict[str, dict[str, tuple[str, Any]]] = {}
            for digits, record in more.items():
                parts.setdefault(digits[len(place)], {})[digits] = record
            for digit, part in parts.items():
                child = int(digit, 16)
                node[child] = self._merge(place + digit, node[child], part, nodes)
        nodes[place] = canonical(node)
        return _hash(nodes[place])

    def _node(self, place: str, wanted: str) -> Any:
        content = self._read(place)
        if content is None or _hash(content) != wanted:
            raise VaultRefusal(
                f"the vault is damaged (node {place or 'root'} of its records is not the one that "
                "was written); put its backup back and run `sottovoce ledger rebind VAULT "
                "--restored`"
            )
        return json.loads(content)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
