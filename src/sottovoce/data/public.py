"""What the server of a real federation holds itself: public rows to validate and to test on.

One `.npz` file: `validation_x`, `validation_y`, `test_x`, `test_y`; `shape` (of one sample) and
`classes`; of a table also `layout`, how its rows became numbers; `fresh_vaults`, where the clients
were dealt with them and have vaults for one run only. No pickle, and no training rows.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sottovoce.data.federated import Holdings, Samples
from sottovoce.data.files import read_npz, why, write_file
from sottovoce.data.tables import Layout
from sottovoce.errors import DataError

PARTS = ("validation", "test")


def save(path: Path, held: Holdings) -> None:
    """Write the public part of holdings; what clients hold is not in it."""
    arrays: dict[str, NDArray[np.generic]] = {
        "shape": np.array(held.shape, dtype=np.int64),
        "classes": np.array(held.classes, dtype=np.int64),
    }
    for part in PARTS:
        rows: Samples = getattr(held, part)
        arrays |= {f"{part}_x": rows.x, f"{part}_y": rows.y}
    if held.layout is not None:
        text = json.dumps(held.layout.to_json()).encode()
        arrays["layout"] = np.frombuffer(text, dtype=np.uint8)
    if held.fresh_vaults:
        arrays["fresh_vaults"] = np.array(True)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    write_file(path, buffer.getvalue())


def load(path: Path) -> Holdings:
    """Read what `save` wrote, or what an operator made; a sentence if it cannot be used."""
    try:
        arrays = read_npz(path)
        shape = tuple(int(size) for size in arrays["shape"].reshape(-1))
        classes = int(arrays["classes"])
        validation, test = (_samples(arrays, part, shape, classes) for part in PARTS)
        text = arrays["layout"].tobytes() if "layout" in arrays else None
        layout = None if text is None else Layout.from_json(json.loads(text))
        fresh = "fresh_vaults" in arrays
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path} cannot be read as public rows: {why(error)}; it needs validation_x, "
            "validation_y, test_x, test_y, shape and classes"
        ) from None
    nobody = Samples(validation.x[:0], validation.y[:0])
    none = np.zeros(0, dtype=np.int64)
    return Holdings(
        none, nobody, validation, test, None, shape, classes, layout, fresh_vaults=fresh
    )


def _samples(
    arrays: dict[str, NDArray[np.generic]], part: str, shape: tuple[int, ...], classes: int
) -> Samples:
    x, y = arrays[f"{part}_x"], arrays[f"{part}_y"]
    if x.dtype.kind not in "fiu" or y.dtype.kind not in "iu" or y.ndim != 1 or len(y) == 0:
        raise ValueError(f"{part}_x must be numbers and {part}_y whole numbers, one row or more")
    rows = x.astype(np.float32).reshape(len(x), -1)
    if len(rows) != len(y) or rows.shape[1] != int(np.prod(shape, dtype=int)):
        raise ValueError(f"{part}_x and {part}_y are no rows of shape {shape}")
    if y.min() < 0 or y.max() >= classes or not np.isfinite(rows).all():
        raise ValueError(f"{part} has a label beyond {classes - 1}, or a number that is not finite")
    return Samples(rows, y.astype(np.int32))
