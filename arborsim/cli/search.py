"""`arborsim search`: every search algorithm on the same recorded thoughts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from arborsim.cli.command import argument, command, panel
from arborsim.cli.options import (
    JobOptions,
    MachineOptions,
    OutputOptions,
    PolicyOptions,
    build_policies,
    names,
    output_option,
    policy_settings,
    search_help,
    whole_numbers,
)
from arborsim.cli.progress import PatientProgress, interrupted
from arborsim.core.errors import MissingSignal, UnknownName, UsageError
from arborsim.search import search_options

if TYPE_CHECKING:
    from arborsim.bank.arms import Arm, Sweep
    from arborsim.bank.job import SearchJob
    from arborsim.bank.results import SearchResult
    from arborsim.machine.machine import Machine
    from arborsim.policies.base import Policy
    from arborsim.show.search_trees import ProblemTrees
    from arborsim.trace.reader import TraceReader

#: The forms of ``--out``, by ending.
FORMS = (".parquet", ".csv", ".json")
_INTERRUPTED = "The run was interrupted: some problems are missing, and no trees are shown."
_NO_TREES = "Drawing the trees was interrupted: none is shown."
searches_option = panel("Searches")


@dataclass(frozen=True)
class SearchOptions:
    """The searches that walk the bank."""

    algorithm: list[str] = searches_option(
        ["rebase,ets"],
        f"By comma, or 'all'; repeatable: {search_help()}",
        complete="algorithm",
    )
    width: str = searches_option(
        "16",
        "Thoughts that run together at first, by comma: N chains, beams or slots; tot-bfs "
        "keeps 5 states, each gets width // 5 children.",
    )
    sweep: str = searches_option(
        "",
        "One option, several values: lambda_b=1,1.25,1.5,1.75,2 also names the one that "
        "ETS's paper would take.",
    )
    keep_duplicates: bool = searches_option(
        False, "Go on with thoughts that repeat a sibling.", "--keep-duplicates"
    )

    @property
    def every(self) -> bool:
        """Whether all were asked for; one that cannot run is then left out."""
        return "all" in names(self.algorithm)

    def arms(self, given: Iterable[str]) -> tuple[list[Arm], list[str], list[str]]:
        """The searches, the settings that are left for policies, and what is left out and why."""
        from arborsim.bank.arms import REFERENCE, Sweep, chosen_algorithms, split_settings
        from arborsim.bank.results import OPTION

        chosen = chosen_algorithms(names(self.algorithm))
        swept = Sweep.parse(self.sweep, chosen) if self.sweep else None
        if swept is not None and swept.option == OPTION and REFERENCE not in chosen:
            chosen = [REFERENCE, *chosen]  # what the values are compared with
        options, rest = split_settings(chosen, given)
        found: list[Arm] = []
        left_out: list[str] = []
        for width, algorithm in product(whole_numbers(self.width, "--width"), chosen):
            try:
                found += _arms(algorithm, width, options[algorithm], swept)
            except UsageError as error:
                if not self.every:
                    raise
                left_out.append(f"left out: {error}")
        return sorted(dict.fromkeys(found), key=lambda arm: arm.width), rest, left_out


@dataclass(frozen=True)
class SearchOutput(OutputOptions):
    """Files to write."""

    out: Path | None = output_option(
        None, "Write a row per search to a .parquet, .csv or .json file."
    )
    trees: str = output_option(
        "",
        "Problems whose trees the page shows, by comma.",
        shown="the first that all searches solve, that some do and that none does",
    )

    def check(self, *inputs: Path) -> None:
        if self.out is not None and self.out.suffix not in FORMS:
            raise UsageError(f"--out {self.out}: its name must end in {', '.join(FORMS)}")
        if self.trees and self.report is None:
            raise UsageError(f"--trees {self.trees}: also give --report, the page that shows them")
        super().check(*inputs)

    def problems(self, chosen: range) -> list[int]:
        """The problems of ``--trees``, which must be among those that are searched."""
        found = []
        for part in names(self.trees):
            if not part.isdecimal():
                raise UsageError(f"--trees {part}: expected numbers of problems, by comma")
            if int(part) not in chosen:
                raise UsageError(
                    f"--trees {part}: searched are problems {chosen.start} to {chosen.stop - 1}"
                )
            found.append(int(part))
        return found


@command
def search(
    bank: Path = argument(
        ..., "A trace with thoughts for several searches (record --bank).", complete="trace"
    ),
    searches: SearchOptions = SearchOptions(),
    policies: PolicyOptions = PolicyOptions(),
    machine: MachineOptions = MachineOptions(),
    job: JobOptions = JobOptions(),
    output: SearchOutput = SearchOutput(),
) -> int:
    """Run search algorithms on a bank of recorded thoughts.

    Each walks the same thoughts, as it would have met them live, and is then replayed on a
    simulated GPU.  Shows accuracy, KV size, memory, model calls, tokens and time, against REBASE.
    """
    from arborsim.bank.bank import open_bank
    from arborsim.bank.job import SearchJob
    from arborsim.run.episode import cells_of

    output.check(bank)
    asked, rest, left_out = searches.arms(policies.set_)
    chosen = policies.names()
    _must_be_known(rest, [arm.algorithm for arm in asked], chosen)
    made = build_policies(policy_settings(chosen, rest))
    simulated = machine.machine([bank])
    _check_fits(simulated)
    reader = open_bank(bank)
    arms, lacking = _served(reader, asked, optional=searches.every)
    kept, unserved = _kept(reader, made, optional=policies.every)
    left_out = list(dict.fromkeys((*left_out, *lacking, *unserved)))
    cells = cells_of(kept, policies.budgets())
    if not arms or not cells:
        raise UsageError(f"nothing is left to run: {'; '.join(left_out)}")
    dedupe = not searches.keep_duplicates
    request = SearchJob(bank, arms, cells, simulated, dedupe=dedupe, **job.fields())
    return _run(request, left_out, output)


def _arms(algorithm: str, width: int, given: dict[str, str], swept: Sweep | None) -> list[Arm]:
    """A search at one width, once for each value of a sweep of one of its options."""
    from arborsim.bank.arms import arms_of

    if swept is None or swept.option not in search_options(algorithm):
        return arms_of(algorithm, [width], given)
    option, found = swept.option, []
    for value in swept.values:
        found += arms_of(algorithm, [width], {**given, option: value}, f"{option}={value}")
    return found


def _must_be_known(rest: Iterable[str], algorithms: Sequence[str], policies: Sequence[str]) -> None:
    """Refuse a setting that no chosen search or policy has."""
    from arborsim.policies.registry import available, find, parameter_name, parameters

    known = {name for a in algorithms for name in search_options(a)}
    kinds = [find(policy) for policy in policies]
    own = {name for kind in kinds for name in parameters(kind)}
    for setting in rest:
        key = setting.partition("=")[0]
        head = key.partition(".")[0]
        has = any(parameter_name(kind, key) for kind in kinds)
        if not has and head not in available() and head not in policies:
            raise UnknownName("setting of the chosen searches and policies", key, known | own)


def _check_fits(machine: Machine) -> None:
    """Refuse a model whose weights alone exceed the GPU."""
    geometry, profile = machine.geometry, machine.profile
    if geometry is not None and geometry.weight_bytes > profile.usable_hbm_bytes:
        raise UsageError(
            f"--model {geometry.name}: its weights are {geometry.weight_bytes / 1e9:.1f} GB, and "
            f"{profile.name} has {profile.usable_hbm_bytes / 1e9:.1f} GB that can be used: choose "
            "a larger --gpu or a smaller --model"
        )


def _served(
    reader: TraceReader, arms: Iterable[Arm], *, optional: bool
) -> tuple[list[Arm], list[str]]:
    """The searches that the bank can serve, and why the others are left out if optional."""
    from arborsim.bank.job import require_embeddings

    served, lacking = [], []
    for arm in arms:
        try:
            require_embeddings(reader, arm)
            served.append(arm)
        except MissingSignal as error:
            if not optional:
                raise
            lacking.append(f"left out: {error}")
    return served, lacking


def _kept(
    reader: TraceReader, policies: Iterable[Policy], *, optional: bool
) -> tuple[list[Policy], list[str]]:
    """The policies that the bank can serve, and why the others are left out if optional."""
    from arborsim.run.results import LeftOut
    from arborsim.show.replay_words import left_out
    from arborsim.trace.schema import recording_options

    kept, unserved = [], []
    for policy in policies:
        missing = [signal for signal in sorted(policy.reads()) if not reader.has(signal)]
        if not missing:
            kept.append(policy)
            continue
        if not optional:
            reader.require(policy.reads(), f"policy {policy.name}")
        remedy, why = " ".join(recording_options(missing, reader.info)), reader.info.unrecorded
        unserved.append(LeftOut(reader.path.name, policy.name, remedy=remedy, unrecorded=why))
    return kept, left_out(unserved)


def _run(job: SearchJob, left_out: list[str], output: SearchOutput) -> int:
    """Run with a bar, print and write; Ctrl-C keeps the problems that are done."""
    from rich.console import Console

    from arborsim.bank.results import rows_of, verdicts
    from arborsim.show.provenance import search_heading, search_notes
    from arborsim.show.search import print_searches
    from arborsim.show.words import plain

    reader = job.open()
    shown = output.problems(job.chosen(reader))
    stopped = False
    try:
        with PatientProgress(job.work(reader)) as progress:
            job.run(progress.advance)
    except KeyboardInterrupt:
        stopped = True
    results, left_out = job.ordered(), [*left_out, *job.notes()]
    print_searches(rows_of(results), search_heading(job, reader, results))
    console = Console(highlight=False)
    for line in (*verdicts(results), *search_notes(job.machine, results), *left_out):
        console.print(plain(line), markup=False)
    if output.out is not None and (results or not stopped):
        _write(results, output.out)
        typer.echo(f"wrote {output.out}")
    if output.report is not None and results:
        stopped |= _write_page(job, reader, left_out, output.report, None if stopped else shown)
        typer.echo(f"wrote {output.report}")
    if not stopped:
        return 0
    done, of = len({r.episode for r in results}), len(job.chosen(reader))
    return interrupted(f": {done} of {of} problems are in the results")


def _write(results: Sequence[SearchResult], out: Path) -> None:
    """One row per search: the same results give the same bytes."""
    import json

    import pandas as pd

    from arborsim.core.documents import strict

    rows = [result.flat() for result in results]
    if out.suffix == ".json":
        text = json.dumps(strict(rows), indent=1, allow_nan=False)
        out.write_text(f"{text}\n", encoding="utf-8")
        return
    frame = pd.DataFrame(rows)
    if rows:
        frame["correct"] = frame["correct"].astype("boolean")
    if out.suffix == ".csv":
        frame.to_csv(out, index=False, lineterminator="\n")
    else:
        frame.to_parquet(out, index=False)


def _write_page(
    job: SearchJob, reader: TraceReader, skipped: Iterable[str], path: Path, shown: list[int] | None
) -> bool:
    """Write the page, without trees if `shown` is None; returns whether Ctrl-C left them out."""
    from arborsim.bank.results import verdicts
    from arborsim.show.provenance import search_heading, search_notes, search_settings
    from arborsim.show.search_page import SearchReport, write_search_page
    from arborsim.show.search_trees import chosen_problems, take_trees

    profile, results = job.machine.profile, job.ordered()
    trees: Sequence[ProblemTrees] = ()
    missing = [_INTERRUPTED] if shown is None else []
    if shown is not None:
        problems = chosen_problems(results, shown)
        try:
            with PatientProgress(len(problems) * len(job.arms) * len(job.cells)) as progress:
                trees = take_trees(job, problems, progress.advance)
        except KeyboardInterrupt:  # the results are there, and worth a page
            missing = [_NO_TREES]
    report = SearchReport(
        f"{search_heading(job, reader, results)}.",
        tuple(results),
        tuple(trees),
        search_settings(job, reader),
        tuple(f"{name} {getattr(profile, name)}" for name in profile.assumed()),
        tuple(line.removeprefix("left out: ") for line in skipped),
        tuple(verdicts(results)),
        (*search_notes(job.machine, results), *missing),
    )
    write_search_page(report, path)
    return bool(missing)
