"""One round of a batch of runs as one XLA program, and the engine that launches it.

A round is linear in the uploads, w^{t+1} = w − Σ_i p_i·(η/n_i)·Σ_m clip(g_m) + Σ_i p_i·n_i, so the
cohort's samples are one matrix in which every row carries c_i = p_i·η/n_i of its client, and the
averaged noise is one draw of standard deviation √(Σ p_i²σ_i²): equal in distribution to drawing
every client's noise, and K times cheaper. Clients outside the cohort have p_i = 0; where `members`
names the cohort, their rows are not read.

With several local steps (noise at each) the clients' models differ, and the round goes through the
cohort client by client instead; memory stays that of two models and one client's rows.

The inputs of a round (`Orders`) are packed into one array of bits, because a transfer to an
accelerator costs more than its bytes. A compiled round has a fixed number of seats, each for one
run. A run keeps its seat until it is over; when half of the seats are empty, a program with fewer
seats takes over.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, cast
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import ArrayLike, NDArray

from sottovoce.data.federated import Samples
from sottovoce.data.streaming import is_stored
from sottovoce.errors import RunError
from sottovoce.models import clipping
from sottovoce.models.base import Inspected, JaxModel, Model, Params, flatten_parameters
from sottovoce.privacy import seeds as seeding
from sottovoce.privacy.seeds import Purpose
from sottovoce.privacy.tank import stack_rows
from sottovoce.runs.checkpoint import ServerState
from sottovoce.schedules import optimizer
from sottovoce.schedules.optimizer import OPTIMIZER, StepInputs
from sottovoce.server import rounds
from sottovoce.server.federation import Federation, put_on_device

Shape = tuple[int, ...]
AXIS = "devices"
_spec: Any = PartitionSpec
_psum: Any = jax.lax.psum
DIVIDED, BY_DEVICE, WHOLE = _spec(None, AXIS), _spec(AXIS), _spec()


class Packing(NamedTuple):
    """How words are unpacked: the tree's structure, shape (without runs) and type of each leaf."""

    structure: Any
    leaves: tuple[tuple[Shape, str], ...]


def pack(orders: Any) -> tuple[NDArray[np.uint32], Packing]:
    """Pack a tree of arrays [runs, …] of four- or eight-byte numbers into [runs, words].

    >>> words, layout = pack({"a": np.array([1.5], np.float32), "b": np.array([[7, 8]], np.uint32)})
    >>> jax.tree.map(lambda leaf: leaf.tolist(), unpack(jnp.asarray(words), layout))
    {'a': [1.5], 'b': [[7, 8]]}
    """
    leaves, structure = jax.tree.flatten(orders)
    wide = [i for i, leaf in enumerate(leaves) if leaf.dtype.itemsize == 8]
    for i in wide:
        leaves[i] = leaves[i].astype(jax.dtypes.canonicalize_dtype(leaves[i].dtype))
    runs = len(leaves[0])
    words = [np.ascontiguousarray(leaf).view(np.uint32).reshape(runs, -1) for leaf in leaves]
    kinds = tuple((leaf.shape[1:], leaf.dtype.str) for leaf in leaves)
    return np.concatenate(words, axis=1), Packing(structure, kinds)


def unpack(words: Array, layout: Packing) -> Any:
    """Return the tree that was packed, inside a compiled program."""
    leaves, at = [], 0
    for shape, kind in layout.leaves:
        dtype = jnp.dtype(kind)
        whole = (words.shape[0], *shape) + (() if dtype.itemsize == 4 else (2,))
        size = math.prod(whole[1:])
        words_of_leaf = words[:, at : at + size].reshape(whole)
        leaves.append(jax.lax.bitcast_convert_type(words_of_leaf, dtype))
        at += size
    return jax.tree.unflatten(layout.structure, leaves)


class StackedRows(NamedTuple):
    """The samples of one or several splits, stacked: a run names the split it uses."""

    x: Any  # [splits, n, features], or `Inspected` with the same leading axis
    y: Array  # [splits, n]
    owner: Any  # [splits, n]: the client a row belongs to
    samples: Any  # [splits, clients]: how many rows each client has
    valid_x: Array  # [splits, v, features]: the public validation set
    valid_y: Array  # [splits, v]


