"""`arborsim.sweep` and `arborsim.results`: grids of replays and live runs, and what they found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from arborsim.core.errors import ArborsimError, UnknownName, UsageError
from arborsim.core.tables import made_by
from arborsim.products import choices
from arborsim.products.choices import Files
from arborsim.products.declare import (
    AnyPath,
    InPython,
    Option,
    Options,
    call,
    declared,
    equivalent,
    listed,
)
from arborsim.products.results import Results

if TYPE_CHECKING:
    import pandas as pd

    from arborsim.play.results import Row
    from arborsim.products.live.run import LiveRun
    from arborsim.products.sweep.cells import Made
    from arborsim.products.sweep.compare import SweepReport
    from arborsim.products.sweep.jobs import Job
    from arborsim.products.sweep.run import Pool, Tally
    from arborsim.report.report import Report

#: Where cells are computed.
PLACES = ("local", "ray")
#: Keywords of `arborsim.live` that a grid does not give.
_NOT_LIVE = ("full", "out", "trace", "resume", "overwrite", "progress")


@dataclass(frozen=True)
class SweepOptions(Options):
    """Replay a grid of traces, policies, budgets and machines, and search it live.

    Every combination is a cell: a small Parquet file in the folder, named by what it depends on. A
    second run computes only what is missing; several may share a folder. Ctrl-C keeps the cells
    that are done; exit code 130. Exit code 1 if cells failed: these are records with their reason,
    and the next run tries them again.

    Parameters
    ----------
    grid
        Grid in TOML (arborsim sweep --example prints one).

        In Python also what stands in one, as a mapping, with paths relative to the working
        directory.
    out
        Folder for the cells.
    allow_code
        Import policies and searches that the grid names as package.module:Class.
    workers
        Processes of this machine; same cells.

        Each may die of a cell, which has failed then; 0 for this process alone.  With Ray, of the
        cluster that is started here without `address`.
    on
        Where cells are computed: local, or ray (the cluster that Ray knows; extra ray).
    address
        --on ray: address of the cluster.
    progress
        Show progress on standard error.

    Returns
    -------
    SweepResults
        The cells of the grid.  A cell that failed is one of them, with its reason.

    Raises
    ------
    ArborsimError
        A name, number or file of the grid that cannot work, in one line, before anything runs.

    Examples
    --------
    >>> import arborsim
    >>> found = arborsim.sweep("grid.toml", "cells", workers=2)  # doctest: +SKIP
    >>> found.to_pandas()[["policy", "budget", "hbm_vs_full"]]  # doctest: +SKIP
    """

    grid: Annotated[AnyPath | Mapping[str, Any], Option(default="")]
    out: Annotated[AnyPath, Option(named=True, panel="Output", default="")]
    _: KW_ONLY
    allow_code: bool = False
    workers: Annotated[int, Option("jobs", panel="Run", least=0, default=1)] = 0
    on: Annotated[str, Option(panel="Run")] = "local"
    address: Annotated[str, Option(panel="Run", shown="one started here")] = ""
    progress: InPython = False

    def results(self) -> SweepResults:
        """Compute what is missing."""
        sweeping = Sweeping(self)
        sweeping.run()
        return sweeping.results()


sweep = call("sweep", SweepOptions)


class Sweeping:
    """A sweep that was asked for, checked; cells that are done survive an interruption.

    `foretell` is told how many cells there will be, at most.
    """

    def __init__(
        self, options: SweepOptions, foretell: Callable[[int], None] = lambda cells: None
    ) -> None:
        from arborsim.products.sweep.cells import Folder
        from arborsim.products.sweep.jobs import jobs_of, read_jobs

        given = self._options = options
        if given.on not in PLACES:
            raise UnknownName("place to compute on", given.on, PLACES)
        if given.address and given.on != "ray":
            raise UsageError("address is that of a Ray cluster: on must be ray (--on ray)")
        path = Path(given.out)
        if path.exists() and not path.is_dir():
            raise UsageError(f"{path}: this is a file; give the folder for the cells")
        if isinstance(given.grid, Mapping):
            self.jobs = jobs_of(given.grid, Path(), _check_live, foretell)
        else:
            self.jobs = read_jobs(Path(given.grid), _check_live, given.allow_code, foretell)
        self.folder = Folder(path)
        self._pool = _pool(given.on, given.workers, given.address)
        self.tally: Tally | None = None

    def run(self) -> Tally:
        """Compute what is missing."""
        from arborsim.products.sweep.run import Progress, fill
        from arborsim.report.progress import shown

        missing = sum(job not in self.folder for job in self.jobs)
        with shown(self._options.progress, missing) as advance:
            self.tally = fill(self.folder, self.jobs, compute, self._pool, Progress(advance))
        return self.tally

    def results(self) -> SweepResults:
        """The grid's cells that are done."""
        cells = [job.address for job in self.jobs]
        return CellOptions(self.folder.path, cells=cells).results()


