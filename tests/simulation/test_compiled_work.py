"""How much work a round is: counted by the compiler, so that a slower round fails without a clock.

XLA says of a compiled program how many operations it does and how much memory it wants besides its
inputs and outputs. It counts the body of a loop once, so operations are counted with pieces so
large that there is no loop, and memory with pieces as they are.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sottovoce.models import clipping
from sottovoce.models.base import Inspected, JaxModel
from sottovoce.models.cnn import KERNEL, LINES, Cnn, find_filters
from sottovoce.models.mlp import Mlp
from sottovoce.models.softmax import Softmax
from sottovoce.models.svm import Svm
from sottovoce.plan import Plan
from sottovoce.simulation import compiled as rounds
from sottovoce.simulation import streamed
from sottovoce.simulation.compiled import pack
from sottovoce.simulation.simulate import simulate, simulate_many

CLIENTS = 50
ROWS = 8000  # a round's; a quarter as many are evaluated. Few rows are fused in other ways
SVM, SOFTMAX, MLP = Svm(81), Softmax(784, classes=10), Mlp(784, hidden=256, classes=10)
CNN = Cnn((32, 32, 3), channels=8, classes=10)
MODELS = {"svm": SVM, "softmax": SOFTMAX, "mlp": MLP, "cnn": CNN}
# Beyond the products a row has some operations for each class, unit or place of its own.
# The svm's rare sum of (error·x + κw)² is counted as if it were not.
# The cnn's products are half as many as with tiles, beside the same other operations.
MOST = {"svm": 1.08, "softmax": 1.02, "mlp": 1.02, "cnn": 1.04}
# Operations for one number of noise: a counter-based generator and Φ⁻¹ (366 seen). XLA computes the
# end of Φ⁻¹ again for the cnn's weights, which are evaluated in another order (686 seen).
NOISE = {"svm": 400, "softmax": 400, "mlp": 400, "cnn": 750}


def products(model) -> tuple[float, float]:
    """Floating-point operations of the products: of a training row, of one evaluated.

    A product of a row with an a×b matrix is 2ab; the svm's norm is a sum of (error·x + κw)². The
    cnn's convolution goes by filtering: 0.64 of its formula's products, and A, B, G.
    """
    match model:
        case Svm():
            return 2 * 2 * model.features + 4 * model.features, 2 * model.features
        case Softmax():
            forward = 2 * model.features * model.classes
            return 2 * forward, forward
        case Mlp():
            first, second = 2 * model.features * model.hidden, 2 * model.hidden * model.classes
            return 2 * first + 3 * second, first + second
    channels, height, width = model.map_shape
    points, tiles = LINES + KERNEL - 1, height * width // LINES**2
    numbers, window = LINES * channels, 2 * LINES * model.shape[2]
    convolved = 2 * points * tiles * numbers * (window + LINES)  # with the band, and with A
    _, g, b = find_filters()
    lines = 2 * np.count_nonzero(b) * (height // LINES) * (width + LINES) * model.shape[2]
    by_kernel = 2 * g.size * KERNEL * model.shape[2] * channels
    assert 2 * points * tiles * numbers * window < 0.65 * 2 * height * width * channels * 75
    dense = 2 * height * width * channels * model.classes
    train = 2 * convolved + lines + by_kernel + 3 * dense
    return train, convolved + lines + dense


def width(model) -> int:
    return math.prod(model.shape) if isinstance(model, Cnn) else model.features


def of(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def size(model) -> int:
    form = jax.eval_shape(model.init, jax.random.key(0))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(form))


def compiled_round(model, n, members=None):
    """The round of `simulate` for n rows and n/4 to evaluate, compiled from shapes alone.

    With `members` it goes through so many clients, one after another.
    """
    params = jax.tree.map(
        lambda leaf: of(1, *leaf.shape), jax.eval_shape(model.init, jax.random.key(0))
    )
    f, i = width(model), jnp.int32
    rows = rounds.StackedRows(
        x=Inspected(of(1, n, f), of(1, n, dtype=bool), of(1, n)),
        y=of(1, n, dtype=i),
        owner=of(1, n, dtype=i),
        samples=of(1, CLIENTS),
        valid_x=of(1, n // 4, f),
        valid_y=of(1, n // 4, dtype=i),
    )
    one = np.zeros(1, np.float32)
    orders = rounds.Orders(
        split=np.zeros(1, np.int32),
        weight=np.zeros((1, CLIENTS), np.float32),
        rate=one,
        clip=one,
        std=one,
        sigma=np.zeros((1, 1, CLIENTS), np.float32),
        signal_std=one,
        bound=one,
        key=np.zeros((1, 2), np.uint32),
        members=None if members is None else np.zeros((1, members), np.int32),
    )
    words, layout = pack((orders, np.zeros(1, np.uint32)))
    options = rounds.RoundOptions(longest=n // CLIENTS)
    lowered = rounds._play_packed.lower(
        model, rows, params, {}, words, layout=layout, options=options
    )
    return lowered.compile()


def compiled_block(model, n):
    """The sum over one block of a streamed round."""
    params = jax.eval_shape(model.init, jax.random.key(0))
    block = streamed.Block(of(n, width(model)), of(n, dtype=jnp.int32), of(n))
    return streamed.add_block.lower(
        model, (params, of()), params, block, of(), of(), with_loss=False
    ).compile()


def operations(compiled) -> float:
    found = compiled.cost_analysis()
    return float((found[0] if isinstance(found, list) else found)["flops"])


def temporaries(compiled) -> int:
    return int(compiled.memory_analysis().temp_size_in_bytes)


@pytest.fixture
def one_piece(monkeypatch):
    """Pieces that hold everything: no loop, all operations are counted.

    What was traced before keeps its pieces: no other test has so many rows (or 23 and 46).
    """
    monkeypatch.setattr(clipping, "CPU_BYTES", 1 << 40)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_a_round_does_the_arithmetic_and_little_else(kind, one_piece):
    model = MODELS[kind]
    train, public = products(model)
    once, twice = (operations(compiled_round(model, n)) for n in (ROWS, 2 * ROWS))
    a_row = twice - once  # of ROWS more, and a quarter of them to evaluate
    floor = ROWS * train + ROWS // 4 * public
    assert floor <= a_row <= MOST[kind] * floor
    # Linear in the rows: what is left over is noise, a number for each parameter.
    assert 0 <= once - a_row <= NOISE[kind] * size(model) + 20_000


@pytest.mark.slow
def test_a_round_of_some_clients_computes_their_rows_only(one_piece):
    """The loop over the cohort is counted once: one client's rows, and those to evaluate."""
    train, public = products(MLP)
    floor = ROWS // CLIENTS * train + ROWS // 4 * public
    found = operations(compiled_round(MLP, ROWS, members=10))
    assert floor <= found <= MOST["mlp"] * floor + (NOISE["mlp"] + 2) * size(MLP) + 20_000


