"""Draw cases of every relation until the time is over: ``python -m tests.metamorphic.run``.

Each case depends on its relation and number alone, so ``--only NAME --first 4711 --cases 1`` runs
one of them again.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
import zlib
from itertools import count
from pathlib import Path

import numpy as np

from tests.metamorphic.relations import RELATIONS


def hold(name: str, number: int) -> None:
    """One case of a relation.  Raises `AssertionError` if it does not hold."""
    rng = np.random.default_rng([zlib.crc32(name.encode()), number])
    with tempfile.TemporaryDirectory() as folder:
        RELATIONS[name](rng, Path(folder))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--cases", type=int, help="so many of each relation, however long it takes")
    parser.add_argument("--only", choices=RELATIONS, action="append")
    options = parser.parse_args()
    chosen, until = options.only or list(RELATIONS), time.monotonic() + 60 * options.minutes
    broken = done = 0
    for number in count(options.first):
        if options.cases is None and time.monotonic() > until:
            break
        if options.cases is not None and number >= options.first + options.cases:
            break
        for name in chosen:
            try:
                hold(name, number)
            except Exception:
                broken += 1
                print(f"{name} {number}:\n{traceback.format_exc()}", flush=True)
            done += 1
    print(f"{done:,} cases of {len(chosen)} relations: {broken} broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
