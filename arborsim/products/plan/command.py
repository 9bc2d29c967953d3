"""`arborsim plan`: which machines, policies and budgets serve a workload, and what that costs."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from arborsim.core.errors import UsageError
from arborsim.core.outputs import check_writable
from arborsim.products.declare import Count, Option, Written, declared, listed
from arborsim.products.options import OutputOptions
from arborsim.products.plan.ask import Planning, PlanOptions, gpu_names
from arborsim.products.plan.quick import QuestionOptions

if TYPE_CHECKING:
    from arborsim.products.plan.files import PlanLog
    from arborsim.products.plan.plan import Planner
    from arborsim.products.plan.results import CandidateResult


@dataclass(frozen=True, kw_only=True)
class PlanOutput(OutputOptions, panel="Output"):
    """Files to write, and what to print.

    Parameters
    ----------
    report
        Write one HTML page for a meeting: its loads and changed assumptions can take several times
        as long as the plan itself.
    perfetto
        Write one GPU's timeline for Perfetto.
    assumptions
        --report: show what changes with the machine's numbers, which takes most of its time.
    explain
        Also print every cost term of a candidate.
    candidate
        --explain, --perfetto: number in the table.
    """

    perfetto: Written | None = None
    assumptions: bool = True
    explain: bool = False
    candidate: Annotated[Count | None, Option(shown="recommended")] = None

    def check_candidate(self, known: int) -> None:
        """Refuse a number that none of the `known` candidates has."""
        if self.candidate is not None and self.candidate >= known:
            raise UsageError(f"--candidate {self.candidate}: there are {known}, counted from 0")

    def check(self) -> None:
        if self.explain and self.json:
            raise UsageError("--explain prints tables: leave --json out")
        super().check()


#: A plan that seems to take longer says so after its first candidates.
_LONG_S = 30.0


def plan(
    options: PlanOptions,
    output: PlanOutput,
    *,
    example: bool = False,
    write: Annotated[Written | None, Option(panel="Instead of a workload file")] = None,
    resume: Annotated[bool, Option(panel="Run")] = False,
) -> None:
    """Plan, or print an example or write the question. The results are shown at the end.

    Parameters
    ----------
    example
        Print a workload with every key explained; with --report, --out or --json plan it.
    write
        Write the question as a workload file and end (-: print it).
    resume
        Go on where Ctrl-C ended a plan.
    """
    workload = options.workload
    if example:
        from arborsim.products.plan.workload_file import example_workload

        if not (output.report or output.out or output.json):
            print(example_workload(), end="")
            return
        options = _example(options, write)
    elif workload is not None:
        _refuse(options, write, workload)
    elif _written(options, write):
        return
    output.check()
    planning = Planning(replace(options, progress=True))
    output.check_candidate(len(planning.planner.candidates))
    # Finished candidates are kept next to the results until all are.
    base = output.out or Path("plan" if workload is None else Path(str(workload)).name)
    log = base.with_name(f"{base.name}.partial.jsonl")
    _run(planning, log, resume=resume, output=output)
    _show(planning, output, log)


def _refuse(options: PlanOptions, write: Path | None, workload: Any) -> None:
    """Refuse questions without a file next to a workload file, which answers them."""
    for each in declared(PlanOptions):
        if each.name in options.asked:
            raise UsageError(f"{each.flag} asks without a file: {workload} says it itself")
    if write is not None:
        raise UsageError(f"--write asks without a file: {workload} says it itself")


def _written(options: PlanOptions, write: Path | None) -> bool:
    """Refuse a question that cannot be planned; whether it was written to a file."""
    gpus = gpu_names(options.gpus)
    if not options.asked and not options.model and not gpus:
        raise UsageError(
            "name a workload in TOML; arborsim plan --example prints one. Or ask without one: "
            "--model llama-3.1-8b --gpu l40s,h100 --rate 20/min --p95 60s "
            "--tree depth=6,width=16,thought=80"
        )
    for flag, there in (("--model", options.model), ("--gpu", gpus)):
        if not there:
            raise UsageError(f"{flag} is missing: without a workload file, a plan needs it")
    tables = options.tables(gpus)
    if write is None:
        return False
    options.resized(options.asked_workload())
    _save(tables, write)
    return True


def _save(tables: dict[str, Any], path: Path) -> None:
    """Write the workload file; its paths start from its own folder."""
    from arborsim.core.outputs import write_text
    from arborsim.products.plan.quick import quick_toml

    if str(path) == "-":
        print(quick_toml(tables), end="")
        return
    check_writable(path, "--write")
    for entry in tables["mix"]:
        for key in {"trace", "log"} & entry.keys():
            entry[key] = os.path.relpath(entry[key], path.parent)
    write_text(path, quick_toml(tables))
    print(f"wrote {path}: arborsim plan {path}")


def _example(options: PlanOptions, write: Path | None) -> PlanOptions:
    """The options that plan the workload that `--example` prints."""
    from arborsim.products.plan.workload_file import example_workload, parse_workload

    if options.workload is not None:
        raise UsageError(f"--example is a workload of its own: leave {options.workload} out")
    _refuse(options, write, "--example")
    gpus, calibrations = gpu_names(options.gpus), listed(options.calibration)
    text, replaced = example_workload(), options.replaced
    found = parse_workload(text, Path(), "example", gpus, calibrations, replaced=replaced)
    workers = options.workers or len(os.sched_getaffinity(0))
    plain = {each.name: each.default for each in declared(QuestionOptions)}
    return replace(options, workload=found, gpus=(), calibration=(), workers=workers, **plain)


def _run(planning: Planning, path: Path, *, resume: bool, output: PlanOutput) -> None:
    """Evaluate what is missing; if it is interrupted, what is done has been written.

    Where results are written, candidates are on the disk as soon as they are finished.
    """
    from arborsim.products.plan.files import PlanLog

    planner, keep = planning.planner, output.out is not None
    log = PlanLog(path, planner.workload, planner.growth)
    if resume:
        planner.finished.update(log.resume())
    elif path.exists():
        raise UsageError(
            f"{path} holds an interrupted plan: go on with it by --resume, or delete it"
        )
    if keep:
        log.write(planner.finished.values())
    try:
        planning.run(_Foretold(planner, log if keep else None, output))
    except KeyboardInterrupt:
        if not planner.finished:
            path.unlink(missing_ok=True)
            raise KeyboardInterrupt(" before any candidate was finished") from None
        log.write(planner.finished.values())
        done = f"{len(planner.finished)} of {len(planner.candidates)} candidates"
        raise KeyboardInterrupt(f": {done} are in {path}; --resume goes on") from None
    finally:
        log.close()


class _Foretold:
    """Logs candidates as they are finished; after the first ones says how long the rest takes."""

    def __init__(self, planner: Planner, log: PlanLog | None, output: PlanOutput) -> None:
        self._planner, self._log, self._output = planner, log, output
        self._missing, self._began_s, self._done = len(planner.missing), time.monotonic(), 0

    def __call__(self, candidate: CandidateResult) -> None:
        from arborsim.products.plan.sensitivity import share_of_plan
        from arborsim.report.progress import duration

        if self._log is not None:
            self._log.add(candidate)
        self._done += 1
        if self._done != self._planner.jobs or self._done >= self._missing:
            return
        each_s = (time.monotonic() - self._began_s) / self._done
        left_s = each_s * (self._missing - self._done)
        pages = self._output.report is not None
        share = share_of_plan(self._planner.workload, self._output.assumptions)
        page_s = each_s * share if pages else 0.0
        if left_s + page_s > _LONG_S:
            page = f", and {duration(page_s)} for the page" if pages else ""
            print(
                f"arborsim: {self._done} of {self._missing} candidates took "
                f"{duration(each_s * self._done)}: about {duration(left_s)} for the others{page}",
                file=sys.stderr,
            )


def _show(planning: Planning, output: PlanOutput, log: Path) -> None:
    """Write and print what was asked for; fail if no candidate meets the target.

    The answer comes last, after the page, whose progress would otherwise follow it.  The log goes
    when what it holds has been written, or else printed.
    """
    results, number = planning.results(), output.candidate
    plan = results.raw
    chosen = plan.recommendation.candidate if number is None else number
    wrote = []
    if output.out is not None:
        results.save(output.out)
        log.unlink(missing_ok=True)
        wrote.append(output.out)
    if output.perfetto is not None and chosen is not None:
        _write_timeline(planning, plan.candidates[chosen], output.perfetto)
        wrote.append(output.perfetto)
    stopped = None
    if output.report is not None:
        try:
            results.report(output.report, progress=True, assumptions=output.assumptions)
        except KeyboardInterrupt:
            page = output.report
            stopped = f": {page} has the plan, but no loads, timeline or assumptions"
        wrote.append(output.report)
    if output.json:
        print(results.to_json())
    else:
        results.print(notes=output.notes)
        if output.explain and chosen is not None:
            from arborsim.products.explain import print_explained

            print_explained(plan.candidates[chosen])
    log.unlink(missing_ok=True)
    for path in wrote:
        print(f"wrote {path}", file=sys.stderr if output.json else None)
    if stopped is not None:
        raise KeyboardInterrupt(stopped)
    if plan.recommendation.candidate is None:
        raise UsageError(plan.recommendation.text)


def _write_timeline(planning: Planning, candidate: CandidateResult, path: Path) -> None:
    from arborsim.products.plan.timeline import timeline, write_perfetto

    if candidate.largest is None:
        raise UsageError(
            f"--perfetto: {candidate.name} carries no load; choose another by --candidate"
        )
    write_perfetto(timeline(planning.planner, candidate), path)