@pytest.mark.slow
def test_an_accelerator_computes_the_rows_of_the_cohort_only(one_piece, monkeypatch):
    """K of U clients cost K/U: ten of fifty here, at once."""
    monkeypatch.setattr(rounds, "_has_accelerator", lambda: True)
    jax.clear_caches()
    train, public = products(MLP)
    floor = ROWS // CLIENTS * 10 * train + ROWS // 4 * public
    found = operations(compiled_round(MLP, ROWS, members=10))
    assert floor <= found <= MOST["mlp"] * floor + (NOISE["mlp"] + 2) * size(MLP) + 20_000


@pytest.mark.slow
def test_the_memory_of_a_round_does_not_grow_with_its_rows():
    model = MLP
    few, many = (temporaries(compiled_round(model, n)) for n in (20_000, 40_000))
    # A piece, the gradients' sum and the noise; of a row only its weight.
    assert few <= 2 * clipping.CPU_BYTES + 6 * 4 * size(model) + 4 * 20_000 + (1 << 20)
    assert many - few <= 2 * 4 * 20_000
    assert many < 4 * 40_000 * size(model) / 1000  # nowhere near samples × parameters


# What a round needs beside inputs and outputs, in MB of 20,000 rows (cnn: 4,000), a sixth above
# what was seen: pieces that grow, or a second copy of them, are noticed.
MOST_MEMORY = {"svm": 4.1, "softmax": 6.2, "mlp": 7.1, "cnn": 6.1}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_a_round_needs_no_more_memory_than_it_did(kind):
    found = temporaries(compiled_round(MODELS[kind], 4000 if kind == "cnn" else 20_000))
    assert 0.5 * MOST_MEMORY[kind] < found / 1e6 <= MOST_MEMORY[kind]


