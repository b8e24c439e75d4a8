"""What is public about a table's columns: bounds of numbers, categories of texts.

Everybody may know them: the model's inputs are scaled by them, so they are a release. They come
from the plan (a codebook, the law, common sense), and from the data only if the plan asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn, TypeAlias

from sottovoce.errors import PlanError
from sottovoce.plan.refusals import named

Spec: TypeAlias = tuple[float, float] | tuple[str, ...]  # bounds, or categories; () is left out

WIDEST = 1e30  # a bound beyond it does not survive float32
MOST_CATEGORIES = 10_000


class Columns(dict[str, Spec]):
    """Column → what is public about it, in the order of the model's inputs; not to be changed.

    >>> len({Columns(age=(0.0, 120.0)), Columns(age=(0.0, 120.0))})
    1
    """

    def __hash__(self) -> int:  # type: ignore[override]  # it is frozen, so that plans are
        return hash(tuple(self.items()))

    def __eq__(self, other: object) -> bool:
        # Another order is another order of the model's inputs.
        return isinstance(other, dict) and list(self.items()) == list(other.items())

    def __ne__(self, other: object) -> bool:
        return not self == other

    def _frozen(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("the columns of a plan are frozen; make another plan with replace")

    __setitem__ = __delitem__ = update = pop = clear = _frozen
    setdefault = popitem = __ior__ = _frozen


def checked(value: Any, label: str | None = None) -> Columns:
    """`data.columns` as it was written, checked; the label's list is always of categories.

    >>> checked({"age": [0, 120], "sex": ["f", "m"], "rich": [0, 1]}, label="rich")
    {'age': (0.0, 120.0), 'sex': ('f', 'm'), 'rich': ('0', '1')}
    >>> checked({"age": [120, 0]})
    Traceback (most recent call last):
        ...
    sottovoce.errors.PlanError: data.columns.age must be [low, high] with low < high, \
got [120, 0]; swap them
    """
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise PlanError.of(
            "data.columns",
            value,
            "a table of columns",
            "write [data.columns] and below it age = [0, 120] or sex = ['f', 'm']",
        )
    return Columns({name: _spec(name, items, name == label) for name, items in value.items()})


def _spec(column: str, given: Any, is_label: bool) -> Spec:
    where = named("data", "columns", column)
    items = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(items, list | tuple):
        raise PlanError.of(
            where,
            given,
            "a list of categories" if is_label else "[low, high] or a list of categories",
            "say what is public about the column",
        )
    numbers = [item for item in items if isinstance(item, int | float)]
    numbers = [item for item in numbers if not isinstance(item, bool)]
    if is_label or len(numbers) == 0:
        return _categories(where, items, is_label)
    if len(numbers) != 2 or len(items) != 2:
        raise PlanError.of(
            where,
            list(items),
            "[low, high] for a number or a list of texts for categories",
            "put categories that are numbers into quotes",
        )
    low, high = float(items[0]), float(items[1])
    if not (math.isfinite(low) and math.isfinite(high) and max(abs(low), abs(high)) <= WIDEST):
        raise PlanError.of(
            where, list(items), f"finite bounds up to {WIDEST:g}", "give those that are public"
        )
    if not low < high:
        remedy = "swap them" if low > high else "leave out a column that is always the same"
        raise PlanError.of(where, list(items), "[low, high] with low < high", remedy)
    return low, high


def _categories(where: str, items: list[Any] | tuple[Any, ...], is_label: bool) -> tuple[str, ...]:
    texts = tuple(text_of(item) for item in items)
    for item, text in zip(items, texts, strict=True):
        if not text:
            remedy = "list texts; a missing value needs no category"
            raise PlanError.of(where, item, "a list of categories that are texts", remedy)
    if len(set(texts)) != len(texts):
        twice = next(text for text in texts if texts.count(text) > 1)
        raise PlanError(f"{where} lists {twice[:60]!a} twice; list each category once")
    if len(texts) > MOST_CATEGORIES:
        raise PlanError(
            f"{where} lists {len(texts)} categories and {MOST_CATEGORIES} is the most; "
            "make them coarser or leave the column out"
        )
    if is_label and len(texts) < 2:
        raise PlanError.of(
            where, list(items), "two categories or more", "they are the classes of the label"
        )
    return texts


def text_of(value: object) -> str:
    """A category as it is compared with cells: without spaces around it; "" if it cannot be one.

    >>> text_of(" Private"), text_of(1.0), text_of(True), text_of(None)
    ('Private', '1', 'true', '')
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, float) and not math.isfinite(value):
        return ""
    return str(value).strip() if isinstance(value, str | int | float) else ""
