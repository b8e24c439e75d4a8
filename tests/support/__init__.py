"""Parts that several tests share: nodes, federations, processes, examples and their oracles."""

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
