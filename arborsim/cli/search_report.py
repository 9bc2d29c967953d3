"""`arborsim search --report`: its options checked, and everything the page rests on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborsim.core.errors import UsageError

if TYPE_CHECKING:
    from arborsim.bank.job import SearchJob
    from arborsim.bank.results import SearchResult
    from arborsim.show.search_trees import ProblemTrees
    from arborsim.trace.reader import TraceReader

#: Options that follow from the width.
_WIDTHS = ("width", "n", "children")
_INTERRUPTED = "The run was interrupted: some problems are missing, and no trees are shown."
_NO_TREES = "Drawing the trees was interrupted: none is shown."


def check_report(report: Path | None, bank: Path, out: Path | None) -> None:
    """Refuse a page that cannot be written, or would overwrite another file, before the work."""
    from arborsim.cli.options import check_output

    check_output(report, "--report")
    if report is not None and report.resolve() in {p.resolve() for p in (bank, out) if p}:
        raise UsageError(f"--report {report}: that file was given already; choose another name")


def page_of(report: Path | None, trees: str) -> Page | None:
    """The page that is asked for; ``"3,17"`` of ``--trees`` are numbers of problems."""
    from arborsim.cli.options import names

    found = names(trees)
    if report is None:
        if found:
            raise UsageError(f"--trees {trees}: also give --report, the page that shows them")
        return None
    for part in found:
        if not part.isdecimal():
            raise UsageError(f"--trees {part}: expected numbers of problems, by comma")
    return Page(report, [int(part) for part in found])


@dataclass(frozen=True)
class Page:
    """The page that was asked for.

    Attributes
    ----------
    path : Path
    trees : list of int
        Problems whose trees it shows; empty for a choice.
    """

    path: Path
    trees: list[int]

    def check(self, chosen: range) -> None:
        """Refuse trees of problems that are not searched, before the work."""
        for episode in self.trees:
            if episode not in chosen:
                raise UsageError(
                    f"--trees {episode}: searched are problems {chosen.start} to {chosen.stop - 1}"
                )

    def write(
        self,
        job: SearchJob,
        reader: TraceReader,
        results: Sequence[SearchResult],
        left_out: Sequence[str],
        interrupted: bool,
    ) -> bool:
        """Film the trees of a few problems, and write the page; returns whether all was done.

        After an interruption nothing more is run: the page then has no trees, and says so.
        """
        from arborsim.bank.sweep import verdicts
        from arborsim.cli.machine import machine_notes
        from arborsim.cli.search_setup import heading
        from arborsim.show.search_page import SearchReport, write_search_page

        profile = job.machine.profile
        shown = None if interrupted else self._film(job, results)
        missing = () if shown is not None else (_INTERRUPTED if interrupted else _NO_TREES,)
        report = SearchReport(
            f"{heading(job, reader, results)}.",
            tuple(results),
            tuple(shown or ()),
            settings(job, reader),
            tuple(f"{name} {getattr(profile, name)}" for name in profile.assumed()),
            tuple(line.removeprefix("left out: ") for line in left_out),
            tuple(verdicts(results)),
            (*machine_notes(job.machine, results), *missing),
        )
        write_search_page(report, self.path)
        return shown is not None

    def _film(self, job: SearchJob, results: Sequence[SearchResult]) -> list[ProblemTrees] | None:
        """None if somebody interrupts it: the results are there, and worth a page."""
        from arborsim.cli.progress import PatientProgress
        from arborsim.show.search_trees import chosen_problems, take_trees

        problems = chosen_problems(results, self.trees)
        work = len(problems) * len(job.arms) * len(job.cells)
        try:
            with PatientProgress(work) as progress:
                return take_trees(job, problems, progress.advance)
        except KeyboardInterrupt:
            return None


def settings(job: SearchJob, reader: TraceReader) -> dict[str, str]:
    """Everything that determines the results."""
    from importlib.metadata import version

    from arborsim import __version__
    from arborsim.cli.machine import machine_settings
    from arborsim.policies.registry import values_of

    info = reader.info
    problems = job.chosen(reader)
    recipe = ", ".join(f"{key} {_shown(value)}" for key, value in info.search_parameters.items())
    found = {
        "bank": f"{reader.path.name}, sha256 {_digest(reader.path)}",
        "recorded": f"{info.task} on {info.model}, seed {info.seed}; {info.search}"
        + (f" ({recipe})" if recipe else ""),
        "problems": f"{len(problems)}, from {problems.start} to {problems.stop - 1}",
        **_searches(job),
        "repeated thoughts": "dead, where the search does not count them"
        if job.dedupe
        else "go on as others do",
        **machine_settings(job.machine, [info.geometry]),
    }
    for cell in job.cells:
        values = ", ".join(f"{key} {value}" for key, value in values_of(cell.policy).items())
        found[f"policy {cell.policy.name}"] = values or "no parameters"
    budgets = dict.fromkeys(cell.budget.text for cell in job.cells if cell.policy.uses_budget)
    if budgets:
        found["budgets"] = ", ".join(budgets)
    libraries = [f"{name} {version(name)}" for name in ("numpy", "pyarrow", "scipy")]
    return {**found, "versions": ", ".join([f"arborsim {__version__}", *libraries])}


def _searches(job: SearchJob) -> dict[str, str]:
    """Widths and options of each search."""
    found = {}
    for label in dict.fromkeys(arm.label for arm in job.arms):
        arms = [arm for arm in job.arms if arm.label == label]
        search: Any = arms[0].make()
        options = [
            f"{f.name} {_shown(getattr(search, f.name))}"
            for f in fields(search)
            if f.init and f.name not in _WIDTHS
        ]
        widths = ", ".join(str(arm.width) for arm in arms)
        found[f"search {label}"] = "; ".join([f"width {widths}", ", ".join(options)]).rstrip("; ")
    return found


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)


def _digest(path: Path) -> str:
    """Of the file, or of all files of a recording that was broken off."""
    import hashlib

    digest = hashlib.sha256()
    for each in sorted(path.iterdir()) if path.is_dir() else [path]:
        with each.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()[:16]
