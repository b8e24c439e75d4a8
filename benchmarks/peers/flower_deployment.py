"""Flower 1.41, deployed: an empty app on three nodes that get a model and send it back.

Nothing is computed, clipped or drawn, so there is nothing to check: it is the floor under whatever
a deployment computes. Flower as it comes, over TLS on loopback, from `benchmarks/flower_floor.py`,
with as many numbers as the work's model has. One JSON object for all rounds.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import flower_floor
from protocol import given, versions

NODES, ROUNDS = 3, 4

if __name__ == "__main__":
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    size = sum(math.prod(shape) for shape in given().shape.parameters().values())
    ready, found = flower_floor.measure("Flower as it comes", [size], nodes=NODES, rounds=ROUNDS)
    told = {"ready_s": ready, "wall_s": found[size], "versions": versions("flwr"), "nodes": NODES}
    answer.write(json.dumps(told) + "\n")
