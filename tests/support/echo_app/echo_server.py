"""Rounds of echo; what happened is written to the file named in the run's configuration."""

import json
import os
import time
from pathlib import Path

from sottovoce.flower.server_app import build_app


def call(roll, wanted):
    """Greet until so many clients have a seat; the test's own limit ends it."""
    roll.greet(900)
    while len(roll.seats) < wanted:
        time.sleep(0.25)
        roll.greet(900)


def conduct(roll, config):
    out, began = Path(config["out"]), time.time()
    told = {"began": began, "rounds": []}

    def write():
        told["seats"] = sorted(roll.seats)
        part = out.with_suffix(".part")
        part.write_text(json.dumps(told))
        part.replace(out)

    call(roll, config["clients"])
    told["called"] = time.time()
    write()
    body = os.urandom(config["bytes"])
    for t in range(config["rounds"]):
        start = time.time()
        call(roll, 1)
        names = sorted(roll.seats)
        request = b"boom" if config["boom"] == t else f"{t} ".encode() + body
        said = roll.ask(dict.fromkeys(names, request), seconds=config["seconds"])
        told["rounds"].append(
            {
                "start": start,
                "end": time.time(),
                "asked": names,
                "right": sorted(c for c, a in said.items() if a == c.encode() + b" " + request),
                "failed": sorted(set(names) - set(said)),
            }
        )
        write()
        right = [config["comeback"] in r["right"] for r in told["rounds"]]
        if right[-1] and not all(right):
            break


def identify(hello):
    return hello.decode("ascii")


app = build_app(conduct, identify)
