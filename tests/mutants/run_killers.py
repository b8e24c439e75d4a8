"""Privacy properties of the simulator and the server, each a function that fails without it.

They belong to `privacy_killers`. Rounds are played whose rows are all zero, or whose noise is, so
that what is left is the noise, or the data.
"""

from __future__ import annotations

import numpy as np

FEATURES = 20_000


def _orders(weight, sigma, *, signal=0.0, std=0.0, bound=0.0):
    """One run's orders: the weights of its clients, and σ of every step and client."""
    from sottovoce.simulation.compiled import Orders

    one = np.ones(1, np.float32)
    return Orders(
        split=np.zeros(1, np.int32), weight=np.array([weight], np.float32), rate=one, clip=one,
        std=std * one, sigma=np.array([sigma], np.float32), signal_std=signal * one,
        bound=bound * one, key=np.ones((1, 2), np.uint32),
    )  # fmt: skip


def _rows(x, y, samples):
    """Rows of clients, one after the other, as a split of their own."""
    import jax.numpy as jnp

    from sottovoce.simulation.compiled import StackedRows

    owner = np.repeat(np.arange(len(samples)), samples)
    return StackedRows(
        x=jnp.asarray(x[None], jnp.float32), y=jnp.asarray(y[None]), owner=jnp.asarray(owner[None]),
        samples=jnp.asarray([samples], jnp.float32), valid_x=jnp.zeros((1, 1, x.shape[1])),
        valid_y=jnp.zeros((1, 1), int),
    )  # fmt: skip


def _played(rows, orders, *, t=0, **more):
    """All parameters of an svm that was zero, after a round, and the signal of the round."""
    import jax.numpy as jnp

    from sottovoce.models.svm import Svm
    from sottovoce.simulation.compiled import play_round

    features = rows.x.shape[2]
    start = {"w": jnp.zeros((1, features)), "b": jnp.zeros(1)}
    done = play_round(Svm(features, 0.0), rows, start, orders, t, **more)
    made = np.concatenate([done.params["b"], done.params["w"][0]])
    return made, float(done.score[0, 2])


def _flat(samples):
    n = sum(samples)
    return _rows(np.zeros((n, FEATURES)), np.zeros(n, int), samples)


def simulated_noise_is_fresh_and_whole():
    """A round of the simulator that only adds noise: its σ, and none of it twice."""
    orders = _orders([0.0], [[0.0]], std=3.0)
    made = [_played(_flat([2]), orders, t=t)[0] for t in (0, 1)]
    assert abs(made[0].std() - 3) < 0.12
    assert abs(np.corrcoef(made[0], made[1])[0, 1]) < 0.06


def simulated_steps_have_noise_of_their_own():
    """Three clients, two steps each: six draws, and no two of them have anything in common."""
    made = []
    for one in np.eye(3):
        made.append(_played(_flat([2, 2, 2]), _orders(one, np.ones((2, 3))), longest=2)[0])
    for i, noise in enumerate(made):
        assert abs(noise.std() - 2**0.5) < 0.06  # 8 sd
        for other in made[:i]:
            assert abs(np.corrcoef(noise, other)[0, 1]) < 0.06


def a_clients_steps_use_its_own_rows():
    """Several steps: what a client computes does not depend on a row of another client."""
    rng = np.random.default_rng(6)
    x, y, samples = rng.normal(size=(7, 5)), rng.integers(0, 2, 7), [2, 4, 1]
    for own in range(3):
        weight, quiet, seen = np.eye(3)[own], np.zeros((2, 3)), []
        for other in (0.0, 50.0):
            data, labels = x.copy(), y.copy()
            others = np.repeat(np.arange(3), samples) != own
            data[others] += other
            labels[others] = 1 - labels[others] if other else labels[others]
            made = _played(_rows(data, labels, samples), _orders(weight, quiet), longest=4)
            seen.append(made[0])
        assert np.array_equal(*seen)
        assert np.any(seen[0] != 0)


