"""Where the time of `arborsim search` goes, by package.

``python benchmarks/search.py [--out reports/benchmarks/search.json]``

A bank of drawn thoughts is walked by four searches at two widths, and each walk is replayed under
two policies.  Every few milliseconds of the processor a signal asks which of arborsim's functions
is running, itself or in a library that it called: that costs next to nothing, where a profiler
that notes every call would make short functions seem long.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from types import FrameType

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

import arborsim
from arborsim.cli.app import main as command
from arborsim.core.installed import versions

ALGORITHMS, WIDTHS, POLICIES = "beam-4,rebase,ets,dpts", "8,32", "full,streaming-llm"
EVERY_S = 1e-3
FUNCTIONS = 8  # that are named
ROOT = Path(arborsim.__file__).parent


def asked(bank: Path, problems: int) -> arborsim.SearchResults:
    return arborsim.search(
        bank, algorithms=ALGORITHMS, widths=WIDTHS, policies=POLICIES, budgets="0.5",
        model="llama-3.1-8b", episodes=problems,
    )  # fmt: skip


def sampled(bank: Path, problems: int) -> dict[str, object]:
    """Seconds of the processor, and the shares of packages and functions in them."""
    packages, functions = Counter[str](), Counter[str]()

    def note(number: int, frame: FrameType | None) -> None:
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith(str(ROOT)):
                place = Path(code.co_filename).relative_to(ROOT)
                packages[place.parts[0]] += 1
                functions[f"{place.as_posix()}: {code.co_qualname}"] += 1
                return
            frame = frame.f_back

    before = signal.signal(signal.SIGPROF, note)
    began_s = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)
    try:
        found = asked(bank, problems)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    seconds, total = time.process_time() - began_s, packages.total()
    return {
        "problems": problems, "replays": len(found.raw), "seconds": round(seconds, 2),
        "samples": total,
        "packages": {name: round(n / total, 4) for name, n in packages.most_common()},
        "functions": {name: round(n / total, 4) for name, n in functions.most_common(FUNCTIONS)},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problems", type=int, default=40)
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bank = Path(folder) / "bank.parquet"
        drawn = ["--bank", "--searches", str(options.problems), "--out", str(bank)]
        if code := command(["generate", *drawn]):
            raise SystemExit(code)
        asked(bank, 1)  # imports and caches are warm from here on
        figures = sampled(bank, options.problems)
    figures |= {
        "python": platform.python_version(), "versions": versions("numpy", "simpy"),
        "algorithms": ALGORITHMS, "widths": WIDTHS, "policies": POLICIES,
    }  # fmt: skip
    text = json.dumps(figures, indent=2)
    print(text)
    if options.out:
        options.out.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
