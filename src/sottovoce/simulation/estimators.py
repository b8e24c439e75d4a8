"""The face for scikit-learn: estimators that simulate a federation in `fit`.

    from sottovoce import PrivateFederatedClassifier
    model = PrivateFederatedClassifier(epsilon=4, clients=20).fit(X, y)
    model.predict(X), model.guarantee_

scikit-learn is optional: without it this module loads, and its classes say what to install.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from sottovoce.data.federated import Given, Holdings, Samples, read_labels
from sottovoce.errors import InputError
from sottovoce.plan import Plan
from sottovoce.plan.base import MOST, to_whole
from sottovoce.server.federation import build
from sottovoce.server.rounds import Interrupts
from sottovoce.simulation.simulate import Callbacks, play_run, start_run

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, check_random_state, validate_data
except ModuleNotFoundError:  # an optional extra
    # Three classes, because a class cannot have one base twice.
    BaseEstimator, ClassifierMixin, RegressorMixin = (type("Absent", (), {}) for _ in range(3))


@dataclass(kw_only=True, eq=False, repr=False)
class _PrivateFederatedModel:
    """What both estimators share; see `PrivateFederatedClassifier`."""

    epsilon: float = 8.0
    delta: float = 1e-5
    clients: int = 10
    rounds: int = 100
    model: str = "softmax"
    learning_rate: float | str = "auto"
    clip: float = 1.0
    held_out: float = 0.1
    settings: tuple[str, ...] = ()
    random_state: Any = None

    def __post_init__(self) -> None:
        if BaseEstimator.__name__ == "Absent":
            raise ImportError("this needs scikit-learn; run: pip install 'sottovoce[sklearn]'")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()  # type: ignore[misc]
        for kind in (tags.classifier_tags, tags.regressor_tags):
            if kind is not None:
                kind.poor_score = True  # noise; the data of scikit-learn's checks are tiny
        return tags

    def _fit(
        self,
        X: NDArray[Any],
        y: NDArray[Any],
        client: Any,
        classes: int,
        target: tuple[float, float] | None = None,
    ) -> Self:
        """Deal the rows, play the run, and store its result; `target` is a number's range."""
        held_out: Any = self.held_out  # scikit-learn sets any value
        settings: Any = self.settings
        if not isinstance(held_out, int | float | np.number) or not 0 < held_out < 1:
            raise InputError.of("held_out", held_out, "above 0 and below 1", "0.1 is usual")
        if isinstance(settings, str) or not isinstance(settings, Iterable):
            remedy = "write ('model.hidden=32',)"
            raise InputError.of("settings", settings, "a tuple of KEY=VALUE", remedy)
        random = check_random_state(self.random_state)
        # An order of one's own for each draw: rows are set aside, then dealt.
        order, seed = random.permutation(len(y)), int(random.randint(2**31))
        if client is None:
            count = to_whole(self.clients)
            is_whole = isinstance(count, int | np.integer) and not isinstance(count, bool)
            if not is_whole or not 1 <= count <= MOST:
                bound = f"a whole number from 1 to {MOST}"
                raise InputError.of("clients", self.clients, bound, "10 is usual")
            names = np.arange(max(1, min(count, len(y) - 1)))
            owner = np.empty(len(y), np.int64)
            owner[order] = np.arange(len(y)) % len(names)
        else:
            if (shape := np.shape(client)) != y.shape:
                raise InputError.of("client", shape, f"({len(y)},)", "give one name for each row")
            names, owner = np.unique(read_labels("client", client), return_inverse=True)
        left, aside = np.bincount(owner), np.zeros(len(y), bool)
        for row in order:  # every client keeps a row to train on
            if aside.sum() < max(1, round(self.held_out * len(y))) and left[owner[row]] > 1:
                aside[row], left[owner[row]] = True, left[owner[row]] - 1
        if not aside.any():
            bound = "so many that a client has a row to spare for the evaluation"
            raise InputError.of("n_samples", len(y), bound, "give more rows or fewer clients")
        train = np.flatnonzero(~aside)
        train = train[np.argsort(owner[train], kind="stable")]
        data = {"name": "arrays", "clients": len(names), "validation": 0, "test": int(aside.sum())}
        plan = Plan(
            data=data | ({} if target is None else {"target": list(target)}),
            model={"name": "softmax"} | ({} if target is None else {"loss": "squared"}),
            local={"learning_rate": self.learning_rate, "clip": self.clip},
            privacy={"epsilon": self.epsilon, "delta": self.delta},
            rounds={"schedule": "fixed", "rounds": self.rounds},
        )
        # In one step: a model may need a key of the settings.
        dealt, plan = plan.data, plan.replace(f'model.name="{self.model}"', *self.settings)
        if plan.data.model_copy(update={"prevalence": None}) != dealt:  # a record of other rows
            bound = "keys outside of [data], or data.prevalence"
            raise InputError.of("settings", self.settings, bound, "rows are those of fit")
        cut = None
        if (number := plan.regression) is not None:
            y, cut = number.scale(y), number.find_cut(y)[aside]
        public = Samples(X[aside], y[aside], cut)
        held = Holdings(
            samples=left,
            train=Samples(X[train], y[train]),
            validation=public,
            test=public,
            split=None,
            shape=X.shape[1:],
            classes=classes,
            counted=target is None,
            tests_clients=client is not None,
            test_owner=None if client is None else owner[aside].astype(np.int32),
            names=() if client is None else tuple(map(str, names.tolist())),
            target=number,
        )
        remedy = "train with sottovoce.simulate"
        if plan.noise == "secure":
            bound = "simulated in an estimator, which counts the classes on its rows"
            raise InputError.of("noise", "secure", bound, remedy)
        if plan.local.unit == "person":
            bound = "record or client in an estimator, which is not told whose rows they are"
            raise InputError.of("local.unit", "person", bound, remedy)
        with Interrupts() as interrupts:
            federation = build(plan, seed=seed, data=Given((X, y)), held=held)
            run = start_run(federation, seed)
            self.run_ = play_run(run, Callbacks(None, None), None, interrupts)
        self.guarantee_ = self.run_.guarantee
        return self

    def _check_rows(self, X: Any) -> NDArray[Any]:
        check_is_fitted(self)
        return np.asarray(validate_data(self, X, dtype=np.float32, reset=False))