class Orders(NamedTuple):
    """Inputs of a round, one entry a run."""

    split: Any  # [runs] int32
    weight: Any  # [runs, clients] float32: p_i
    rate: Any  # [runs] float32: η
    clip: Any  # [runs] float32: C
    std: Any  # [runs] float32: √(Σ p_i²σ_i²), for one local step
    sigma: Any  # [runs, steps, clients] float32: σ_i, for several
    signal_std: Any  # [runs] float32: √(Σ p_i²σ_V,i²), for the signal `clients`
    bound: Any  # [runs] float32: B, for the signal `clients`
    key: Any  # [runs, 2] uint32: the two words of a key
    finish: StepInputs | None = None  # each [runs] float32; None where the server adds nothing
    class_weights: Any = None  # [runs, classes] float32; None: every class counts alike
    # [runs, K] int32: every client with p_i > 0, each once, filled up with others; None: all rows.
    members: Any = None


class RoundResult(NamedTuple):
    """The new models and how good they are, one entry a run."""

    params: Params
    # [runs, 4]: validation loss and accuracy, signal, and the public signal of the model that the
    # run would return now; one array is quick to fetch.
    score: Array
    memory: dict[str, Params] = {}  # noqa: RUF012  # the optimiser's models; never written to


class RoundOptions(NamedTuple):
    """What a compiled round depends on beside its inputs."""

    signal: Literal["public", "clients", "raw"] = "public"
    metric: str | None = None  # the plan's; None: the loss steers schedule and `server.choose`
    longest: int = 0  # rows of any client at most, where the round goes client by client
    mesh: Mesh | None = None  # the devices among which rows are divided

    @property
    def evaluating_mesh(self) -> Mesh | None:
        """The devices that divide the evaluation; None where each of them evaluates all rows.

        Devices made of one CPU share its cores, so that each takes a part. Real devices work side
        by side: without a division they need no second all-reduce.
        """
        is_one_cpu = not _has_accelerator() and jax.process_count() == 1
        return self.mesh if is_one_cpu else None


def play_round(
    model: JaxModel,
    rows: StackedRows,
    params: Params,
    orders: Orders,
    t: int,
    *,
    memory: dict[str, Params] | None = None,
    **options: Any,
) -> RoundResult:
    """Compute round t of every run. One compilation per model, number of runs and shape of rows.

    `memory` are the models that the server's optimiser keeps, `options` those of `RoundOptions`.
    """
    words, layout = pack((orders, np.full(len(orders.std), t, np.uint32)))
    how = {"layout": layout, "options": RoundOptions(**options)}
    return cast(RoundResult, _play_packed(model, rows, params, memory or {}, words, **how))


@partial(jax.jit, static_argnums=0, static_argnames=("layout", "options"))
def _play_packed(
    model: JaxModel,
    rows: StackedRows,
    params: Params,
    memory: dict[str, Params],
    words: Array,
    *,
    layout: Packing,
    options: RoundOptions,
) -> RoundResult:
    orders, now = unpack(words, layout)
    return compute_round(model, rows, params, memory, orders, now, options)


def compute_round(
    model: JaxModel,
    rows: StackedRows,
    params: Params,
    memory: dict[str, Params],
    orders: Orders,
    now: Array,
    options: RoundOptions,
) -> RoundResult:
    """Compute a round inside a compiled program: of this file, or of `accelerator`.

    Over a mesh each device sums up its rows, one all-reduce adds up, each does the rest alike.
    """
    compute: Any = partial(_compute_runs, model, options)
    if options.mesh is not None:
        specs = (StackedRows(*[DIVIDED] * 3, *[WHOLE] * 3), WHOLE, WHOLE, WHOLE, WHOLE)
        compute = jax.shard_map(
            compute, mesh=options.mesh, in_specs=specs, out_specs=WHOLE, check_vma=False
        )
    return cast(RoundResult, compute(rows, params, memory, orders, now))


def _compute_runs(
    model: JaxModel,
    options: RoundOptions,
    rows: StackedRows,
    params: Params,
    memory: dict[str, Params],
    orders: Orders,
    now: Array,
) -> RoundResult:
    def compute_run(
        params: Params, memory: dict[str, Params], order: Orders, t: Array
    ) -> RoundResult:
        # With one split there is nothing to choose, and no copy to make.
        split = 0 if rows.y.shape[0] == 1 else order.split
        data: StackedRows = jax.tree.map(lambda leaf: leaf[split], rows)
        key = jax.random.fold_in(jax.random.wrap_key_data(order.key), t)
        if order.sigma.shape[0] == 1:
            new = _take_one_step(model, data, params, order, key, options)
        else:
            new = _take_several_steps(model, data, params, order, key, options.longest)
        valid = data.valid_x, data.valid_y
        new, memory, score = finish_step(
            model, params, new, memory, order.finish, valid, options.metric, options.evaluating_mesh
        )
        if options.signal == "raw":
            plain, is_clean = _separate_rows(data.x)
            loss = clipping.evaluate(model, new, plain, data.y)[0]
            score[2] = jnp.where(jnp.all(is_clean), loss, jnp.nan)
        elif options.signal == "clients":
            score[2] = _average_client_losses(model, data, params, order, key, options)
        return RoundResult(new, jnp.stack(score), memory)

    if now.shape[0] > 1:
        return jax.vmap(compute_run)(params, memory, orders, now)
    alone = compute_run(*jax.tree.map(lambda leaf: leaf[0], (params, memory, orders, now)))
    return cast(RoundResult, jax.tree.map(lambda leaf: leaf[None], alone))


