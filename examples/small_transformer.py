"""A small frozen transformer on rows of tokens: train a head and a low-rank correction, privately.

    pip install '.[torch]'                 # in a clone of the repository
    python examples/small_transformer.py

The body stands for public weights: it is random here, so that nothing is downloaded. Only the head
and B of the correction x + B(A(x)) have `requires_grad`: 132 of 3,252 numbers are uploaded.
"""

import numpy as np
import torch
from torch import nn

from sottovoce import Plan, simulate

WORDS, LENGTH, WIDTH = 40, 12, 16


class SmallTransformer(nn.Module):
    """Embeddings, one frozen block with a low-rank correction, the mean over the words, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True)
        self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
        self.requires_grad_(False)
        nn.init.zeros_(self.b.weight)  # the correction starts at nothing
        self.b.requires_grad_(True)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return four scores for every row of word numbers, which come as floats."""
        words = self.words(x.long()) + self.places(torch.arange(LENGTH, device=x.device))
        words = self.block(words)
        return self.head((words + self.b(self.a(words))).mean(dim=1))


def write_messages(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of words; each of four subjects has ten words that it uses more often."""
    rng = np.random.default_rng(seed)
    subject = rng.integers(0, 4, count)
    own_words = 10 * subject[:, None] + rng.integers(0, 10, (count, LENGTH))
    is_own = rng.random((count, LENGTH)) < 0.4
    words = np.where(is_own, own_words, rng.integers(0, WORDS, (count, LENGTH)))
    return words.astype(np.float32), subject


plan = Plan(
    data={"name": "arrays", "clients": 4},
    local={"learning_rate": 4.0, "clip": 1.0},
    privacy={"epsilon": 4.0, "delta": 1e-5},
    rounds={"schedule": "fixed", "rounds": 20},
)
torch.manual_seed(0)
run = simulate(plan, data=write_messages(3_000, seed=1), model=SmallTransformer(), seed=1)
uploaded = sum(leaf.size for leaf in run.params.values())
print(f"{uploaded} numbers are uploaded: {', '.join(sorted(run.params))}")
print(f"accuracy {run.accuracy:.2f} of four subjects")
print(run.guarantee)