class PrivateFederatedClassifier(_PrivateFederatedModel, ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Simulates a private federation that learns classes, behind scikit-learn's interface.

    `fit(X, y, client=ids)` trains on the rows of `client`'s sites, or deals them to `clients`
    equal clients (at most one a row). Every record that is trained on has (ε, δ) toward the
    server; a share `held_out` is set aside to evaluate, and is not protected. It is a simulation:
    `guarantee_` says what a deployment would promise and what it would not cover, as that classes
    were taken from `y`. `run_` is the `Trained` with its record. Scale features with public
    numbers first. `settings` are further keys of the plan, as ("model.hidden=32",).

        model = PrivateFederatedClassifier(epsilon=4, clients=20, random_state=0)
        model.fit(X, y, client=ward).score(X_test, y_test)
    """

    def fit(self, X: Any, y: Any, client: Any = None) -> Self:
        """Train on rows X with classes y; `client` names the site of each row."""
        X, y = validate_data(self, X, y, dtype=np.float32, ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise InputError.of("y", "1 class", "of two classes or more", "show every class")
        return self._fit(X, codes.astype(np.int32), client, len(self.classes_))

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Return the probability of each class of `classes_` for each row."""
        rows = self._check_rows(X)
        return self.run_.predict_proba(rows)

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the class of each row."""
        rows = self._check_rows(X)
        return np.asarray(self.classes_[self.run_.predict(rows)])


@dataclass(kw_only=True, eq=False, repr=False)
class PrivateFederatedRegressor(_PrivateFederatedModel, RegressorMixin, BaseEstimator):  # type: ignore[misc]
    """Simulates a private federation that predicts a number in the public range `target`.

    `fit` needs the range, which must not be taken from y; labels beyond it are cut to it.
    Everything else is as in `PrivateFederatedClassifier`.
    """

    target: tuple[float, float] | None = None
    learning_rate: float | str = 0.2

    def fit(self, X: Any, y: Any, client: Any = None) -> Self:
        """Train on rows X with numbers y; `client` names the site of each row."""
        try:
            low, high = self.target  # type: ignore[misc]  # what is not a pair is refused
        except (TypeError, ValueError):
            remedy = "give the public range of y, as target=(0, 100)"
            raise InputError.of("target", self.target, "two numbers (low, high)", remedy) from None
        X, y = validate_data(self, X, y, dtype=np.float32, y_numeric=True, ensure_min_samples=2)
        return self._fit(X, y, client, 1, (low, high))

    def predict(self, X: Any) -> NDArray[np.float64]:
        """Return the number of each row."""
        rows = self._check_rows(X)
        return np.asarray(self.run_.predict(rows))