def finish_step(
    model: JaxModel,
    params: Params,
    averaged: Params,
    memory: dict[str, Params],
    numbers: StepInputs | None,
    valid: tuple[Array, Array],
    metric: str | None,
    mesh: Mesh | None = None,
) -> tuple[Params, dict[str, Params], list[Array]]:
    """Apply the server's optimiser to the averaged upload, and evaluate on the validation rows.

    Returns the next model, the optimiser's models, and four scores: loss, accuracy, the signal, and
    the signal of the model that the run would return now.
    """
    if numbers is None:
        loss, accuracy, signal = clipping.judge_public(model, averaged, *valid, metric, mesh)
        return averaged, memory, [loss, accuracy, signal, signal]
    structure = jax.tree.structure(params)
    flat = [dict(enumerate(jax.tree.leaves(tree))) for tree in (params, averaged)]
    kept_models: optimizer.Memory = {
        kind: dict(enumerate(jax.tree.leaves(tree))) for kind, tree in memory.items()
    }
    leaves, kept_models = optimizer.take_step(numbers, kept_models, *flat)
    new = jax.tree.unflatten(structure, list(leaves.values()))
    loss, accuracy, signal = clipping.judge_public(model, new, *valid, metric, mesh)
    offered = signal
    if "best" in kept_models:
        if "average" in kept_models:
            average = jax.tree.unflatten(structure, list(kept_models["average"].values()))
            offered = clipping.judge_public(model, average, *valid, metric, mesh)[2]
        kept_models = optimizer.keep_better(kept_models, leaves, offered < numbers.best, jnp.where)
    memory = {
        kind: jax.tree.unflatten(jax.tree.structure(memory[kind]), list(leaves.values()))
        for kind, leaves in kept_models.items()
    }
    return new, memory, [loss, accuracy, signal, offered]


def _separate_rows(x: Any) -> tuple[Array, Array]:
    """Return rows, and which of them are finite."""
    return (x.x, x.is_clean) if isinstance(x, Inspected) else (x, jnp.full(x.shape[0], True))


def _take_one_step(
    model: JaxModel,
    rows: StackedRows,
    params: Params,
    order: Orders,
    key: Array,
    options: RoundOptions,
) -> Params:
    """Return w − Σ_i p_i·(η/n_i)·Σ_m clip(g_m) + one draw for all the clients' noise."""
    coefficient = order.weight * order.rate / rows.samples
    if order.members is None:
        weight = weigh_rows(_weigh_owners(coefficient, rows, options), rows.y, order.class_weights)
        step = clipping.clipped_sum(model, params, rows.x, rows.y, weight, order.clip)
        if options.mesh is not None:
            flat, restore = ravel_pytree(step)
            step = restore(_psum(flat, AXIS))  # one array: one all-reduce
    elif _has_accelerator():  # it wants few, large products
        x, y, is_own = jax.vmap(lambda i: _slice_client(rows, i, options.longest))(order.members)
        weight = jnp.where(is_own, coefficient[order.members][:, None], 0)
        x, y, weight = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), (x, y, weight))
        weight = weigh_rows(weight, y, order.class_weights)
        step = clipping.clipped_sum(model, params, x, y, weight, order.clip)
    else:

        def client(total: Params, i: Array) -> tuple[Params, None]:
            x, y, is_own = _slice_client(rows, i, options.longest)
            weight = weigh_rows(jnp.where(is_own, coefficient[i], 0), y, order.class_weights)
            client_sum = clipping.clipped_sum(model, params, x, y, weight, order.clip)
            return jax.tree.map(jnp.add, total, client_sum), None

        step = jax.lax.scan(client, jax.tree.map(jnp.zeros_like, params), order.members)[0]
    noise = draw_simulated_noise(key, params, order.std)
    return jax.tree.map(lambda w, g, z: w - g + z, params, step, noise)