def _pool(on: str, workers: int, address: str) -> Pool:
    if on == "ray":
        from arborsim.products.sweep.on_ray import on_ray

        return on_ray(workers, address)
    from arborsim.products.sweep.run import local

    return local(workers)


@dataclass(frozen=True)
class CellOptions(Options):
    """Show what a sweep found: cells, or groups of them.

    Cells are compared with full retention on the same trace and machine. --csv and --parquet write
    the groups of --by, else the cells with all their columns.

    Parameters
    ----------
    folder
        Folder of arborsim sweep --out.
    where
        Cells to take: policy=h2o,snapkv, or settings such as seed=0,1; repeatable.

        Also a mapping: ``{"policy": ["h2o", "snapkv"], "gpu": "h100"}``.  Full retention on the
        same machines is compared with even if it is not taken.
    by
        Parameters that groups share: policy,budget, or settings such as seed.
    fidelity
        Results of arborsim fidelity, shown with cells of the same policies. Repeatable.
    cells
        Cells to take, by `address`.

    Returns
    -------
    SweepResults

    Raises
    ------
    ArborsimError
        There are no cells, one is damaged, or there is no such parameter.
    """

    folder: AnyPath
    _: KW_ONLY
    where: Mapping[str, Any] | Sequence[str] = ()
    by: Annotated[str | Sequence[str], Option(shown="cells")] = ()
    fidelity: Files = ()
    cells: Annotated[Iterable[str] | None, Option(python=True, silent=True)] = None

    def results(self) -> SweepResults:
        """Read the cells, and compare them."""
        from arborsim.products.fidelity.known import known_fidelity
        from arborsim.products.sweep.cells import Folder
        from arborsim.products.sweep.compare import (
            SweepReport,
            compared,
            groups,
            kept,
            with_fidelity,
        )

        path, wanted = Path(self.folder), _wanted(self.where)
        rows, superseded = Folder(path).rows(None if self.cells is None else list(self.cells))
        chosen = with_fidelity(kept(compared(rows), wanted), known_fidelity(self.fidelity))
        names = choices.names([self.by] if isinstance(self.by, str) else list(self.by))
        report = SweepReport(str(path), tuple(chosen), tuple(names), superseded)
        groups(report, names)  # refuses unknown ones
        if not chosen:
            raise UsageError(f"{path}: {_no_cell(rows, wanted)}")
        command = equivalent("results", self)
        return SweepResults(report, made_by("sweep", command, "pandas", "pyarrow", settings={}))


results = call("results", CellOptions)


def _no_cell(rows: Sequence[Any], wanted: Mapping[str, Sequence[str]]) -> str:
    """Which condition takes no cell, and what there is; or that all together take none."""
    from arborsim.products.sweep.compare import kept, text_of
    from arborsim.report.words import listed

    for name, values in wanted.items():
        if not kept(rows, {name: values}):
            there = sorted({text_of(row, name) or "''" for row in rows})
            more = f" and {len(there) - 6} more" if len(there) > 6 else ""
            return f"no cell has {name} {' or '.join(values)}: there are {listed(there[:6])}{more}"
    return f"none of {len(rows)} cells is as asked for, though some are as each --where asks"


def _wanted(where: Mapping[str, Any] | Sequence[str]) -> dict[str, list[str]]:
    """Values by parameter, as texts."""
    if isinstance(where, Mapping):
        return {
            name: [str(v).lower() if isinstance(v, bool) else str(v) for v in listed(value)]
            for name, value in where.items()
        }
    found: dict[str, list[str]] = {}
    for text in listed(where):
        name, equals, values = text.partition("=")
        if not equals:
            raise UsageError(f"--where {text}: expected name=value, such as policy=h2o")
        found.setdefault(name.strip(), []).extend(part.strip() for part in values.split(","))
    return found


# ------------------------------------------------------------------------- computing a cell