def a_signal_has_noise_of_its_own():
    """300 rounds: the noise of the clients' loss has nothing in common with the model's."""
    heard, made = [], []
    rows = _rows(np.zeros((2, 8)), np.zeros(2, int), [2])
    for t in range(300):
        orders = _orders([1.0], [[1.0]], std=1.0, signal=1.0, bound=1.0)
        weights, signal = _played(rows, orders, t=t, signal="clients")
        heard.append(signal)
        made.append(weights)
    assert 0.7 < np.std(heard) < 1.4
    for noise in np.transpose(made):
        assert abs(np.corrcoef(noise, heard)[0, 1]) < 0.45  # 8 sd


def losses_have_their_whole_sensitivity():
    """Δ_V: one record moves a mean of n losses in [0, B] by B/n, a whole client by B.

    Asked of a federation; of what a round of the simulator books, which covers the noise of model
    and loss together; and of what a server expects of an upload.
    """
    from types import SimpleNamespace

    from sottovoce.data.federated import Given
    from sottovoce.privacy.sensitivity import Recipe
    from sottovoce.server import rounds as course
    from sottovoce.server.checks import ExpectedUpload
    from sottovoce.server.federation import build
    from support.in_process import draw, plan

    bound, n, clip = 2.5, 12, 0.7
    for unit, part in (("record", 1 / n), ("client", 1.0)):
        changes = {"local.unit": unit, "local.clip": clip, "server.signal": "clients",
                   "rounds.schedule": "discounted",
                   "server.loss_bound": bound, "data.validation": 20, "data.test": 20}  # fmt: skip
        federation = build(plan(**changes), data=Given(draw(3 * n + 40, 5)), seed=1)
        assert federation.samples.tolist() == [n] * 3
        assert np.all(federation.loss_sensitivity >= bound * part)
        state = course.make_first_state(federation, 1.0, 0.0, 1.0)
        paid = course.prepare_round(federation, state, 1)
        moved, told = 2 * 1.0 * clip * part / paid.sigma[0], bound * part / paid.signal_sigma
        assert np.all(moved**2 + told**2 <= paid.mu2 * (1 + 1e-9))
        member = SimpleNamespace(samples=n)
        request = SimpleNamespace(recipe=Recipe(1.0, clip, unit=unit), loss_bound=bound)
        asked = ExpectedUpload(request, "", member, 1.0)
        assert asked.loss_sensitivity >= bound * part


def streamed_rounds_have_noise_of_their_own():
    """Rows read from a file, all zero: the weights after one round, and after two, are noise.

    Drawn anew, the two have a correlation of 1/√2; the same noise in both rounds has one of 1.
    """
    from sottovoce import simulate
    from support.in_process import plan

    class Shelf:
        """Rows that are read by slices."""

        shape, dtype = (90, 4000), np.dtype(np.float32)

        def __len__(self):
            return 90

        def __getitem__(self, where):
            return np.zeros((len(range(*where.indices(90))), 4000), np.float32)

    made = []
    for rounds in (1, 2):
        own = plan(**{"rounds.rounds": rounds, "model.name": "svm", "model.hidden": None,
                      "data.validation": 20, "data.test": 20})  # fmt: skip
        done = simulate(own, data=(Shelf(), np.arange(90) % 2), seed=3)
        made.append(np.asarray(done.params["w"]))
    assert np.std(made[0]) > 0
    assert abs(np.corrcoef(*made)[0, 1] - 0.5**0.5) < 0.1  # 12 sd


RUNS = [
    simulated_noise_is_fresh_and_whole, simulated_steps_have_noise_of_their_own,
    a_clients_steps_use_its_own_rows, a_signal_has_noise_of_its_own,
    losses_have_their_whole_sensitivity, streamed_rounds_have_noise_of_their_own,
]  # fmt: skip
