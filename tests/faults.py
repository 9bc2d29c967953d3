"""Planted faults: one-line changes of the code, each of which some tests must find.

``python -m tests.faults`` plants each in a copy of the last commit and runs its tests.  It prints
the faults that were not found and exits with 1 if there are any.  ``--only 3,7`` plants those, and
``--jobs`` several at once.  Run it after making tests faster.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
ORACLES = "tests/policies/test_against_oracles.py -k"
LIVE = "tests/live/test_live_policies.py"
PIECES = "tests/live/test_pieces.py"
KERNELS = "tests/live/test_kernels_pieces.py -k triton_kernels"


class Fault(NamedTuple):
    """Text that is replaced, once, and tests of which one must fail."""

    file: str
    old: str
    new: str
    tests: str


FAULTS = [
    # Prices, clock and server.
    Fault("arborsim/machine/price.py",
          "pieces[op[1]].iterations > 1", "pieces[op[1]].iterations > 2",
          "tests/serving"),
    Fault("arborsim/machine/terms.py", "np.where(q.decided > 0,", "np.where(q.decided >= 0,",
          "tests/simulator"),
    Fault("arborsim/machine/clock.py", "max(self._clock.now, self.free_s) + seconds",
          "self._clock.now + seconds", "tests/simulator"),
    Fault("arborsim/machine/batch.py", "self.kv_tokens += k * self.kv_tokens_g",
          "self.kv_tokens += self.kv_tokens_g", "tests/serving"),
    Fault("arborsim/machine/server.py",
          "- sums.hbm) // sums.hbm_g + 1", "- sums.hbm) // sums.hbm_g + 2",
          "tests/serving"),
    Fault("arborsim/machine/server.py",
          "state.chunk_tokens - (state.batch.sums.sequences if mixes else 0)", "state.chunk_tokens",
          "tests/serving"),
    Fault("arborsim/machine/scheduler.py", "need += self._first_growth(search) + int(",
          "need += int(", "tests/serving"),
    Fault("arborsim/products/validate/published_errors.py", "np.quantile(sizes, 0.9)",
          "np.quantile(sizes, 0.8)", "tests/validate/test_published.py"),
    # Memory, moves, meters, controller.
    Fault("arborsim/memory/ledger.py",
          "before[:, tier] += total - moved", "before[:, tier] += total",
          "tests/memory"),
    Fault("arborsim/memory/moves.py", "np.searchsorted(self.step, [first, last])",
          'np.searchsorted(self.step, [first, last], "right")', "tests/memory"),
    Fault("arborsim/play/meters.py", "gone_from[token] = step + 1", "gone_from[token] = step",
          "tests/simulator/test_with_controller.py tests/test_meters.py"),
    Fault("arborsim/play/controller.py", "block.entropy = True, reward, entropy",
          "block.entropy = True, reward, 0.0", f"{ORACLES} arborkv"),
    # Traces and files.
    Fault("arborsim/trace/episode.py", "alike = width == width_before",
          "alike = width <= width_before", "tests/trace/test_play.py"),
    Fault("arborsim/trace/validate.py", "(node > known + 1)", "(node > known + 2)",
          "tests/trace/test_validate.py"),
    Fault("arborsim/core/outputs.py", "part.replace(target)", "shutil.copyfile(part, target)",
          "tests/test_outputs.py tests/fuzz/test_kills.py"),
    # Policies.
    Fault("arborsim/policies/relief.py",
          "heapq.heappush(heap, (-result[block] / scale[block], block))",
          "heapq.heappush(heap, (-result[block], block))", f"{ORACLES} arborkv"),
    Fault("arborsim/policies/relief.py", 'np.argsort(weight, kind="stable")',
          'np.argsort(-weight, kind="stable")', f"{ORACLES} arborkv"),
    Fault("arborsim/policies/blocks.py",
          "return self.iterations - view.iterations % self.iterations",
          "return self.iterations - view.iterations % self.iterations + 1",
          f"{ORACLES} 'rkv-flat or rkv-as'"),
    Fault("arborsim/policies/methods/expected_attention.py", "keys @ covariance, keys) / 2",
          "keys @ covariance, keys)", f"{ORACLES} expected-attention"),
    Fault("arborsim/policies/methods/rkv.py", "cosine[inside, seeking[inside] - first] = 0.0",
          "cosine[inside, seeking[inside] - first] = -1.0", f"{ORACLES} 'rkv-flat or rkv-as'"),
    Fault("arborsim/policies/methods/thinkv_paper.py", "heads < np.float32(part) * largest",
          "heads <= np.float32(part) * largest.max()", "tests/policies/test_head_blocks.py"),
    Fault("arborsim/policies/methods/kivi.py", "whole = old[: len(old) - len(old) % self.group]",
          "whole = old[len(old) % self.group :]", f"{ORACLES} kivi"),
    # Searches.
    Fault("arborsim/searches/levels.py",
          "math.ceil(width / math.fsum", "math.floor(width / math.fsum",
          "tests/search/test_allocation.py tests/search/test_literal.py"),
    Fault("arborsim/searches/levels.py", "[size + (i < larger)", "[size + (i > parts - 1 - larger)",
          "tests/search/test_allocation.py tests/search/test_literal.py"),
    # Live runs.
    Fault("backends/arborsim_torch/cache/pieces.py", "again = np.isin(gone.group * width + left,",
          "again = np.isin(gone.group * width + left - 1,", PIECES),
    Fault("backends/arborsim_torch/cache/pieces.py", "np.where(ragged, self.pool.first_row, 0)",
          "np.where(ragged, 0, 0)", PIECES),
    Fault("backends/arborsim_torch/cache/pieces.py", "few |= self.place.on_host or self._ragged",
          "few |= self.place.on_host", PIECES),
    Fault("backends/arborsim_torch/cache/state.py", "np.arange(self._next - ids.size, self._next)",
          "np.arange(self._next - ids.size + 1, self._next + 1)", "tests/live/test_fast_path.py"),
    Fault("backends/arborsim_torch/cache/state.py", "narrow(3, 0, position + 1).unbind()",
          "narrow(3, 0, position or 1).unbind()", "tests/live/test_fast_path.py"),
    Fault("backends/arborsim_torch/cache/mover.py", "cache.place.values[0, token] = Place.LOST",
          "cache.place.values[0, token[1:]] = Place.LOST", LIVE),
    Fault("backends/arborsim_torch/cache/host_rows.py", "lengths >= min(self._least, count)",
          "lengths > min(self._least, count)", "tests/live/test_tiered_cache.py " + LIVE),
    Fault("backends/arborsim_torch/cache/host_stream.py", "if anew or self._moved or",
          "if self._moved or", LIVE + " -k recall"),
    Fault("backends/arborsim_torch/cache/ondemand.py",
          "(self.chosen[:, :, None] == self.pages).any(1)",
          "(self.chosen[:1, :, None] == self.pages).any(1)", LIVE),
    Fault("backends/arborsim_torch/kernels/pieces_torch.py",
          "bias = bias.repeat_interleave(group, 1)",
          "bias = bias.repeat(1, group, 1)", "tests/live/test_kernels_pieces.py -k definition"),
    Fault("backends/arborsim_torch/kernels/pieces_kernels.py", "member + head * member_head + slot",
          "member + slot", KERNELS),
    Fault("backends/arborsim_torch/kernels/pieces_kernels.py",
          "v_scale + head * v_scale_head + slot",
          "v_scale + slot", KERNELS),
    Fault("backends/arborsim_torch/kernels/pieces_kernels.py",
          "seq[:, None] * mask_seq + head * mask_head", "seq[:, None] * mask_seq", KERNELS),
    Fault("backends/arborsim_torch/kernels/pieces_kernels.py", "out = out * shrink[:, None]",
          "out = out * 1.0", KERNELS),
    Fault("backends/arborsim_torch/tiers/codec.py",
          "scale = amax / torch.full_like(amax, self.largest)",
          "scale = amax.half() / torch.full_like(amax, self.largest)",
          "tests/live/test_tiers_codec.py"),
]  # fmt: skip


def plant(fault: Fault, copy: Path) -> str:
    """Run the fault's tests in a copy of the repository: found, not found, or an error."""
    path = copy / fault.file
    whole = path.read_text()
    if whole.count(fault.old) != 1:
        return f"the text is there {whole.count(fault.old)} times"
    path.write_text(whole.replace(fault.old, fault.new))
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
             *shlex.split(fault.tests)],
            cwd=copy, capture_output=True, text=True, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{copy}:{copy}/backends"},
        )  # fmt: skip
    finally:
        path.write_text(whole)
    if ran.returncode == 1:
        return "found"
    return "NOT FOUND" if ran.returncode == 0 else f"no tests ran: {ran.stdout[-500:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="numbers of faults, by comma")
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    chosen = range(len(FAULTS)) if given.only is None else map(int, given.only.split(","))
    missed = []
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(given.jobs) as pool:
        copies: Queue[Path] = Queue()
        for number in range(given.jobs):
            copy = Path(scratch, str(number))
            subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, copy], check=True)
            copies.put(copy)

        def run(number: int) -> None:
            copy, began = copies.get(), time.monotonic()
            said = plant(FAULTS[number], copy)
            copies.put(copy)
            took = time.monotonic() - began
            print(f"{number:3} {took:5.0f} s  {FAULTS[number].file}: {said}", flush=True)
            if said != "found":
                missed.append(number)

        list(pool.map(run, chosen))
    print(f"{len(missed)} were not found: {sorted(missed)}" if missed else "all were found")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