def compute(job: Job) -> Made:
    """A cell's file; whatever goes wrong is a record with its reason."""
    from arborsim.core.installed import sources
    from arborsim.play.results import NothingRan
    from arborsim.products.sweep.cells import LEFT_OUT, WENT_WRONG, made
    from arborsim.products.sweep.jobs import CODE

    if sources(*CODE[job.kind]) != job.code:
        raise UsageError("a worker has another arborsim: install the same version everywhere")
    if job.left_out:
        return made(job, LEFT_OUT, reason=job.left_out)
    try:
        return _replayed(job) if job.kind == "replay" else _searched(job)
    except NothingRan as error:
        return made(job, LEFT_OUT, reason=error.reason)
    except ArborsimError as error:
        return made(job, WENT_WRONG, reason=" ".join(str(error).split()))
    except Exception as error:  # whatever a policy of the user's may raise
        said = " ".join(f"{type(error).__name__}: {error}".split())
        return made(job, WENT_WRONG, reason=said)


def _replayed(job: Job) -> Made:
    from arborsim.products.replay.ask import ReplayOptions
    from arborsim.products.sweep.cells import DONE, made

    asked = ReplayOptions(**job.given, full=False, oracle=False)
    found = asked.results()
    said = found.metadata["settings"][f"trace {Path(job.given['traces']).name}"]
    if not said.endswith(job.inputs["trace"]):
        raise UsageError(f"{job.head['trace']} has changed since the sweep began: run it again")
    (row,) = found.raw.rows()
    # Without folders: a cell does not depend on where its inputs lie.
    names: dict[str, Any] = {
        key: Path(value).name
        for key, value in job.given.items()
        if isinstance(value, str) and Path(value).is_absolute()
    }
    command = equivalent("replay", replace(asked, **names))
    metadata = {**found.metadata, "kind": "cell", "command": command}
    return made(job, DONE, replace(row, answers=None), metadata=metadata)


def _searched(job: Job) -> Made:
    from arborsim.play.results import Answered
    from arborsim.products.live.tables import live_rows
    from arborsim.products.sweep.cells import DONE, LEFT_OUT, made

    running = _live_run(job.given)
    running.run()
    found = running.results()
    rows = live_rows(found.raw)
    if not rows:
        why = next(each.infeasible for each in found.raw.results)
        return made(job, LEFT_OUT, reason=why)
    (row,) = rows
    score = None
    if row.judged:
        score = Answered(
            row.correct, row.judged, len(row.infeasible), None, job.address,
            budget=row.budget, problems=row.trace,
        )  # fmt: skip
    answered: Row = replace(row, answers=score)
    metadata = {**found.metadata, "kind": "cell"}
    return made(job, DONE, answered, wall_s=row.wall_s, metadata=metadata)


def _check_live(given: Mapping[str, Any]) -> None:
    """Refuse arguments of `arborsim.live` that cannot work."""
    from arborsim.products.live.ask import LiveOptions

    known = {each.name for each in declared(LiveOptions)} - {*_NOT_LIVE}
    for name in given:
        if name not in known and name != "full":
            raise UnknownName("key", name, known)
    _live_run(given)


def _live_run(given: Mapping[str, Any]) -> LiveRun:
    from arborsim.products.live.ask import LiveOptions
    from arborsim.products.live.run import LiveRun

    return LiveRun(LiveOptions(**given))


class SweepResults(Results):
    """The cells of a sweep, compared."""

    kind = "sweep"
    raw: SweepReport

    @property
    def failed(self) -> dict[str, str]:
        """Reasons of cells that failed, by `address`."""
        from arborsim.products.sweep.cells import WENT_WRONG

        return {row.address: row.left_out for row in self.raw.rows if row.status == WENT_WRONG}

    def to_pandas(self) -> pd.DataFrame:
        """One row per cell.

        First its parameters: `kind` (``"replay"`` or ``"live"``), `trace` (of a live run its task),
        `policy`, `settings` (those given), `budget`, machine and model, ... `status` is
        ``"done"``, ``"left out"`` (it cannot run: `left_out` says why) or ``"failed"``.  Then
        figures as in `ReplayResults.summary`, of live runs `right` of `answered`; `hbm_vs_full`,
        `time_vs_full`, `speed_vs_full` and `oracle_gap` compare with full retention and the oracle
        on the same trace, machine and model, where the folder has them.
        """
        from arborsim.products.sweep.compare import to_frame

        return to_frame(self.raw)

    def summary(self) -> pd.DataFrame:
        """One row per group: by `by`, or policy, settings and budget.

        Cells that were replayed and cells of live runs do not mix: where there are both, a column
        `kind` tells them apart.  `right` and `answered` are sums, all others means over the cells
        that know them; `without` cells were left out or failed.
        """
        from arborsim.products.sweep.compare import group_frame, grouping

        return group_frame(self.raw, grouping(self.raw))

    def to_json(self) -> str:
        from arborsim.products.sweep.compare import to_json

        return to_json(self.raw)

    def describe(self) -> Report:
        from arborsim.products.sweep.report import report_of

        return report_of(self.raw, self.metadata["command"])
