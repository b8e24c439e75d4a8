"""Who is measured: one entry a peer, with what it does that others do not.

A script of `benchmarks/peers/` in an environment of `benchmarks/environments.py`; `None` is the
environment of the harness itself (`.venv`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: glibc gives large blocks back to the system at every free, and their pages are cleared anew.
KEPT_PAGES = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "268435456",
}


@dataclass(frozen=True)
class Peer:
    """A row of the table; `clips` says what is cut: every sample's gradient or a whole update."""

    key: str
    label: str
    script: str
    environment: str | None = None
    words: tuple[str, ...] = ()
    clips: str = "samples"
    variables: dict[str, str] = field(default_factory=dict)


#: The slow ones last: a run that is ended early has the others.
ROSTER = (
    Peer("ours", "sottovoce", "ours"),
    Peer("custom-jax", "sottovoce.custom, the same in JAX", "custom_models", None, ("jax",)),
    Peer("custom-torch", "sottovoce, a PyTorch module", "custom_models", None, ("torch",)),
    Peer("numpy", "numpy + BLAS, our design by hand", "numpy_blas"),
    Peer("opacus-ghost", "Opacus, ghost clipping", "opacus_modes", "opacus", ("ghost",)),
    Peer(
        "pfl-update",
        "pfl as it comes (clips whole updates)",
        "pfl_backend",
        "pfl",
        ("update",),
        clips="update",
    ),
    Peer("flower", "Flower simulation with our step in numpy", "flower_simulation", "flower"),
    Peer("jax-privacy", "jax-privacy", "jax_privacy_microbatches", "jax_privacy"),
    Peer("fedjax", "FedJAX with a per-sample step", "fedjax_clients", "fedjax"),
    Peer("torch-func", "torch.func", "torch_func", "opacus"),
    Peer("pfl", "pfl with a per-sample step", "pfl_backend", "pfl", ("samples",)),
    Peer(
        "opacus-hooks-kept",
        "Opacus, hooks, malloc told to keep its pages",
        "opacus_modes",
        "opacus",
        ("hooks",),
        variables=KEPT_PAGES,
    ),
    Peer("opacus-hooks", "Opacus, hooks", "opacus_modes", "opacus", ("hooks",)),
)
FLOOR = Peer("floor", "the machine", "floor")
#: (work, threads, peer) → why it is not asked, which the table says; all of it takes half an hour.
LEFT_OUT = {
    ("mlp", 2, "opacus-hooks"): "the slowest of all; the table for one thread has it",
    ("mlp", 2, "pfl"): "the step of torch.func in pfl's loop; the table for one thread has it",
}
