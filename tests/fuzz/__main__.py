"""A fuzz campaign: ``python -m tests.fuzz --kind model --count 1000 --seed 0`` prints every fault in its smallest form."""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import sys
import warnings
from pathlib import Path

from tests.fuzz import corpus
from tests.fuzz.child import Outcome, attempt
from tests.fuzz.corpus import Finding
from tests.fuzz.kinds import KINDS, LIMITS, prepare
from tests.fuzz.model_mutants import mutate
from tests.fuzz.seeds import seeds


def smallest(kind: str, number: int, found: Outcome) -> tuple[int, ...] | None:
    """The fewest of a mutant's changes that end in the same way; None where the kind has no separate changes."""
    if kind != "model":
        return None
    for size in range(4):
        for keep in itertools.combinations(range(3), size):
            if attempt(KINDS[kind](number, keep)[1]).ending == found.ending:
                return keep
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--kind", choices=[*KINDS, "all"], action="append", help="may be given several times; else all")
    parser.add_argument("--count", type=int, default=1000, help="attempts of each kind")
    parser.add_argument("--seed", type=int, default=0, help="number of the first attempt")
    parser.add_argument(
        "--keep", type=Path, default=Path("build/fuzz"), help="folder for models that end in a fault, in the form of the corpus"
    )
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    prepare()
    faults = 0
    for kind in KINDS if "all" in (given.kind or ["all"]) else given.kind:
        endings: collections.Counter[str] = collections.Counter()
        with contextlib.suppress(KeyboardInterrupt):  # what was found until then is told
            for number in range(given.seed, given.seed + given.count):
                name, work = KINDS[kind](number)
                found = attempt(work, **LIMITS.get(kind, {}))
                endings[found.ending] += 1
                if found.good:
                    continue
                faults += 1
                keep = smallest(kind, number, found)
                print(f"{kind} {number} ({name}): {found.ending} {found.detail} changes {keep}", flush=True)
                if kind == "model":
                    name, _, how = name.rpartition(", ")
                    seed = next(s for s in seeds() if s.name == name)
                    finding = Finding(f"{found.ending}: {found.detail}", how, mutate(seed.model, number, keep), seed)
                    print(f"  {corpus.write(given.keep, f'{number}-{how}', finding)}", flush=True)
        print(f"{kind}: " + ", ".join(f"{count} {ending}" for ending, count in sorted(endings.items())), flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