def _weigh_owners(weight: Array, rows: StackedRows, options: RoundOptions) -> Array:
    """Return the weight of each row's client; 0 where a row fills up a device's share."""
    if options.mesh is None:
        return weight[rows.owner]
    return weight.at[rows.owner].get(mode="fill", fill_value=0)


def _has_accelerator() -> bool:
    return jax.default_backend() != "cpu"


def weigh_rows(weight: Array, y: Array, class_weights: Array | None) -> Array:
    """Return the weights of rows, each times that of its class, which is at most 1."""
    return weight if class_weights is None else weight * class_weights[y]


def _slice_client(rows: StackedRows, i: Array, longest: int) -> tuple[Any, Array, Array]:
    """Return `longest` rows that contain client i's, their labels, and which are client i's."""
    first = (jnp.cumsum(rows.samples) - rows.samples)[i]
    # A window that would end beyond the data is moved back; rows of other clients weigh nothing.
    start = jnp.minimum(first.astype(int), rows.y.shape[0] - longest)
    x, y = jax.tree.map(
        lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, longest), (rows.x, rows.y)
    )
    row = start + jnp.arange(longest)
    return x, y, (row >= first) & (row < first + rows.samples[i])


def _take_several_steps(
    model: JaxModel, rows: StackedRows, params: Params, order: Orders, key: Array, longest: int
) -> Params:
    """Return Σ_i p_i·w_i, where each client takes its steps from w with noise at every one."""
    steps, clients = order.sigma.shape

    def client(total: Params, i: Array) -> tuple[Params, None]:
        x, y, is_own = _slice_client(rows, i, longest)
        weight = jnp.where(is_own, order.rate / rows.samples[i], 0)
        weight = weigh_rows(weight, y, order.class_weights)

        def step(e: Array, w: Params) -> Params:
            moved = clipping.clipped_sum(model, w, x, y, weight, order.clip)
            noise = draw_simulated_noise(
                jax.random.fold_in(key, e * clients + i), w, order.sigma[e, i]
            )
            return jax.tree.map(lambda w, g, z: w - g + z, w, moved, noise)

        final = jax.lax.fori_loop(0, steps, step, params)
        p = order.weight[i]
        return jax.tree.map(lambda s, w: s + jnp.where(p > 0, p * w, 0), total, final), None

    zero = jax.tree.map(jnp.zeros_like, params)
    members = jnp.arange(clients) if order.members is None else order.members
    return jax.lax.scan(client, zero, members)[0]


def _average_client_losses(
    model: JaxModel,
    rows: StackedRows,
    params: Params,
    order: Orders,
    key: Array,
    options: RoundOptions,
) -> Array:
    """Return Σ_i p_i·(mean of client i's losses before the step, clipped to [0, B]) + noise."""
    plain, is_clean = _separate_rows(rows.x)
    row_losses = jnp.where(is_clean, clipping.compute_losses(model, params, plain, rows.y), jnp.inf)
    row_losses = jnp.clip(jnp.nan_to_num(row_losses, nan=jnp.inf, posinf=jnp.inf), 0, order.bound)
    mean = jnp.sum(_weigh_owners(order.weight / rows.samples, rows, options) * row_losses)
    mean = mean if options.mesh is None else _psum(mean, AXIS)
    noise = jax.random.normal(jax.random.fold_in(key, np.uint32(2**32 - 1)), (), mean.dtype)
    return cast(Array, mean + order.signal_std * noise)


def stack_splits(
    federations: Sequence[Federation], model: JaxModel
) -> tuple[StackedRows, list[int]]:
    """Return the rows of all splits of the batch, stacked, and which split each run uses."""
    splits = {id(federation.held): federation.held for federation in federations}
    rows_by_split = [
        StackedRows(
            inspect_rows(model, held.train),
            put_on_device(held.train)[1],
            held.owner,
            held.samples.astype(np.int32),  # float32 would round the sums from 2²⁴ rows on
            *put_on_device(held.validation),
        )
        for held in splits.values()
    ]
    rows: StackedRows = jax.tree.map(lambda *leaves: _stack_arrays(leaves), *rows_by_split)
    index = {key: i for i, key in enumerate(splits)}
    return rows, [index[id(federation.held)] for federation in federations]


LEAST_ROWS = 256  # of a device; with fewer a round is mostly latency, and one device does it


def choose_mesh(federation: Federation) -> Mesh | None:
    """Return the devices, of all hosts, that divide the rows of a run; None: one does it alone."""
    devices, plan = np.array(jax.devices()), federation.plan
    # Several local steps go client by client, and the signal `raw` asks for all rows.
    is_alone = plan.local.steps > 1 or plan.server.signal == "raw" or plan.noise == "secure"
    is_alone = is_alone or federation.samples.sum() < LEAST_ROWS * devices.size
    # A block that one host has read is on its own devices.
    is_alone = is_alone or (jax.process_count() > 1 and is_stored(federation.held.train.x))
    if devices.size == 1 or is_alone or not isinstance(federation.model, JaxModel):
        return None
    return Mesh(devices, AXIS)


