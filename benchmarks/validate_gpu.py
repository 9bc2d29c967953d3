r"""Everything that needs a GPU, in one run of 9 minutes: is it right, how fast, what fits.

    python benchmarks/validate_gpu.py              # needs PyTorch, transformers and arborsim
    gpu-bundle/run.sh                              # the same from a bundle (`make gpu-bundle`)
    python benchmarks/validate_gpu.py --dry-run --gpu h200   # the plan by minutes; needs no GPU

In two calls, each on a machine of its own:

    ... --out ONE --parts yardsticks smoke correctness --budget-seconds 150
    ... --out TWO --parts calibration search trace --budget-seconds 420 \
        --resume ONE/GPU/results.jsonl

Llama-3.1-8B's geometry with random weights under policies, compared with transformers' cache, with
the simulation and with what the device's memory allows; checks of correctness; a calibration; a
trace of one step of each policy.  A line of ``OUT/DEVICE/results.jsonl`` per result, as soon as it
is known; next to it are the page (``README.md``), the calibrated profile and the traces.  A search
that hangs, dies or runs out of memory is a result, too, and the next one runs.  With ``--resume``
it does what is missing there, or in an earlier results file of the same GPU, model and software.
``--tiny`` runs the same at toy size, on the CPU in seconds: that checks this program and nothing
else.  Exit code 1: something is not right; 2: it could not run.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
import traceback
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.gpu.plan import Plan
    from benchmarks.gpu.watchdog import Lines

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "backends")]

from benchmarks.gpu import needs

BUDGET_S = 570.0
_THERE = Path()  # --resume without a file
_TINY_MODEL = ROOT / "benchmarks" / "gpu" / "tiny.json"
_END_S = 3.0  # to write the page
_PAGE_EVERY_S = 10.0
#: What nothing that is right does.
LOST = ("failed", "hung", "died")
Facts = dict[str, Any]


def main() -> int:
    began = time.monotonic()
    options = _parser().parse_args()
    if options.tiny:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    if why := list(needs.refusals(torch=not options.dry_run)):
        print("\n".join(f"validate_gpu: {line}" for line in why), file=sys.stderr)
        return 2
    for line in needs.warnings(torch=not options.dry_run):
        print(f"validate_gpu: warning: {line}", file=sys.stderr)
    from arborsim.core.errors import ArborsimError

    try:
        if options.dry_run:
            return _dry_run(options)
        return _run(options, began)
    except (ArborsimError, ImportError) as error:  # libraries may be too old or too new
        print(f"validate_gpu: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("reports/validation"),
                        help="results go to a folder in it, named after the device")  # fmt: skip
    parser.add_argument("--budget-seconds", type=float, default=BUDGET_S)
    parser.add_argument("--dry-run", action="store_true", help="print the plan, do nothing")
    parser.add_argument("--gpu", default="", help="with --dry-run: the GPU whose rates it is for")
    parser.add_argument("--resume", nargs="?", type=Path, const=_THERE, metavar="FILE",
                        help="do what is missing in --out, or in this results.jsonl")  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace the results")
    parser.add_argument("--tiny", action="store_true", help="everything small, on the CPU")
    parser.add_argument("--device", default="", help="cuda, cuda:1 or cpu")
    parser.add_argument("--parts", nargs="+", help="yardsticks, smoke, correctness, calibration, "
                        "search, trace, context")  # fmt: skip
    parser.add_argument("--sizes", nargs="+", type=int, help="prompt tokens of the searches")
    parser.add_argument("--new-tokens", type=int, default=0, help="generated tokens per path")
    parser.add_argument("--repeats", type=int, default=0)
    parser.add_argument("--model", default="", help="config:NAME (random weights)")
    return parser


def _plan(options: argparse.Namespace, device: str, folder: Path, gpu: str) -> Plan:
    from arborsim.core.errors import UnknownName
    from benchmarks.gpu.plan import PARTS, REPEATS, SIZES, SURE_REPEATS, TINY_SIZES, Plan

    tiny = options.tiny
    for part in options.parts or ():
        if part not in PARTS:
            raise UnknownName("part", part, PARTS)
    known = f"config:{_TINY_MODEL}" if tiny else "config:llama-3.1-8b"
    return Plan(
        model=options.model or known,
        device=device,
        tiny=tiny,
        sizes=tuple(options.sizes or (TINY_SIZES if tiny else SIZES)),
        new_tokens=options.new_tokens or (16 if tiny else 64),
        prefill_block=64 if tiny else 1024,
        repeats=options.repeats or (SURE_REPEATS if tiny else REPEATS),
        context_step=64 if tiny else 1024,
        longest=256 if tiny else 1 << 24,
        parts=("start", *(options.parts or PARTS)),
        folder=folder,
        command=" ".join(["python benchmarks/validate_gpu.py", *sys.argv[1:]]),
        gpu=gpu,
    )  # fmt: skip


def _dry_run(options: argparse.Namespace) -> int:
    from arborsim.machine.lookup import load_profile
    from benchmarks.gpu.plan import expected_s, timetable

    gpu = load_profile(options.gpu or "h100").name
    plan = _plan(options, "cuda", options.out, gpu)
    print("\n".join(timetable(plan, options.budget_seconds)))
    return int(expected_s(plan) > options.budget_seconds)


def _run(options: argparse.Namespace, began: float) -> int:
    import torch

    from arborsim.core.errors import UsageError
    from arborsim_torch.models import check_device, device_name
    from benchmarks.gpu.estimate import shipped_profile
    from benchmarks.gpu.plan import RESULTS
    from benchmarks.gpu.resume import keep_profile
    from benchmarks.gpu.watchdog import FINAL, Lines, Watchdog

    if options.resume and options.overwrite:
        raise UsageError("--resume keeps the results and --overwrite replaces them: give one")
    device = check_device(options.device or ("cpu" if options.tiny else "cuda"))
    name = device_name(torch.device(device))
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    folder = (options.out / slug).resolve()
    lines = Lines(folder / RESULTS)
    plan = _plan(options, device, folder, shipped_profile(name))
    there = _earlier(options, lines, plan)
    keep_profile(there, folder)
    written = time.monotonic()

    def keep(record: Facts) -> None:
        nonlocal written
        lines.write(record)
        _tell(record)
        if time.monotonic() - written > _PAGE_EVERY_S:  # what is killed leaves one, too
            written = time.monotonic()
            _write_page(lines, plan.command)

    again = [r for r in there if r["part"] == "start" or r["outcome"] in FINAL]
    end = began + options.budget_seconds - _END_S
    watchdog = Watchdog(partial(_work, plan), end, keep, again)
    signal.signal(signal.SIGTERM, _stop)
    try:
        watchdog.run()
    except KeyboardInterrupt:
        print("interrupted: --resume goes on", file=sys.stderr)
    return _show(lines, plan.command)


def _work(plan: Plan, connection: Connection, records: list[Facts], end: float) -> None:
    """In the process that does the work: it alone imports all that is worked with."""
    from benchmarks.gpu.worker import work

    work(plan, connection, records, end)


def _earlier(options: argparse.Namespace, lines: Lines, plan: Plan) -> list[Facts]:
    """Records of earlier calls, which are in the results file then."""
    from arborsim.core.errors import UsageError
    from benchmarks.gpu.resume import identity, take_over

    if options.overwrite:
        for path in (lines.path, plan.profile, plan.traces):
            path.unlink(missing_ok=True)
    there = lines.read()
    given: Path | None = options.resume
    other = given is not None and given != _THERE and given.resolve() != lines.path
    if there and (given is None or other):
        raise UsageError(f"{lines.path} exists: --resume goes on, --overwrite replaces it")
    if given is not None and other:
        take_over(given, lines, identity(plan))
    return lines.read()


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _show(lines: Lines, command: str) -> int:
    """Write the page, print the verdicts, and return the exit code."""
    from benchmarks.gpu.targets import Results, verdicts

    results = Results(lines.read())
    for verdict in verdicts(results):
        print(verdict.line)
    print(f"wrote {lines.path} and {_write_page(lines, command)}")
    if not results.of("start"):
        said = [r["error"] for r in lines.read() if "error" in r]
        print(f"validate_gpu: {said[-1] if said else 'the work could not begin'}", file=sys.stderr)
        return 2
    wrong = [r for r in results.of("correctness") if r["outcome"] == "done" and not r["ok"]]
    return int(bool(wrong) or any(r["outcome"] in LOST for r in results.records))


def _write_page(lines: Lines, command: str) -> Path:
    from arborsim.core.outputs import write_text
    from benchmarks.gpu.page import page
    from benchmarks.gpu.plan import PAGE

    path = lines.path.with_name(PAGE)
    try:
        write_text(path, page(lines.read(), command))
    except Exception:  # the results are there; what is wrong with the page must not end the run
        traceback.print_exc()
    return path


def _tell(record: Facts) -> None:
    """One line per result while it goes on."""
    of = ", ".join(f"{value:,}" if isinstance(value, int) else str(value)
                   for value in record.get("of", {}).values())  # fmt: skip
    outcome = "NOT OK" if record.get("ok") is False else record["outcome"]
    seconds = f", {record['seconds']:.1f} s" if "seconds" in record else ""
    why = record.get("why") or record.get("error") or ""
    what = f"{record['part']}: {of}" if of else record["part"]
    print(f"{what}: {outcome}{seconds}" + f" ({why})" * bool(why), flush=True)


if __name__ == "__main__":
    sys.exit(main())
