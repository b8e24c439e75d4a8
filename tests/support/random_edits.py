"""Random edits of what a JSON file holds, for tests that a reader survives any of them."""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from typing import Any

ODD = (
    None, "text", "", [], {}, -1, 0, 0.5, True, 1e308, float("nan"), float("inf"), 10**30, 10**400,
    [1, "x"], [[1, 2], [3]], {"a": 1}, [None], "1", "\ud800", "$x$",
)  # fmt: skip


def list_places(thing: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """List where a value stands, as the keys and indices that lead to it."""
    found = []
    for key, value in thing.items() if isinstance(thing, dict) else enumerate(thing):
        found.append((*place, key))
        if isinstance(value, dict | list):
            found += list_places(value, (*place, key))
    return found


def edit_randomly(content: Any, rng: random.Random) -> tuple[Any, list[Any]]:
    """Return the content with one to three values removed or replaced, and what was done.

    Each kind of place is as likely as any other, however long its list is.
    """
    kinds = defaultdict(list)
    for place in list_places(content):
        kinds[tuple(key if isinstance(key, str) else 0 for key in place)].append(place)
    edited, done = copy.deepcopy(content), []
    for _ in range(rng.choice((1, 1, 2, 3))):
        *path, last = rng.choice(kinds[rng.choice(list(kinds))])
        value = copy.deepcopy(rng.choice((KeyError, *ODD, 10 ** rng.uniform(-20, 20))))
        try:
            inside = edited
            for key in path:
                inside = inside[key]
            if value is KeyError:
                del inside[last]
            else:
                inside[last] = value
        except (LookupError, TypeError):
            continue  # an edit before it has removed this place
        done.append(((*path, last), value))
    return edited, done