def is_first_host() -> bool:
    """Return whether this process writes: it is alone, or the first of `jax.distributed`."""
    return jax.process_index() == 0


def check_hosts(federation: Federation, seed: int) -> None:
    """Refuse a run that the processes of several hosts do not play alike.

    They would wait for each other's sums without end, or add up sums of different runs.
    """
    if jax.process_count() == 1:
        return
    from jax.experimental.multihost_utils import process_allgather

    plan = federation.plan
    if plan.noise == "secure":
        raise RunError(
            "noise = secure is drawn by one process, and jax.distributed has "
            f"{jax.process_count()}; play the run without it"
        )
    parts = {
        "plan": json.dumps(plan.to_dict(), sort_keys=True),
        "seed": str(seed),
        "data": federation.held.fingerprint(rows=True),
    }
    digests = [hashlib.sha256(text.encode()).digest() for text in parts.values()]
    words = np.frombuffer(b"".join(digests), np.uint32).reshape(len(parts), -1)
    is_same = np.all(process_allgather(words) == words, axis=(0, 2))
    differing = [name for name, same in zip(parts, is_same, strict=True) if not same]
    if differing:
        raise RunError(
            f"the processes of jax.distributed were given different values of "
            f"{' and '.join(differing)}; start every process with the same plan, seed and data"
        )


def divide_rows(rows: StackedRows, mesh: Mesh) -> StackedRows:
    """Divide the rows among devices; those that fill up the last share belong to no client."""
    spare, last = -rows.y.shape[1] % mesh.size, rows.samples.shape[1]

    def place(leaf: Any, fill: int = 0) -> Any:
        width = [(0, 0), (0, spare), *[(0, 0)] * (leaf.ndim - 2)]
        padded = np.pad(np.asarray(leaf), width, constant_values=fill)
        return jax.device_put(padded, NamedSharding(mesh, DIVIDED))

    x, y = jax.tree.map(place, (rows.x, rows.y))
    rest = jax.device_put(rows[3:], NamedSharding(mesh, WHOLE))
    return StackedRows(x, y, place(rows.owner, last), *rest)


_INSPECTED: WeakKeyDictionary[Samples, dict[tuple[object, bool], Inspected]] = WeakKeyDictionary()


def inspect_rows(model: JaxModel, samples: Samples) -> Inspected:
    """Return the rows prepared for `clipped_sum`, once for all runs that train on them."""
    inspected = _INSPECTED.setdefault(samples, {})
    x, dtype = put_on_device(samples)[0], jnp.zeros(()).dtype
    dtype_of_products = clipping.product_type(model, dtype)
    kind = (dtype_of_products, model.cleans_rows)
    if kind not in inspected:
        is_clean, squared = _inspect_by_pieces(model, x)
        # Rows that need no change are not copied.
        same = dtype_of_products == x.dtype and (
            not model.cleans_rows or bool(np.all(np.asarray(is_clean)))
        )
        inspected[kind] = Inspected(x if same else _inspect(model, x).x, is_clean, squared)
    return inspected[kind]


_inspect: Any = jax.jit(clipping.inspect, static_argnums=0)


