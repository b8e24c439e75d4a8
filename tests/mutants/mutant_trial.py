"""Run `trains` and then killers on the package at hand: exit 10 if one of them noticed a bug.

MUTANT_MODULE names the module that is not as it was.

python -m mutants.mutant_trial [KILLER …]        `none` only trains; without a name: all of them
"""

from __future__ import annotations

import logging
import os
import sys
import traceback

from mutants.privacy_mutants import IDLE, KILLED, SURVIVED


def main(names: list[str]) -> int:
    """The exit code: killed, survived, or neither."""
    logging.disable()
    from mutants import privacy_killers

    if not privacy_killers.trains(os.environ["MUTANT_MODULE"]):
        print("the mutated package does not train")
        return IDLE
    known = {killer.__name__: killer for killer in privacy_killers.KILLERS}
    stopped = False
    for name in [] if names == ["none"] else names or known:
        try:
            known[name]()
        except AssertionError:
            print(f"{name}: {traceback.format_exc(limit=-1).splitlines()[2].strip()}")
            return KILLED
        except Exception as error:  # a crash is no kill; another killer may still make one
            print(f"{name} stopped: {error!r}")
            stopped = True
    return IDLE if stopped else SURVIVED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