@pytest.mark.parametrize("n", [1, 7, 999, 1000, 1001, 2500, 40_000])
def test_pieces_hold_every_row_about_once(n):
    """Operations are counted without a loop; this counts what the loop is given."""
    y = jnp.zeros(n, jnp.int32)
    given = clipping.fold(lambda x, y, weight: jnp.array(y.shape[0]), y, y, jnp.ones(n), rows=1000)
    counted = clipping.fold(lambda x, y, weight: jnp.sum(weight), y, y, jnp.ones(n), rows=1000)
    assert n <= int(given) <= 1.003 * n + 1
    assert int(counted) == n


@pytest.mark.slow
def test_a_block_of_a_streamed_round_does_as_little(one_piece):
    train, _ = products(MLP)
    once, twice = (compiled_block(MLP, n) for n in (ROWS, 2 * ROWS))
    assert ROWS * train <= operations(twice) - operations(once) <= MOST["mlp"] * ROWS * train
    # The sum that is carried along is added to in place.
    assert once.memory_analysis().alias_size_in_bytes >= 4 * size(MLP)


@pytest.mark.slow
def test_the_guard_sees_gradients_of_single_samples(one_piece, monkeypatch):
    """The counts of this file on a round that forms every sample's gradient: both limits break."""

    def find_none(*given):
        return find(*given)._replace(layers={})

    find = clipping.find_dense_layers
    monkeypatch.setattr(clipping, "find_dense_layers", find_none)
    monkeypatch.setattr(Mlp, "sum_chunk", JaxModel.sum_chunk)
    train, _ = products(MLP)
    once, twice = (compiled_block(MLP, n) for n in (23, 46))
    assert operations(twice) - operations(once) > 2 * 23 * train
    assert temporaries(twice) - temporaries(once) >= 4 * 23 * size(MLP)


@pytest.mark.slow
def test_a_run_is_compiled_once():
    own = {"clients": 7, "samples": 31}  # shapes that no other test compiles
    plan = Plan(data=own, model={"name": "softmax"}, rounds={"schedule": "fixed", "rounds": 4})
    before = rounds._play_packed._cache_size()
    simulate(plan.replace("rounds.per_round=3"), seed=1)  # clients too small to go one by one
    simulate(plan.replace("privacy.epsilon=2"), seed=2)  # another cohort, budget and seed
    assert rounds._play_packed._cache_size() == before + 1


@pytest.mark.slow
def test_a_batch_of_runs_is_compiled_a_few_times():
    """Seats shrink by halves: runs of 1, 2, 3 and 4 rounds go through 8, 4 and 2 seats."""
    base = Plan(model={"name": "softmax"}, rounds={"schedule": "fixed", "rounds": 1})
    plans = [base.replace(f"rounds.rounds={n}") for n in (1, 2, 3, 4)]
    before = rounds._play_packed._cache_size()
    simulate_many(plans, seeds=[1, 2], together=True)
    assert rounds._play_packed._cache_size() <= before + 3


@pytest.mark.slow
def test_blocks_outside_the_cohort_are_not_computed(monkeypatch):
    """Two of fifty clients of 100 rows: 200 rows are 4 blocks of 50 (64 fit), not 79 of 64."""
    random = np.random.default_rng(0)
    x, y = random.random((5000, 8), dtype=np.float32), random.integers(0, 2, 5000)
    monkeypatch.setattr(streamed, "BLOCK_BYTES", 4 * 8 * 64)
    done, real = [], streamed.add_block
    monkeypatch.setattr(
        streamed, "add_block", lambda *a, **b: done.append(len(a[3].y)) or real(*a, **b)
    )
    plan = Plan(
        data={"name": "arrays", "clients": 50, "samples": 100, "split": "order"},
        model={"name": "softmax"},
        rounds={"schedule": "fixed", "rounds": 3, "per_round": 2},
    )
    monkeypatch.setattr("sottovoce.data.federated.is_streamed", lambda rows: rows is x)
    simulate(plan, data=(x, y), validation=(x, y), test=(x, y), seed=1)
    assert done == 3 * 4 * [50]