@partial(jax.jit, static_argnums=0)
def _inspect_by_pieces(model: JaxModel, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return what `inspect` says of the rows, in pieces: at once it would copy all of them."""
    n = x.shape[0]
    rows = min(n, clipping.rows_per_chunk(2 * max(1, x.size // n), x.dtype.itemsize))
    first = np.arange(0, n, rows)
    starts = np.minimum(first, n - rows)  # the last piece ends with the data, as in `fold`

    def of(start: jax.Array) -> tuple[jax.Array, jax.Array]:
        return clipping.inspect(model, jax.lax.dynamic_slice_in_dim(x, start, rows))[1:]

    def join_pieces(pieces: jax.Array) -> jax.Array:
        return jnp.concatenate([pieces[:-1].reshape(-1), pieces[-1, first[-1] - starts[-1] :]])

    is_clean, squared = jax.lax.map(of, jnp.asarray(starts))
    return join_pieces(is_clean), join_pieces(squared)


def _stack_arrays(arrays: Sequence[jax.Array | NDArray[Any]]) -> jax.Array:
    if len(arrays) > 1:
        return jnp.stack(arrays)
    if jax.default_backend() == "cpu":  # a view with another shape, not a copy
        alone: jax.Array = jax.device_put(np.asarray(arrays[0])[None])
        return alone
    return jnp.asarray(arrays[0])[None]


FEW_ROWS = 256  # of a client; with fewer, going client by client costs more than it saves
COPIED_BYTES = 2 << 30  # of the cohorts' rows, which an accelerator copies side by side


def choose_members(
    federations: Sequence[Federation], weight: NDArray[np.float64]
) -> NDArray[np.int32] | None:
    """Return the K clients that each run's round goes through, or None: all rows at once.

    Where K < U the rows of the other clients need not be read. With several local steps the round
    goes client by client anyway. With one step it does so on a CPU if a client has enough rows to
    keep it busy. An accelerator copies the cohorts' rows side by side; that pays if they are at
    most half of all rows, and for a single run up to four fifths.
    """
    size = max(federation.terms.per_round for federation in federations)
    first = federations[0]
    samples, longest = first.samples, max(int(max(fed.samples)) for fed in federations)
    if size >= len(samples):
        return None
    share = size * longest / samples.sum()
    if _has_accelerator():
        row_bytes = 4 * math.prod(first.held.train.x.shape[1:])
        copied = len(federations) * size * longest * row_bytes
        pays = share <= (0.8 if len(federations) == 1 else 0.5) and copied <= COPIED_BYTES
    else:
        pays = len(federations) == 1 and longest >= FEW_ROWS and share <= 0.9
    pays = pays and choose_mesh(first) is None
    return fill_cohort(weight, size) if pays or first.plan.local.steps > 1 else None


def fill_cohort(weight: ArrayLike, size: int) -> NDArray[np.int32]:
    """Return `size` clients of each run: those with a weight, filled up with others.

    >>> fill_cohort([[0.5, 0.0, 0.5, 0.0], [0.0, 1.0, 0.0, 0.0]], 2).tolist()
    [[0, 2], [0, 1]]
    """
    order = np.argsort(-np.asarray(weight), axis=1, kind="stable")[:, :size]
    return np.sort(order, axis=1).astype(np.int32)


def _stack_column(
    prepared: Sequence[rounds.PreparedRound | None], name: str
) -> NDArray[np.float64]:
    """Return one field of every run's round as an array; zeros for a run that is over."""
    columns = [None if opened is None else getattr(opened, name) for opened in prepared]
    idle = np.zeros_like(next(column for column in columns if column is not None))
    return stack_rows([idle if column is None else column for column in columns])


PreparedRounds = dict[int, rounds.PreparedRound]  # the next round of each run of the batch
# A round of a batch: that of each run which is not over, and the states of all runs before it.
BatchRound = tuple[PreparedRounds, Sequence[ServerState]]


class BatchRun(rounds.Run):
    """One run of a batch, whose models are a slice of the batch's."""

    # The state, the stacked models, this run's position among them, and the stacked models that the
    # server's optimiser keeps. The position is (seat,), or (round of a stretch, seat).
    at: tuple[ServerState, Params, tuple[int, ...], dict[str, Params]]

    @property
    def params(self) -> Params:
        """The newest model."""
        _, stacked, position, _ = self.at
        return _take_model(stacked, position)

    @property
    def memory(self) -> dict[str, Params]:
        """The models that the server's optimiser keeps beside the newest."""
        _, _, position, kept = self.at
        return cast(dict[str, Params], _take_model(kept, position))

    @property
    def final_model(self) -> Params:
        """The model that the run returns if it ends here."""
        return optimizer.choose_model(self.memory, self.params)

    def name_models(self) -> tuple[dict[str, NDArray[Any]], optimizer.Memory]:
        """Return the newest model and the optimiser's, by the names of their parameters."""
        memory = {kind: flatten_parameters(tree) for kind, tree in self.memory.items()}
        return flatten_parameters(self.params), cast(optimizer.Memory, memory)


def _take_model(stacked: Any, position: tuple[int, ...]) -> Any:
    """Return the model at this position of a stack, which numpy or JAX holds."""
    if not all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(stacked)):
        return jax.tree.map(lambda leaf: leaf[position], stacked)
    return _take_models(stacked, tuple(np.asarray(position)))


AfterRound = Callable[[BatchRun], None]


