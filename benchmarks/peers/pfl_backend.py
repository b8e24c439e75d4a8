"""pfl 0.6, federated averaging on its simulator: `pfl_backend.py WORK.npz update|samples`.

Natively pfl clips a client's whole update, which is another, cheaper promise (`update`). `samples`
adds a per-sample step to its local training, by torch.func in chunks; the update then needs no cut.
Noise is drawn once, centrally, which is the cheapest way pfl has.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
import torch_func
import torch_models
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
from protocol import Outcome, Play, serve
from work import Shape, Work


class Net(torch.nn.Module):
    """A model with the two methods that pfl asks for."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, self.inner = shape, torch_models.module(shape)
        self.criterion = torch_models.criterion(shape)

    def forward(self, x: Any) -> Any:
        return self.inner(x)

    def loss(self, x: Any, y: Any) -> Any:
        return self.criterion(self(x), y)

    def metrics(self, x: Any, y: Any) -> dict[str, Any]:
        loss, accuracy = torch_models.evaluate(self.shape, self, x, y)
        return {
            "loss": Weighted(loss * len(y), len(y)),
            "accuracy": Weighted(accuracy * len(y), len(y)),
        }


class PerSample(FederatedAveraging):  # type: ignore[misc]
    """Federated averaging whose local step clips every sample's gradient."""

    def __init__(self, mean: Any) -> None:
        super().__init__()
        self.mean = mean

    def train_one_user(self, initial: Any, model: Any, user_dataset: Any, context: Any) -> Any:
        def step(module: Any, optimizer: Any, batch: Any, *_: Any) -> None:
            params = {name: value.detach() for name, value in module.named_parameters()}
            found = self.mean(params, *batch)
            for name, value in module.named_parameters():
                value.grad = found[name]
            optimizer.step()
            optimizer.zero_grad()

        model.do_multiple_epochs_of(user_dataset, context.model_train_params, step)
        return model.get_model_difference(initial), Metrics()


class OneRound(TrainingProcessCallback):  # type: ignore[misc]
    """Stops after every central iteration: the harness asks for one at a time."""

    def after_central_iteration(self, *_: Any, **__: Any) -> Any:
        return True, Metrics()


def build(work: Work) -> Play:
    native, shape = sys.argv[2] == "update", work.shape
    x, y, test_x, test_y = torch_models.rows(work)
    net = Net(shape)
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))

    def client(name: Any) -> Dataset:
        own = slice(int(name) * shape.samples, (int(name) + 1) * shape.samples)
        return Dataset([x[own], y[own]], user_id=str(name))

    names = list(range(shape.clients))
    data = FederatedDataset(client, get_user_sampler("minimize_reuse", names))
    # an update is η times a mean of clipped gradients; what rounding adds must not be cut again
    bound = work.rate * work.clip * (1 if native else 1.001)
    sizes = NNAlgorithmParams(
        central_num_iterations=10**9,
        evaluation_frequency=10**9,
        train_cohort_size=shape.clients,
        val_cohort_size=0,
    )
    training = NNTrainHyperParams(
        local_num_epochs=1, local_learning_rate=work.rate, local_batch_size=None
    )
    mean = torch_func.clipped_mean(shape, net, work.clip)
    algorithm = FederatedAveraging() if native else PerSample(mean)
    tested, parameters = Dataset([test_x, test_y]), list(net.parameters())

    def play(std: float) -> Outcome:
        torch_models.fill(shape, parameters, work.params)
        mechanism = GaussianMechanism(bound, std * shape.clients / bound)
        backend = SimulatedBackend(data, data, [CentrallyAppliedPrivacyMechanism(mechanism)])
        algorithm.run(
            sizes, backend, model, training, callbacks=[OneRound()], send_metrics_to_platform=False
        )
        found = {str(name): value for name, value in model.evaluate(tested)}
        scores = [float(np.asarray(found[key].overall_value)) for key in ("loss", "accuracy")]
        return Outcome(torch_models.read(shape, parameters), scores[0], scores[1])

    return play


if __name__ == "__main__":
    serve(build, "pfl", "torch")
