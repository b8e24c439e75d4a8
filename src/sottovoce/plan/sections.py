"""The tables of a plan, each frozen and checked by itself; `[data]` has its own file.

To add a key: add a field. Its description is its line in `sottovoce init`, in the JSON Schema and
in the sentence that refuses a bad value; `When` says with which option it applies. Bounds that
another package knows (a budget, a recipe, a schedule) are checked by making its value.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from sottovoce.errors import InputError, PlanError
from sottovoce.models import network
from sottovoce.models.base import LEAST_SQUARES, MODELS, find_model
from sottovoce.plan import base
from sottovoce.plan.base import MOST, Few, Number, Section, When, Whole, WholeOrZero, optional
from sottovoce.plan.data import Data
from sottovoce.privacy.budget import Budget, Calibration, Unit, View
from sottovoce.privacy.sensitivity import Recipe
from sottovoce.schedules import optimizer
from sottovoce.schedules.aggregate import Aggregation
from sottovoce.schedules.algorithms import SCHEDULES
from sottovoce.schedules.base import Schedule
from sottovoce.schedules.pricing import CohortKind

CUSTOM = "custom"  # the name of a model of one's own
ModelName: TypeAlias = Annotated[str, base.OneOf(MODELS, CUSTOM)]
ScheduleName: TypeAlias = Annotated[str, base.OneOf(SCHEDULES)]
Scale: TypeAlias = Annotated[Number, Field(ge=1e-6, le=1e6)]
FeatureName: TypeAlias = Annotated[str, Field(strict=True, min_length=1, max_length=1000)]


class ModelSection(Section):
    """What is trained."""

    title = "model"
    name: ModelName = Field(
        default="mlp", description="the model (custom: your own, named by `own` or from Python)"
    )
    hidden: Annotated[Whole | None, When("name", "mlp", 32)] = optional(
        "the hidden units of the mlp"
    )
    channels: Annotated[Whole | None, When("name", "cnn", 8)] = optional(
        "the channels of the cnn's convolution"
    )
    kappa: Annotated[Annotated[Number, Field(ge=0, le=MOST)] | None, When("name", "svm", 0.01)] = (
        optional("the weight κ of the svm's penalty κ/2‖w‖²")
    )
    norm: Annotated[Scale | None, When("name", LEAST_SQUARES, None)] = optional(
        "a public bound on the norm of a row, which least squares need (features: 4)", 4.0
    )
    own: Annotated[str | None, When("name", "custom", None)] = optional(
        "where your own model is: file.py:name or package.module:name", "net.py:model"
    )
    loss: Literal["squared", "huber", "own"] | None = optional(
        "the loss where the label is a number (own: that of a custom model)", "squared"
    )
    class_weights: Literal["balanced"] | tuple[Scale, ...] | None = optional(
        "how much each class counts after clipping (balanced: by data.prevalence)", [1.0, 20.0]
    )
    features: FeatureName | None = optional(
        "free features: hog, efficientnet-lite0, wordllama (texts), onnx:FILE, torch:FILE.py:NAME",
        "hog",
    )
    project: Few | None = optional(
        "the dimensions of a fixed random projection of a network's features", 400
    )
    project_seed: Annotated[int, Field(ge=0, lt=2**30)] | None = optional(
        "another projection, with model.project", 1
    )
    features_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = optional(
        "the SHA-256 of the network (filled in when the run starts)", "0" * 64
    )
    cell: Annotated[Whole | None, When("features", "hog", 4)] = optional(
        "the side of a cell in pixels, with model.features"
    )
    upright: Annotated[bool | None, When("features", "hog", False)] = optional(
        "whether a picture is first made upright by its own moments"
    )
    colours: Annotated[bool | None, When("features", "hog", None)] = optional(
        "whether the mean colours of the cells are features, too", True
    )

    @model_validator(mode="after")
    def _check_features(self) -> Self:
        if self.name == LEAST_SQUARES and self.features is None and self.norm is None:
            raise PlanError(
                "model.norm must be a public bound on the norm of a row with model.name = "
                f"{LEAST_SQUARES}, got None; give one (d numbers from -1 to 1: the root of d), or "
                "choose model.features, which have 4"
            )
        if not (self.has_network or self.features in (None, "hog")):
            remedy = "or leave it out"
            raise PlanError.of("model.features", self.features, network.NAMES, remedy)
        for key in ("project", "project_seed", "features_sha256"):
            if not self.has_network and getattr(self, key) is not None:
                raise PlanError.no_effect(f"model.{key}", "without a network in model.features")
        if self.features is not None and self.takes_pictures:
            bound = f"absent for the {self.name}"
            remedy = "it takes pictures; a softmax layer takes features"
            raise PlanError.of("model.features", self.features, bound, remedy)
        return self

    @property
    def has_network(self) -> bool:
        """Whether its features are those of a network."""
        return self.features is not None and network.is_network(self.features)

    @property
    def takes_pictures(self) -> bool:
        """Whether the named model is for pictures alone."""
        return self.name != CUSTOM and find_model(self.name).takes_pictures

    def explain_excess(self, classes: int | None, subject: str) -> str | None:
        """Return why the model cannot tell so many classes apart; None where it can."""
        most = None if self.name == CUSTOM else find_model(self.name).most_classes
        if most is None or classes is None or classes <= most:
            return None
        return f"the {self.name} tells {most} classes apart and {subject} has {classes}"

    @staticmethod
    def list_fitting(classes: int | None, are_pictures: bool) -> str:
        """Return the names of the models for such samples, as a sentence lists them."""
        models = {name: find_model(name) for name in MODELS}
        fitting = [name for name, model in models.items() if model.fits(classes or 2, are_pictures)]
        return base.join_names(fitting, "or")


class Local(Section):
    """What a client does with a model before it uploads it."""

    title = "local"
    learning_rate: Number | Literal["auto"] = Field(
        default=2.0,
        description="the length η of a step, above 0 (auto, of your own table: by a public rule)",
    )
    clip: Number | Literal["median"] = Field(
        default=1.0,
        description="the norm C a record's gradient is cut to (median: of raw norms, not covered)",
    )
    unit: Unit = Field(
        default="record",
        description="what is protected: a record, a person's rows at a client, or a client's data",
    )
    steps: Few = Field(
        default=1, description="the gradient steps of a round, each with noise and each charged (E)"
    )

    @model_validator(mode="after")
    def _check_recipe(self) -> Self:
        self._check_with(lambda: self.recipe(1.0).sensitivity([1, MOST]))
        return self

    @property
    def rate(self) -> float:
        """η as a number; 1 in place of "auto", until `Plan.choose_learning_rate` has the data."""
        return 1.0 if self.learning_rate == "auto" else self.learning_rate

    def recipe(self, median: float) -> Recipe:
        """Return the recipe; `median` is C where the plan says "median"."""
        clip = median if self.clip == "median" else self.clip
        return Recipe(self.rate, clip, unit=self.unit, steps=self.steps)


class Privacy(Section):
    """What each client is promised."""

    title = "privacy"
    epsilon: Annotated[Number, Field(le=1e6)] | tuple[Annotated[Number, Field(le=1e6)], ...] = (
        Field(
            default=8.0,
            description="the budget ε of every client, or a list (1 is strong, 8 is usual)",
        )
    )
    delta: Number | tuple[Number, ...] = Field(
        default=1e-5,
        description="δ, the most that is added to a probability, well below 1 / samples, or a list",
    )
    clients: str | None = optional(
        "a CSV file with id, epsilon and delta of each client instead of the two above",
        "budgets.csv",
    )
    calibration: Calibration = Field(
        default="exact",
        description="how noise follows from the budget (paper: too little noise, for comparison)",
    )
    view: View = Field(
        default="upload",
        description="what the server learns of a round: every upload, or only their sum",
    )
    honest: Annotated[Whole | None, When("view", "sum", None)] = optional(
        "how many clients of a round, itself included, a client counts on (h)", 8
    )
    corrupt: WholeOrZero | None = optional(
        "how many other clients may side with whoever sees sums or models (c)", 2
    )

    @model_validator(mode="before")
    @classmethod
    def _read_budget_file(cls, values: Any) -> Any:
        # The file is read once and kept as lists: a plan and its record need no second file.
        path = values.get("clients") if isinstance(values, dict) else None
        if not isinstance(path, str | Path):
            return values
        for key in ("epsilon", "delta"):
            if values.get(key) is not None:
                where, remedy = "beside privacy.clients", "remove one of the two"
                raise PlanError.no_effect(f"privacy.{key}", where, remedy)
        epsilon, delta = base.read_budgets(path)
        return {**values, "clients": None, "epsilon": epsilon, "delta": delta}

    @model_validator(mode="after")
    def _check_budgets(self) -> Self:
        for key in ("epsilon", "delta"):
            values = getattr(self, key)
            for i, value in enumerate(values if isinstance(values, tuple) else (values,)):
                try:
                    Budget(**{"epsilon": 1.0, "delta": 0.1, key: value})
                except InputError as error:
                    name = f"{key}[{i}]" if isinstance(values, tuple) else key
                    sentence = str(error).removeprefix(key)
                    raise PlanError(f"privacy.{name}{sentence}") from None
        return self


class Rounds(Section):
    """What happens when."""

    title = "rounds"
    schedule: ScheduleName = Field(
        default="discounted", description="how the number of rounds is decided"
    )
    rounds: Whole = Field(
        default=120, description="the number of rounds T₀ at the start, which is also the most"
    )
    beta: Annotated[Number | None, When("schedule", "discounted", 0.8)] = Field(
        default=None,
        description="the fraction of the rounds left to keep when the loss stops falling",
    )
    zeta: Annotated[
        Annotated[Number, Field(ge=-MOST, le=MOST)] | None, When("schedule", "discounted", 0.0)
    ] = Field(default=None, description="the fall ζ of the loss that a round must bring")
    window: Annotated[Whole | None, When("schedule", "discounted", 3)] = Field(
        default=None, description="how many losses are averaged (1: the paper's rule)"
    )
    slope: Annotated[Number | None, When("schedule", "decaying", 0.004)] = Field(
        default=None, description="by how much the noise falls each round with schedule = decaying"
    )
    per_round: Whole | None = Field(
        default=None,
        description="how many clients upload in a round (K; absent: every client)",
        examples=[10],
    )
    cohort: CohortKind = Field(
        default="balanced", description="who uploads: those asked least so far, or anyone"
    )

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        self._check_with(self.build)
        return self

    def build(self) -> Schedule:
        """Build the schedule that these keys describe."""
        names = [key for key, when in self.conditions() if when.value == self.schedule]
        options = {name: getattr(self, name) for name in names}
        return SCHEDULES[self.schedule](rounds=self.rounds, **options)


class Server(Section):
    """What the server makes of the uploads."""

    title = "server"
    weights: Literal["samples", "precision"] = Field(
        default="samples",
        description="what an upload is weighed by: rows, or (for unequal budgets) precision",
    )
    divergence: Annotated[
        Annotated[Number, Field(ge=0, le=1e12)] | None, When("weights", "precision", None)
    ] = optional(
        "how much clients' gradients differ, Γ², for precision (absent: 0 iid, or C²)", 0.0
    )
    aggregation: Aggregation | None = optional(
        "how uploads are combined (absent: mean; others resist hostile ones; free)", "trimmed"
    )
    trim: Annotated[
        Annotated[Number, Field(ge=0.01, le=0.49)] | None, When("aggregation", "trimmed", 0.2)
    ] = optional("the weight left out at either end with aggregation = trimmed")
    signal: Literal["public", "clients", "raw"] = Field(
        default="public",
        description="whose loss decides: that of the validation set, of clients (noised), or raw",
    )
    loss_bound: Annotated[Scale | None, When("signal", "clients", 5.0)] = optional(
        "what a client's losses are cut to with signal = clients"
    )

    momentum: Number | None = optional(
        "how much of its last step the server keeps, above 0 and below 1 (free)", 0.5
    )
    decay: optimizer.DecayKind | None = optional(
        "how the server's steps get shorter round by round (free)", "cosine"
    )
    average: Literal["exponential", "tail"] | None = optional(
        "the average of iterates to return, running or of the last rounds (free)", "tail"
    )
    keep: Annotated[Number | None, When("average", "exponential", 0.9)] = optional(
        "what fraction a running average keeps of itself, between 0 and 1"
    )
    tail: Annotated[Number | None, When("average", "tail", 0.5)] = optional(
        "the fraction of the rounds, the last ones, to average, at most 1"
    )
    choose: Literal["last", "best"] | None = optional(
        "which round's model is returned, the best in validation or the last (free)", "best"
    )

    @model_validator(mode="after")
    def _check_finish(self) -> Self:
        self._check_with(self.finish)
        return self

    def finish(self) -> optimizer.Finish:
        """Build the server's optimiser, which costs no privacy."""
        return optimizer.Finish(
            momentum=self.momentum,
            decay=self.decay,
            keep=self.keep,
            tail=self.tail,
            best=self.choose == "best",
        )


for _table in (Data, ModelSection, Local, Privacy, Rounds, Server):
    base.TABLES[_table.title] = _table