def stack_models(
    model: Model, params: optimizer.Leaves, memory: optimizer.Memory
) -> tuple[Params, tuple[int, ...], dict[str, Params]]:
    """Return models, given by the names of their parameters, as those of a batch of one.

    Of what the optimiser keeps all are models, but the state of the user's, which stays as it is.
    """

    def stack(tree: Params) -> Params:
        return jax.tree.map(lambda leaf: np.asarray(leaf)[None], tree)

    stacked = {
        kind: stack(dict(leaves) if kind == OPTIMIZER else model.unflatten(dict(leaves)))
        for kind, leaves in memory.items()
    }
    return stack(model.unflatten(dict(params))), (0,), stacked


Models = tuple[Params, dict[str, Params]]  # of a batch, stacked, with the optimiser's models


class Seating(NamedTuple):
    """Which run sits in which seat of a compiled round."""

    runs: list[int]
    always: dict[str, NDArray[Any]]  # inputs that stay the same in all rounds

    def is_too_large(self, opened: PreparedRounds) -> bool:
        """Return whether half of the seats are enough; True also before there are any seats."""
        return 2 * len(opened) <= len(self.runs) or not self.runs


SEATS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32)  # few, because each number is compiled


def count_seats(runs: int) -> int:
    """Return how many seats a batch of so many runs has.

    >>> [count_seats(runs) for runs in (1, 5, 20, 30)]
    [1, 6, 20, 32]
    """
    return next((seats for seats in SEATS if seats >= runs), runs)


class RunTable:
    """The runs of a batch, with their rows where JAX computes."""

    def __init__(self, model: JaxModel, batch: list[BatchRun]) -> None:
        first = batch[0].federation
        self.batch = batch
        self.rows, self.split = stack_splits([run.federation for run in batch], model)
        signal = first.plan.server.signal
        longest = max(int(max(run.federation.samples)) for run in batch)  # of any split
        mesh = choose_mesh(first)
        self.options = RoundOptions(signal, first.plan.metric, longest, mesh)
        self.rows = self.rows if mesh is None else divide_rows(self.rows, mesh)

    def prepare_runs(self, live: Iterable[int], states: list[ServerState]) -> PreparedRounds:
        """Price and debit the next round of each run that is not over, from these states."""
        live = list(live)
        runs = [
            rounds.WaitingRun(self.batch[i].federation, states[i], self.batch[i].seed) for i in live
        ]
        prepared = zip(live, rounds.prepare_rounds(runs), strict=True)
        return {i: next_round for i, next_round in prepared if next_round is not None}

    def assign_seats(self, live: Iterable[int]) -> Seating:
        """Give these runs seats; those that stay empty repeat the first run."""
        live = list(live)
        spare = count_seats(len(live)) - len(live)
        runs = live + live[:1] * spare
        seated = [self.batch[i] for i in runs]
        plans = [run.federation.plan for run in seated]
        recipes = [run.federation.recipe for run in seated]
        keys = [seeding.make_key_words(run.seed, Purpose.NOISE) for run in seated]
        always = {
            "split": np.array([self.split[i] for i in runs], np.int32),
            "rate": np.array([plan.local.rate for plan in plans], np.float32),
            "clip": np.array([recipe.clip for recipe in recipes], np.float32),
            "bound": np.array([plan.server.loss_bound or 0.0 for plan in plans], np.float32),
            "key": np.stack(keys),
        }
        if recipes[0].class_weights is not None:
            weights = [recipe.class_weights for recipe in recipes]
            always["class_weights"] = np.array(weights, np.float32)
        return Seating(runs, always)

    def gather_models(self, seating: Seating) -> Models:
        """Return the models of the seated runs, and those that the optimiser keeps."""
        at = [self.batch[i].at for i in seating.runs]
        _, params, _, memory = at[0]
        if all(models is params for _, models, _, _ in at):  # of the same round: one launch
            positions = np.array([position for _, _, position, _ in at])
            gathered: Models = _take_models((params, memory), tuple(positions.T))
        else:
            runs = [self.batch[i] for i in seating.runs]
            models = [jax.tree.map(np.asarray, (run.params, run.memory)) for run in runs]
            # JAX's arrays from the first round on: numpy's would need another compilation.
            gathered = jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *models)
        mesh = self.options.mesh
        return gathered if mesh is None else jax.device_put(gathered, NamedSharding(mesh, WHOLE))

    def make_orders(self, seating: Seating, batch_rounds: Sequence[BatchRound]) -> Orders:
        """Return the inputs of these rounds as arrays, one round after the other.

        A run that is over has no round: the result of its seat is ignored.
        """
        federations = [self.batch[i].federation for i in seating.runs]
        prepared = [opened.get(i) for opened, _ in batch_rounds for i in seating.runs]
        weight, sigma = _stack_column(prepared, "weight"), _stack_column(prepared, "sigma")
        signal_sigma, inputs = _stack_column(prepared, "signal_sigma"), None
        if not federations[0].finish.idle:
            steps = []
            for opened, states in batch_rounds:
                for i, federation in zip(seating.runs, federations, strict=True):
                    at = (opened[i].round.t, opened[i].round.horizon) if i in opened else (0, 1)
                    steps.append(federation.finish.step_inputs(states[i].marks, *at))
            inputs = jax.tree.map(lambda *numbers: np.array(numbers, np.float32), *steps)
        always, count = seating.always.items(), len(batch_rounds)
        return Orders(
            **{name: np.concatenate([column] * count) for name, column in always},
            weight=weight.astype(np.float32),
            std=rounds.average_noise(weight, sigma[:, 0]).astype(np.float32),
            sigma=np.nan_to_num(sigma).astype(np.float32),
            signal_std=rounds.average_noise(weight, signal_sigma).astype(np.float32),
            finish=inputs,
            members=choose_members(federations, weight),
        )

    def split_results(
        self,
        seating: Seating,
        opened: PreparedRounds,
        score: NDArray[Any],
        models: Models,
        index: int | None = None,
    ) -> Iterator[tuple[int, rounds.PlayedRound]]:
        """Yield each run's round; models are by seat, or by round of a stretch and seat."""
        seats = {i: seat for seat, i in reversed([*enumerate(seating.runs)])}
        params, memory = models
        for i, prepared in opened.items():
            seat = seats[i]
            at = params, (seat,) if index is None else (index, seat), memory
            loss, accuracy, signal, offered = score[seat].tolist()
            yield i, rounds.PlayedRound(prepared, loss, accuracy, signal, offered, at)


