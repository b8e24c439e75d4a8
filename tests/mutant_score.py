"""`make mutants`: every mutant against every killer, one line each, the score and the survivors."""

from __future__ import annotations

import sys
import time
from collections import Counter

from privacy_mutants import MUTANTS, trial


def main() -> int:
    """0 if none survives."""
    began, found = time.monotonic(), Counter()
    for mutant in MUTANTS:
        became, said = trial(mutant, [mutant.killer])
        by = mutant.killer
        if became != "killed":  # perhaps another killer notices
            became, said = trial(mutant, [])
            by = said.splitlines()[-1].partition(":")[0] if said else ""
        found[became] += 1
        print(f"{mutant.name:<44} {mutant.module:<22} {became:<9} {by}", flush=True)
    minutes = (time.monotonic() - began) / 60
    print(f"{found['killed']} of {len(MUTANTS)} privacy mutants killed in {minutes:.1f} minutes; "
          f"{found['survived']} survived, {found['idle']} proved nothing")  # fmt: skip
    return 0 if found["killed"] == len(MUTANTS) else 1


if __name__ == "__main__":
    sys.exit(main())
