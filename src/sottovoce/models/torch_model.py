"""A PyTorch model behind the same trust boundary: a release in float64, and sums for simulation.

    from sottovoce import TorchModel
    model = TorchModel(lambda: nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))

Only parameters with `requires_grad` are trained, clipped, noised and uploaded. A release computes
each sample alone in float64; clipping, grid, exact sum and noise are not done here, so that nothing
here can weaken the guarantee except gradients that mix samples. A chain of linear layers and
activations of torch's own, without hooks, has no code that could: its rows go through numpy
together, as those of a named model do.

The clipped sums of a simulation come from one pass over many rows (`torch.func.vmap` of the
gradient of one row). The gradient of a linear layer, a convolution or an embedding is a sum of
outer products δ aᵀ of the layer's inputs a and the loss's derivatives δ by its outputs. A zero that
is added to the outputs has the derivative δ, so that norms and clipped sums are computed from a and
δ, and no such gradient is written out; those of all other parameters are. Opacus, which does this
with hooks, is not used: hooks write onto the module, take the first axis of a layer's input for the
samples, know fewer layers, and give no weights to rows.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from sottovoce.errors import InputError
from sottovoce.models import base
from sottovoce.models.base import Arrays, Floats, Model, Shapes
from sottovoce.models.softmax import score_errors_numpy
from sottovoce.privacy.grid import Products, flush_tiny

Tensors = dict[str, Tensor]
# The gradients of some rows by one parameter: written out, [rows, *shape], or as δ and a of outer
# products, [rows, T, out] and [rows, T, in]; a of an embedding is its tokens, [rows, T].
Gradients = Tensor | tuple[Tensor, Tensor]
Chain = tuple[tuple[str, Any], ...]  # type and name (with a dot) of each layer, in order

CPU_BYTES, GPU_BYTES = 32 << 20, 1 << 30  # of what is kept of the rows of a chunk
MOST_ROWS = {"cpu": 1024, "cuda": 1 << 16}  # of a chunk: what the module needs besides is not known
# The functions whose gradients are outer products, with the names of their arguments.
_FIRST = "input", "weight"
_FUNCTIONS = {
    functional.linear: (*_FIRST, "bias"),
    torch.conv2d: (*_FIRST, "bias", "stride", "padding", "dilation", "groups"),
    functional.embedding: (*_FIRST, "padding_idx", "max_norm", "norm_type", "scaled", "sparse"),
}
# The layers of a chain besides linear ones: the outputs, and the derivative as a function of them.
_ACTIVATIONS: dict[Any, tuple[Callable[[Floats], Any], Callable[[Floats], Any]]] = {
    nn.ReLU: (lambda x: np.maximum(x, 0), lambda y: y > 0),
    nn.Tanh: (np.tanh, lambda y: 1 - y**2),
    nn.Sigmoid: (
        lambda x: 1 / (1 + np.exp(np.clip(-x, -170, 170))),  # e^±709 takes longer
        lambda y: y * (1 - y),
    ),
}
_KINDS = {
    kind: kind for kind in (nn.Linear, nn.Flatten, nn.Identity, nn.Dropout, *_ACTIVATIONS)
} | {
    call: kind
    for kind, calls in {
        nn.ReLU: (torch.relu, functional.relu, "relu"),
        nn.Tanh: (torch.tanh, functional.tanh, "tanh"),
        nn.Sigmoid: (torch.sigmoid, functional.sigmoid, "sigmoid"),
        nn.Identity: (torch.flatten, "flatten", functional.dropout),
    }.items()
    for call in calls
}


def warm() -> None:
    """Compute a first gradient: torch then imports what takes it seconds, and starts no thread."""
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    torch.autograd.grad((weight * weight).sum(), weight)


class LayerCall(NamedTuple):
    """A call of a layer whose weight has outer products as its gradient."""

    function: Any
    weight: str
    bias: str | None
    inputs: tuple[int, ...]  # shape of its input for one row
    outputs: tuple[int, ...]
    options: Mapping[str, Any]

    @property
    def vectors(self) -> int:
        """How many outer products T the gradient of one row has."""
        return math.prod(self.outputs) // self.outputs[-3 if self.function is torch.conv2d else -1]

    @property
    def numbers(self) -> int:
        """How many numbers of a row are kept: inputs (of a convolution: its patches) and errors."""
        width = math.prod(self.inputs)
        if self.function is torch.conv2d:
            width = self.vectors * self.inputs[-3] * math.prod(self.options["kernel"])
        return width + 2 * math.prod(self.outputs)


class LayerCalls(NamedTuple):
    """What a module does with one row: which gradients are products, and which are written out."""

    calls: tuple[LayerCall, ...]  # a bias is named where its gradient is the sum of the errors
    written: tuple[str, ...]
    chain: Chain = ()  # all layers, if the module is a chain of known ones, else empty

    @property
    def vector_calls(self) -> tuple[LayerCall, ...]:
        """The linear layers with one outer product a row, which a release keeps as such."""
        weights = Counter(call.weight for call in self.calls)
        biases = Counter(call.bias for call in self.calls)
        return tuple(
            call._replace(bias=call.bias if biases[call.bias] == 1 else None)
            for call in self.calls
            if call.function is functional.linear
            and call.vectors == 1
            and weights[call.weight] == 1
        )


class _CallRecorder(TorchFunctionMode):
    """Records the calls of layers whose weight is watched.

    `others` names the watched parameters that are used in any other way. To the outputs of the
    calls that are `expected` it adds `zeros`, and it keeps their inputs.
    """

    def __init__(
        self,
        watched: Mapping[str, Tensor],
        expected: Sequence[LayerCall] = (),
        zeros: Sequence[Tensor] = (),
    ) -> None:
        super().__init__()
        self.names = {id(leaf): name for name, leaf in watched.items()}
        self.expected, self.zeros = expected, zeros
        self.calls, self.inputs, self.others = list[LayerCall](), list[Tensor](), set[str]()

    @property
    def is_alike(self) -> bool:
        """Whether the calls were the expected ones: else the factors are another gradient."""
        return not self.others and [*self.expected] == self.calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, names = kwargs or {}, self.names
        used = {names[key] for key in _list_ids((*args, *kwargs.values())) if key in names}
        options: dict[str, Any] = {}
        if func in _FUNCTIONS:
            options = dict(zip(_FUNCTIONS[func], args, strict=False)) | kwargs
        if func is functional.linear and options["input"].ndim == 2:
            # One row is a batch of one here; vmap is twice as fast with another axis.
            outputs = func(options["input"][None], options["weight"], options.get("bias"))[0]
        else:
            outputs = func(*args, **kwargs)
        is_tensor = any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(outputs))
        if not used or not is_tensor:
            return outputs  # a shape or a type has no gradient
        inputs, weight = options.pop("input", None), names.get(id(options.get("weight")))
        if weight is None or id(inputs) in names or not _is_product(options):
            self.others |= used
            return outputs
        bias, turn = names.get(id(options.pop("bias", None))), len(self.calls)
        options["kernel"] = tuple(options.pop("weight").shape[2:])
        call = LayerCall(func, weight, bias, tuple(inputs.shape), tuple(outputs.shape), options)
        self.calls.append(call)
        self.others |= used - {weight, bias}
        if call in self.expected[turn : turn + 1]:
            self.inputs.append(inputs)
            outputs = outputs + self.zeros[turn]
        return outputs


def _list_ids(values: Iterable[Any]) -> Iterator[int]:
    """Yield the ids of arguments, also of those in lists: torch's functions nest no deeper.

    It is called for every function of every sample: torch's own tree functions take 15 % longer.
    """
    for value in values:
        yield id(value)
        if isinstance(value, list | tuple):
            yield from map(id, value)


def _is_product(options: Mapping[str, Any]) -> bool:
    weight = options["weight"]
    is_matrix = weight.ndim > 1 and weight.numel() > 0  # a vector may be a bias elsewhere
    is_plain = options.get("groups", 1) == 1 and not isinstance(options.get("padding"), str)
    scaled = options.get("scaled") or options.get("scale_grad_by_freq") or options.get("sparse")
    has_padding = (options.get("padding_idx") or 0) >= 0  # a negative one counts from the end
    return is_matrix and is_plain and not scaled and options.get("max_norm") is None and has_padding


@final
class TorchModel(Model):
    """`make` is a module, or a function that builds one; `shape` is that of one sample.

    Rows come flattened; with a list of shapes the module gets as many inputs, cut from the row in
    this order. `loss(scores, y)` gives one loss a row; the default is the cross-entropy. A module
    starts with the parameters that it has; a function is called for every first model, with the
    seed of the run. What is not trained is built with one fixed seed. The module is in `eval` mode
    and is not written to.

    >>> model = TorchModel(lambda: torch.nn.Linear(2, 3))
    >>> model.shapes()
    {'bias': (3,), 'weight': (3, 2)}
    >>> params, x, y = model.draw_parameters(seed=1), np.ones((4, 2)), np.array([0, 1, 2, 0])
    >>> model.gradients(params, x, y)["bias"].shape
    (4, 3)
    """

    warm_up = "sottovoce.models.torch_model:warm"

    def __init__(
        self,
        make: Callable[[], nn.Module] | nn.Module,
        *,
        shape: tuple[int, ...] | Sequence[tuple[int, ...]] | None = None,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        if not callable(make):
            remedy = "give nn.Sequential(…), or a function that returns one"
            raise InputError.of("make", make, "a torch module or a function of none", remedy)
        self._make = copy.deepcopy(make) if isinstance(make, nn.Module) else make
        several = isinstance(shape, Sequence) and any(isinstance(s, Sequence) for s in shape)
        self._shapes: Any = shape if several or shape is None else [shape]
        self._loss = loss or _cross_entropy
        self._layouts: dict[tuple[int, bool], LayerCalls] = {}
        self._fixed: dict[Any, Tensors] = {}  # buffers and frozen parameters, by type and place
        self._is_vmapped = True

    @cached_property
    def _module(self) -> nn.Module:
        module = self._make if isinstance(self._make, nn.Module) else _build_seeded(self._make, 0)
        for name, parameter in module.named_parameters():
            if nn.parameter.is_lazy(parameter):
                raise InputError.of("the torch module", name, "of known sizes", "state its sizes")
        module = copy.deepcopy(module).cpu().double().eval()
        for name, layer in module.named_modules():
            is_fixed = getattr(layer, "running_mean", None) is not None and not any(
                parameter.requires_grad for parameter in layer.parameters()
            )
            if isinstance(layer, nn.modules.batchnorm._BatchNorm) and not is_fixed:
                found = f"{name or 'itself'}: {type(layer).__name__}"
                bound = "without batch normalisation, or with a frozen one"
                remedy = "batch normalisation mixes samples; use GroupNorm or LayerNorm"
                raise InputError.of("the torch module", found, bound, remedy)
        if not any(parameter.requires_grad for parameter in module.parameters()):
            remedy = "set requires_grad of what is to be trained"
            raise InputError.of("the torch module", "none", "with a trainable parameter", remedy)
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and parameter.is_complex():  # half of it would be left out
                remedy = "keep real and imaginary parts as two parameters"
                raise InputError.of("every trainable parameter", name, "of real numbers", remedy)
        return module

    @cached_property
    def _trained(self) -> dict[str, nn.Parameter]:
        """The trainable parameters of the module, sorted by name."""
        named = self._module.named_parameters()
        return dict(sorted((name, leaf) for name, leaf in named if leaf.requires_grad))

    def shapes(self) -> Shapes:
        """Return names and shapes of the trainable parameters, sorted by name."""
        return {name: tuple(leaf.shape) for name, leaf in self._trained.items()}

    def draw_parameters(self, seed: int) -> dict[str, NDArray[np.float32]]:
        """Return the first model, a function of the seed; torch's own state stays as it was."""
        make = self._make
        module = make if isinstance(make, nn.Module) else _build_seeded(make, seed)
        drawn = dict(module.named_parameters())
        return {name: drawn[name].detach().cpu().float().numpy() for name in self._trained}

    # A release: every sample alone, in float64.

    def gradients(self, params: Arrays, x: NDArray[Any], y: NDArray[Any]) -> Arrays:
        """Return every sample's gradient in float64, each computed alone.

        In one batch a row's last bits may depend on the others, and its NaN may reach them.
        """
        self.survey(x.shape[1], y.dtype)  # it refuses a module that does not fit
        factors, _ = self._differentiate_alone((), params, x, y)
        pieces = zip(self._trained.items(), factors, strict=True)
        return {name: right.reshape(len(x), *leaf.shape) for (name, leaf), (_, right) in pieces}

    @property
    def keeps_factors(self) -> bool:  # type: ignore[override]
        """Whether `factor_gradients` writes no matrix out, for rows that were seen before."""
        used = [{call.weight for call in layout.vector_calls} for layout in self._layouts.values()]
        matrices = {name for name, leaf in self._trained.items() if leaf.ndim > 1}
        return bool(used) and all(matrices <= names for names in used)

    def factor_gradients(
        self, params: Arrays, x: Floats, y: Any
    ) -> tuple[Products, NDArray[np.bool_]]:
        """Return every sample's gradient, each computed alone; outer products are not written out.

        A sample that the module fails on has NaN. The second value is which samples made the calls
        of the survey; a gradient of any other has no such factors, and is to be written out.
        """
        layout = self.survey(x.shape[1], np.asarray(y).dtype)
        if layout.chain:
            return self._differentiate_chain(layout.chain, params, x, y), np.ones(len(x), bool)
        pieces, is_alike = self._differentiate_alone(layout.vector_calls, params, x, y)
        return Products(tuple(pieces)), is_alike

    def _differentiate_chain(self, chain: Chain, params: Arrays, x: Floats, y: Any) -> Products:
        """Return every sample's gradient by numpy: every operation is on one row, or one number.

        No code of the module's runs, so that a row has the same bits in any company. Numbers below
        2⁻²⁵⁰ count as 0 after every layer: the time of subnormal products would tell of a row.
        """
        tensors = {name: leaf.detach().numpy() for name, leaf in self._constants.items()}
        tensors |= params
        values, pieces = [x], dict[str, tuple[Floats, Floats]]()
        for name, kind in chain:
            if kind is nn.Linear:
                outputs = base.multiply_rows(values[-1], tensors[f"{name}weight"].T)
                outputs = outputs + tensors.get(f"{name}bias", 0)
            else:
                outputs = _ACTIVATIONS[kind][0](values[-1])
            values.append(flush_tiny(outputs))
        scores = values.pop()
        is_class = (y >= 0) & (y < scores.shape[1])
        errors = score_errors_numpy(scores, np.where(is_class, y, 0))
        errors[~is_class] = np.nan
        outputs, ones = scores, np.ones((len(x), 1))
        for name, kind in reversed(chain):
            inputs = values.pop()
            if kind is nn.Linear:
                pieces |= {f"{name}weight": (errors, inputs), f"{name}bias": (ones, errors)}
                if pieces.keys() >= self._trained.keys():
                    break
                errors = base.multiply_rows(errors, tensors[f"{name}weight"])
            else:
                errors = errors * _ACTIVATIONS[kind][1](outputs)
            errors, outputs = flush_tiny(errors), inputs
        return Products(tuple(pieces[name] for name in self._trained))

    def _differentiate_alone(
        self, calls: Sequence[LayerCall], params: Arrays, x: Floats, y: Any
    ) -> tuple[list[tuple[Floats, Floats]], NDArray[np.bool_]]:
        """Return the gradients of each row alone by every parameter as factors.

        The second value is which rows made these calls.
        """
        trained, is_alike = self._trained, np.ones(len(x), bool)
        of_calls = {name for call in calls for name in (call.weight, call.bias)}
        written = [name for name in trained if name not in of_calls]
        errors = [np.full((len(x), math.prod(call.outputs)), np.nan) for call in calls]
        inputs = [np.full((len(x), math.prod(call.inputs)), np.nan) for call in calls]
        leaves = [np.full((len(x), trained[name].numel()), np.nan) for name in written]
        kind = torch.float64
        zeros = [torch.zeros(call.outputs, dtype=kind, requires_grad=True) for call in calls]
        for i, (module, row, label) in enumerate(self._load_rows(params, x, y)):
            named = dict(module.named_parameters())
            watched = {name: parameter for name, parameter in named.items() if name in of_calls}
            recorder = _CallRecorder(watched, calls, zeros)
            sources = [*zeros, *(named[name] for name in written)]
            try:
                with recorder:
                    scores = module(*self._arrange(row))
                loss = self._compute_losses(scores, label)[0]
                derivatives = torch.autograd.grad(loss, sources, materialize_grads=True)
            except KeyboardInterrupt:
                raise
            except BaseException:  # an exit that a sample causes would tell of it, too
                continue
            if not recorder.is_alike:
                is_alike[i] = False
                continue
            for target, source in zip([*errors, *leaves], derivatives, strict=True):
                target[i] = source.numpy().reshape(-1)
            for target, recorded in zip(inputs, recorder.inputs, strict=True):
                target[i] = recorded.detach().numpy().reshape(-1)
        ones = np.ones((len(x), 1))
        pieces: dict[str | None, tuple[Floats, Floats]]
        pieces = {name: (ones, leaf) for name, leaf in zip(written, leaves, strict=True)}
        for call, error, inputs_of_call in zip(calls, errors, inputs, strict=True):
            pieces |= {call.weight: (error, inputs_of_call), call.bias: (ones, error)}
        return [pieces[name] for name in trained], is_alike

    def losses(self, params: Arrays, x: NDArray[Any], y: NDArray[Any]) -> NDArray[np.float64]:
        """Return the loss of every sample, each computed alone."""
        with torch.no_grad():
            losses = [
                self._compute_losses(module(*self._arrange(row)), label)
                for module, row, label in self._load_rows(params, x, y)
            ]
        return np.asarray(torch.cat(losses).numpy(), dtype=np.float64)

    def _load_rows(
        self, params: Arrays, x: Any, y: Any
    ) -> Iterator[tuple[nn.Module, Tensor, Tensor]]:
        """Yield each row and label as a batch of one, with a module of its own.

        What a module writes to parameters, buffers, attributes or torch's generator while it
        computes one row must not reach another: a row that did would move more than its own share.
        """
        loaded = copy.deepcopy(self._module)
        leaves = dict(loaded.named_parameters())
        with torch.no_grad():
            for name in self._trained:
                leaves[name].copy_(torch.tensor(np.asarray(params[name], np.float64)))
        labels = torch.from_numpy(np.array(y, _label_type(y)))
        # Copies of tensors lie where those of the row before did: new memory takes far longer.
        held = [
            (leaf, leaf.detach().clone())
            for leaf in (*loaded.parameters(), *loaded.buffers())
            if type(leaf) in (nn.Parameter, Tensor)
        ]
        drawn = torch.get_rng_state()
        try:
            for i in range(len(labels)):
                torch.default_generator.manual_seed(0)
                copies: dict[int, Any] = {}
                for leaf, place in held:
                    fresh = place.copy_(leaf.detach()).detach()
                    is_leaf = isinstance(leaf, nn.Parameter)
                    copies[id(leaf)] = nn.Parameter(fresh, leaf.requires_grad) if is_leaf else fresh
                # A copy of its own is aligned alike whatever its position, and nobody else's.
                row = torch.from_numpy(np.array(x[i : i + 1], np.float64))
                yield copy.deepcopy(loaded, copies), row.clone(), labels[i : i + 1].clone()
        finally:
            torch.set_rng_state(drawn)

    @cached_property
    def _constants(self) -> Tensors:
        """Buffers and frozen parameters of the module."""
        named = [*self._module.named_buffers(), *self._module.named_parameters()]
        return {name: leaf for name, leaf in named if name not in self._trained}

    # What a module does with a row.

    def survey(self, width: int, label_type: Any) -> LayerCalls:
        """Return what the module does with rows of so many numbers, or refuse it in one sentence.

        It is asked once, on a row of zeros: nothing here depends on the client's samples.
        """
        key = width, np.dtype(label_type).kind == "f"
        if key not in self._layouts:
            layout = self._survey(*key)
            chain = _trace_chain(self._module) if self._loss is _cross_entropy else ()
            if chain and self._is_chain(chain, width):
                layout = layout._replace(chain=chain)
            self._layouts[key] = layout
        return self._layouts[key]

    def _is_chain(self, chain: Chain, width: int) -> bool:
        """Return whether the module does what the chain does with two public rows.

        Parameters are drawn: zeros, with which some modules begin, would hide a difference.
        """
        draw, shapes = np.random.default_rng(0).standard_normal, self.shapes()
        params = {name: draw(shape) / max((1, *shape)) ** 0.5 for name, shape in shapes.items()}
        x, y = draw((2, width)), np.zeros(2, np.int64)
        alone = Products(tuple(self._differentiate_alone((), params, x, y)[0])).write_out()
        try:
            together = self._differentiate_chain(chain, params, x, y).write_out()
        except (LookupError, ValueError):  # shapes or names that do not fit
            return False
        return np.allclose(together, alone, rtol=1e-9, atol=1e-12 * np.abs(alone).max())

    def _survey(self, width: int, is_number: bool) -> LayerCalls:
        module = copy.deepcopy(self._module)  # no call may change the one that others are made of
        named = dict(module.named_parameters())
        trained = {name: named[name] for name in self._trained}
        recorder = _CallRecorder(trained)
        row = torch.zeros(1, width, dtype=torch.float64)
        label = torch.zeros(1, dtype=torch.float64 if is_number else torch.int64)
        try:
            with recorder:
                scores = module(*self._arrange(row))
            loss = self._compute_losses(scores, label)[0]
            gradients: Any = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        except InputError:
            raise
        except Exception as error:  # its code may raise anything
            message = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            raise InputError(
                f"the torch module does not fit rows of {width} numbers ({message}); correct its "
                "forward or loss, or give TorchModel the shape of a sample"
            ) from None
        for name, leaf in zip(trained, gradients, strict=True):
            if leaf is None:
                bound, remedy = "used by the loss", "freeze it with requires_grad_(False)"
                raise InputError.of("every trainable parameter", name, bound, remedy)
        after = {**dict(module.named_buffers()), **dict(module.named_parameters())}
        for name, constant in self._constants.items():
            if name not in after or not torch.equal(after[name], constant):
                remedy = "keep nothing of a sample in it"
                raise InputError.of("every buffer", name, "unchanged by forward", remedy)
        uses = {
            (call.weight, call.function, call.options.get("padding_idx")) for call in recorder.calls
        }
        counts = Counter(weight for weight, *_ in uses)
        mixed = recorder.others | {weight for weight, count in counts.items() if count > 1}
        outside = {call.bias for call in recorder.calls if call.weight in mixed} | mixed
        calls = tuple(
            call._replace(bias=None if call.bias in outside else call.bias)
            for call in recorder.calls
            if call.weight not in mixed
        )
        of_calls = {name for call in calls for name in (call.weight, call.bias)}
        return LayerCalls(calls, tuple(name for name in trained if name not in of_calls))

    def _arrange(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the module's inputs, cut from the rows."""
        if self._shapes is None:
            return (rows,)
        sizes = [math.prod(shape) for shape in self._shapes]
        if sum(sizes) != rows.shape[1]:
            remedy = "give the shape of one sample, or a list of the shapes of its inputs"
            raise InputError.of("shape", self._shapes, f"{rows.shape[1]} numbers in all", remedy)
        pieces = zip(torch.split(rows, sizes, dim=1), self._shapes, strict=True)
        return tuple(piece.reshape(-1, *shape) for piece, shape in pieces)

    def _compute_losses(self, scores: Tensor, y: Tensor) -> Tensor:
        losses = self._loss(scores, y)
        if losses.shape != y.shape:
            # A mean over the batch would make every sample's gradient depend on its neighbours.
            remedy = "return one loss a row and leave out the mean"
            raise InputError.of("loss", tuple(losses.shape), f"of shape {tuple(y.shape)}", remedy)
        return losses

    # Sums and scores of many rows, in the precision of the parameters.

    def clipped_sum(
        self, params: Arrays, x: NDArray[Any], y: NDArray[Any], weight: Any, clip: float
    ) -> dict[str, NDArray[Any]]:
        """Return Σ_m weight_m · g_m / max(1, ‖g_m‖/C), in chunks of bounded memory.

        Rows of weight 0, and rows whose gradient is not finite, add nothing.
        """
        layout, tensors = self.survey(x.shape[1], y.dtype), self._move_tensors(params)
        sample = next(iter(tensors.values()))
        device, kind, trained = sample.device, sample.dtype, self._trained
        total = {name: torch.zeros_like(tensors[name]) for name in trained}
        numbers = sum(call.numbers for call in layout.calls) + x.shape[1]
        numbers += sum(trained[name].numel() for name in layout.written)
        budget = CPU_BYTES if device.type == "cpu" else GPU_BYTES
        rows = max(1, min(budget // (numbers * kind.itemsize), MOST_ROWS[device.type]))
        for start in range(0, len(y), rows):
            chunk = slice(start, start + rows)
            row, label = self._move_rows(x[chunk], y[chunk], kind, device)
            share = torch.from_numpy(np.asarray(weight[chunk])).to(device, kind)
            gradients = self._differentiate(layout, tensors, row, label)
            measured = {name: _measure_rows(leaf) for name, leaf in gradients.items()}
            squared = torch.stack([square for _, square in measured.values()]).sum(0)
            is_counted = torch.isfinite(squared) & (share != 0)
            norms = squared.clamp(min=0).sqrt()
            factor = torch.where(norms > clip, clip / norms, 1.0) * share
            factor, is_clean = torch.where(is_counted, factor, 0), bool(is_counted.all())
            for name, (leaf, _) in measured.items():
                # 0 · NaN would spoil the sum.
                counted = leaf if is_clean else _keep_rows(leaf, is_counted)
                total[name] += _add_rows(counted, factor, total[name].shape)
        return {name: leaf.cpu().numpy() for name, leaf in total.items()}

    def _differentiate(
        self, layout: LayerCalls, tensors: Tensors, rows: Tensor, labels: Tensor
    ) -> dict[str, Gradients]:
        """Return the gradient of each row by every trainable parameter."""
        like = next(iter(tensors.values()))
        zeros = [like.new_zeros(call.outputs) for call in layout.calls]
        leaves = {name: tensors[name] for name in layout.written}
        watched = {name: tensors[name] for name in self._trained if name not in leaves}
        module = copy.deepcopy(self._module)

        def compute_loss(
            zeros: list[Tensor], leaves: Tensors, row: Tensor, label: Tensor
        ) -> tuple[Tensor, list[Tensor]]:
            recorder = _CallRecorder(watched, layout.calls, zeros)
            with recorder:
                given = self._arrange(row[None])
                scores = functional_call(module, tensors | leaves, given)
            if not recorder.is_alike:
                raise InputError(
                    "the torch module must use the same layers for every row in a simulation; "
                    'train it with noise = "secure"'
                )
            return self._compute_losses(scores, label[None])[0], recorder.inputs

        compute = grad(compute_loss, argnums=(0, 1), has_aux=True)
        with sdpa_kernel(SDPBackend.MATH):  # the others are computed row by row under vmap
            if self._is_vmapped:
                try:
                    batched = vmap(compute, in_dims=(None, None, 0, 0))
                    (errors, written), inputs = batched(zeros, leaves, rows, labels)
                except RuntimeError:  # such as recurrent layers: vmap does not know them
                    self._is_vmapped = False
            if not self._is_vmapped:
                alone = [compute(zeros, leaves, *pair) for pair in zip(rows, labels, strict=True)]
                (errors, written), inputs = pytree.tree_map(lambda *row: torch.stack(row), *alone)
        gradients: dict[str, Gradients] = written
        products: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for call, error, given in zip(layout.calls, errors, inputs, strict=True):
            pair = _arrange_product(call, error, given)
            products.setdefault(call.weight, []).append(pair)
            if call.bias is not None:
                summed = pair[0].sum(1)
                written[call.bias] = written[call.bias] + summed if call.bias in written else summed
        for name, pairs in products.items():
            error, given = pairs[0]
            if len(pairs) > 1:  # a weight that is used several times
                error, given = (torch.cat(parts, 1) for parts in zip(*pairs, strict=True))
            is_short = 2 * error.shape[1] ** 2 <= error.shape[2] * given.shape[-1]
            is_product = is_short or not given.is_floating_point() or error.shape[1] == 1
            gradients[name] = (error, given) if is_product else error.mT @ given
        return gradients

    def _move_tensors(self, params: Arrays) -> Tensors:
        """Return all tensors of the module where torch computes, in the type of `params`."""
        kind = torch.from_numpy(np.zeros(0, np.result_type(*params.values()))).dtype
        device = "cuda" if torch.cuda.is_available() else "cpu"
        key = kind, device
        if key not in self._fixed:
            self._fixed[key] = {
                name: leaf.detach().to(device, kind if leaf.is_floating_point() else leaf.dtype)
                for name, leaf in self._constants.items()
            }
        arrays = {name: torch.tensor(np.asarray(params[name])) for name in self._trained}
        return {name: leaf.to(device, kind) for name, leaf in arrays.items()} | self._fixed[key]

    @staticmethod
    def _move_rows(x: Any, y: Any, kind: Any, device: Any) -> tuple[Tensor, Tensor]:
        label = torch.from_numpy(np.array(y, _label_type(y)))
        label = label.to(device, kind if label.is_floating_point() else torch.int64)
        return torch.from_numpy(np.ascontiguousarray(x)).to(device, kind), label

    def evaluate(self, params: Arrays, x: Any, y: Any) -> tuple[float, float]:
        """Return the mean loss and the accuracy over the rows, which are public: in batches."""
        loss, correct = 0.0, 0
        for scores, label in self._apply(params, x, y):
            loss += float(self._compute_losses(scores, label).double().sum())
            correct += int((_decide(scores) == label).sum())
        return loss / len(y), correct / len(y)

    def predict(self, params: Arrays, x: NDArray[Any]) -> NDArray[np.int64]:
        """Return the class with the largest score."""
        return self.answer(params, x)[0]

    def answer(
        self, params: Arrays, x: NDArray[Any]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64] | None]:
        chunks = [scores.cpu().numpy() for scores, _ in self._apply(params, x, np.zeros(len(x)))]
        scores = np.concatenate(chunks)
        decided = _decide(torch.from_numpy(scores)).numpy()
        return np.asarray(decided, np.int64), base.arrange_scores(scores)

    def _apply(self, params: Arrays, x: Any, y: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield scores and labels of some rows at a time."""
        tensors, module = self._move_tensors(params), copy.deepcopy(self._module)
        sample = next(iter(tensors.values()))
        for start in range(0, len(x), base.EVALUATED_ROWS):
            chunk = slice(start, start + base.EVALUATED_ROWS)
            rows, labels = self._move_rows(x[chunk], y[chunk], sample.dtype, sample.device)
            with torch.no_grad():
                yield functional_call(module, tensors, self._arrange(rows)), labels


def _trace_chain(module: nn.Module) -> Chain:
    """Return the layers of a module that is a chain of known ones; none of any other module.

    `forward` runs once, without numbers: one that looks at a value cannot be traced. Types are
    exact, since a subclass may do anything; no layer has a hook or a `forward` of its own, and no
    parameter a second use.
    """
    wrapped = nn.Sequential(copy.deepcopy(module))  # so that a layer alone is one, too
    try:
        nodes = list(fx.Tracer().trace(wrapped).nodes)
    except Exception:  # its code may raise anything
        return ()
    chain, leaves = list[tuple[str, Any]](), list[Any]()
    for last, node in itertools.pairwise(nodes):
        if node.all_input_nodes != [last]:
            return ()
        if node.op == "output":
            is_used_once = len({*map(id, leaves)}) == len(leaves)
            return tuple(chain) if is_used_once else ()
        called = node.target
        if node.op == "call_module":
            layer = wrapped.get_submodule(str(called))
            hooks = [hook for key, hook in vars(layer).items() if key.endswith("_hooks")]
            if any(hooks) or "forward" in vars(layer):
                return ()
            called, leaves = type(layer), [*leaves, *layer.parameters()]
        kind = _KINDS.get(called)
        if kind is nn.Linear or kind in _ACTIVATIONS:
            chain.append((f"{node.target}.".partition(".")[2], kind))
        elif kind is None:
            return ()
    return ()


def _build_seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed % 2**63)
        module = make()
    if not isinstance(module, nn.Module):
        raise InputError.of("make", module, "a function that returns a torch module", "return one")
    return module


def _decide(scores: Tensor) -> Tensor:
    """Return the class with the largest score, or the sign where there is one score a row."""
    has_one = scores.ndim == 1 or scores.shape[-1] == 1
    return scores.reshape(-1) > 0 if has_one else scores.argmax(dim=-1)


def _label_type(y: Any) -> Any:
    return np.float64 if np.asarray(y).dtype.kind == "f" else np.int64


def _cross_entropy(scores: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(scores, y, reduction="none")


def _arrange_product(call: LayerCall, error: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return δ [rows, T, out] and a [rows, T, in], or the tokens [rows, T], of one call."""
    rows = len(error)
    if call.function is torch.conv2d:
        options = {key: call.options.get(key, 1) for key in ("stride", "dilation")}
        options["padding"] = call.options.get("padding", 0)
        pictures = inputs.flatten(0, 1) if inputs.ndim == 5 else inputs
        patches = functional.unfold(pictures, call.options["kernel"], **options)
        error = error.reshape(len(patches), error.shape[-3], -1).mT
        inputs = patches.mT.reshape(rows, -1, patches.shape[1])
        return error.reshape(rows, -1, error.shape[-1]), inputs
    error = error.reshape(rows, -1, error.shape[-1])
    if call.function is functional.linear:
        return error, inputs.reshape(rows, -1, inputs.shape[-1])
    inputs = inputs.reshape(rows, -1)
    padding = call.options.get("padding_idx")
    return error if padding is None else error * (inputs != padding)[..., None], inputs


def _square_lengths(rows: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(rows.reshape(len(rows), -1), dim=1)
    return lengths.square()


def _measure_rows(leaf: Gradients) -> tuple[Gradients, Tensor]:
    """Return gradients to add, and ‖g‖² of each: of outer products Σ_{t,s} (δ_t·δ_s)(a_t·a_s).

    Where products cancel, rounding may make the norm too small, or leave more than C of a gradient
    that is 0: such rows get other products, with which ‖g‖ = ‖δ‖.
    """
    if isinstance(leaf, Tensor):
        return leaf, _square_lengths(leaf)
    error, inputs = leaf
    is_table = not inputs.is_floating_point()
    if not is_table and inputs.numel():  # by a power of two, so that no square of a factor is lost
        exponent = torch.frexp(inputs.abs().amax(2, keepdim=True)).exponent
        leaf = error, inputs = torch.ldexp(error, exponent), torch.ldexp(inputs, -exponent)
    if error.shape[1] == 1:
        return leaf, _square_lengths(error) * (1 if is_table else _square_lengths(inputs))
    alike = inputs[:, :, None] == inputs[:, None, :] if is_table else inputs @ inputs.mT
    terms = (error @ error.mT) * alike
    squared = terms.sum((1, 2))
    lengths = terms.diagonal(dim1=1, dim2=2).sqrt().sum(1)
    lost = torch.nonzero(squared < lengths.square() / base.MOST_CANCELLED).flatten().tolist()
    if lost:
        error, inputs = error.clone(), inputs.clone()  # layers may share their inputs
        for row in lost:
            error[row], inputs[row] = _separate_products(error[row], inputs[row])
        squared[lost] = _square_lengths(error[lost])
    return (error, inputs), squared


def _separate_products(error: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return δ and a of one row with equal Σ_t δ_t a_tᵀ: a orthonormal, or one δ for each token."""
    if inputs.is_floating_point():
        basis, triangle = torch.linalg.qr(inputs.double().T)
        fill = (0, 0, 0, len(inputs) - len(triangle))
        return functional.pad(triangle @ error.double(), fill), functional.pad(basis.T, fill)
    alike = inputs[:, None] == inputs
    is_first = ~alike.tril(-1).any(1, keepdim=True)
    return (alike & is_first).double() @ error.double(), inputs


def _keep_rows(leaf: Gradients, is_kept: Tensor) -> Gradients:
    def keep(rows: Tensor) -> Tensor:
        return torch.where(is_kept.reshape(-1, *[1] * (rows.ndim - 1)), rows, 0)

    return keep(leaf) if isinstance(leaf, Tensor) else (keep(leaf[0]), keep(leaf[1]))


def _add_rows(leaf: Gradients, factor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return Σ_m factor_m · g_m."""
    if isinstance(leaf, Tensor):
        return (factor @ leaf.reshape(len(leaf), -1)).reshape(shape)
    errors, inputs = (leaf[0] * factor[:, None, None]).flatten(0, 1), leaf[1].flatten(0, 1)
    if inputs.is_floating_point():
        return (errors.T @ inputs).reshape(shape)
    table: Tensor = errors.new_zeros(*shape)
    table.index_add_(0, inputs, errors)
    return table