@jax.jit
def _take_models(stacked: Any, where: tuple[jax.Array, ...]) -> Any:
    """Return the models at these positions of a stack, or the one: one launch for all leaves.

    Positions are inputs of the program: as constants, each would need a compilation of its own.
    """
    return jax.tree.map(lambda leaf: leaf[where], stacked)


class CompiledEngine:
    """The engine with one launch a round: for a CPU, and where the next round cannot be guessed."""

    def __init__(self, model: JaxModel, batch: list[BatchRun]) -> None:
        self.table, self.model = RunTable(model, batch), model
        self.seating = Seating([], {})
        self.params: Params = None
        self.memory: dict[str, Params] = {}

    def prepare_rounds(self, live: Sequence[int]) -> PreparedRounds:
        """Price and debit the next round of each run that is not over."""
        return self.table.prepare_runs(live, [run.state for run in self.table.batch])

    def begin_rounds(self, opened: PreparedRounds) -> bool:
        """Launch the round, and begin to copy its scores to the host."""
        if self.seating.is_too_large(opened):
            self.seating = self.table.assign_seats(opened)
            self.params, self.memory = self.table.gather_models(self.seating)
        batch_round = opened, [run.state for run in self.table.batch]
        outcome = play_round(
            self.model,
            self.table.rows,
            self.params,
            self.table.make_orders(self.seating, [batch_round]),
            next(iter(opened.values())).round.t,
            memory=self.memory,
            **self.table.options._asdict(),
        )
        outcome.score.copy_to_host_async()
        self.params, self.memory, self.score = outcome.params, outcome.memory, outcome.score
        return True

    def end_rounds(self, opened: PreparedRounds) -> Iterator[tuple[int, rounds.PlayedRound]]:
        """Wait for the scores."""
        models = self.params, self.memory
        return self.table.split_results(self.seating, opened, np.asarray(self.score), models)


def play_compiled(
    model: JaxModel, batch: list[BatchRun], after_round: AfterRound | None = None
) -> Iterator[None]:
    """Play a batch with one launch a round."""
    return rounds.play_rounds(batch, CompiledEngine(model, batch), after_round)


def draw_simulated_noise(key: Array, like: Any, std: Array | float) -> Any:
    """Draw N(0, std²) for every number of a tree of arrays: noise that must not be released.

    float32 normals take about 2²³ values, so that a server could tell neighbouring datasets apart
    by which values are possible; and whoever learns the seed can subtract the noise. A run that
    uses this noise says so in its record.

    It is one long draw cut into the leaves: a generator takes about a second to compile.
    """
    leaves, tree = jax.tree.flatten(like)
    ends = np.cumsum([leaf.size for leaf in leaves])
    dtype = jnp.result_type(*leaves)
    pieces = jnp.split(jax.random.normal(key, (int(ends[-1]),), dtype), ends[:-1])
    noise = [
        (std * piece).reshape(leaf.shape).astype(leaf.dtype)
        for piece, leaf in zip(pieces, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, noise)
