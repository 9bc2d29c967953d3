"""`arborsim.search`: search algorithms on the same recorded thoughts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from arborsim.core.errors import UsageError
from arborsim.core.outputs import output_path
from arborsim.core.tables import check_columns, columns_of, made_by, with_left_out
from arborsim.products import choices
from arborsim.products.declare import AnyPath, Option, Options, call, equivalent, setting_texts
from arborsim.products.options import JobOptions, MachineOptions, PolicyOptions
from arborsim.products.results import Results

if TYPE_CHECKING:
    import os

    import pandas as pd

    from arborsim.products.search.results import SearchResult, SkippedSearch
    from arborsim.products.search.run import SearchJob
    from arborsim.products.search.trees import ProblemTrees
    from arborsim.report.report import Report

_LIBRARIES = ("numpy", "pandas", "pyarrow", "scipy")
_INTERRUPTED = "The run was interrupted: some problems are missing, and no trees are shown."
_NO_TREES = "Drawing the trees was interrupted: none is shown."
_FROM_FILE = "These results come from a file, which holds no trees: none is shown."


@dataclass(frozen=True, kw_only=True)
class AlgorithmOptions(Options):
    """The searches that walk the bank.

    Parameters
    ----------
    algorithms
        By comma, or all, repeatable: {algorithms}, or package.module:Class.
    widths
        Thoughts that run together at first, by comma: N chains, beams or slots. tot-bfs keeps 5
        states, each gets width // 5 children.
    sweep
        One option, several values: lambda_b=1,1.25,1.5,1.75,2 also names the one that ETS's paper
        would take.
    keep_duplicates
        Go on with thoughts that repeat a sibling.
    """

    algorithms: Annotated[str | Sequence[str], Option("algorithm", complete="algorithm")] = (
        "rebase,ets"
    )
    widths: Annotated[int | str | Sequence[int], Option("width")] = 16
    sweep: str = ""
    keep_duplicates: bool = False


@dataclass(frozen=True)
class SearchOptions(AlgorithmOptions, PolicyOptions, JobOptions, MachineOptions):
    """Run search algorithms on a bank of recorded thoughts.

    Each walks the same thoughts, as it would have met them live, and is then replayed on a
    simulated GPU. Shows accuracy, KV size, memory, model calls, tokens and time, against REBASE.

    Parameters
    ----------
    bank
        A trace with thoughts for several searches (record --bank).

    Returns
    -------
    SearchResults

    Examples
    --------
    >>> import arborsim
    >>> results = arborsim.search("bank.parquet", algorithms=["rebase", "ets"], widths=[16, 64])
    ... # doctest: +SKIP
    """

    bank: Annotated[AnyPath, Option(complete="trace")]

    def results(self) -> SearchResults:
        """Search all problems."""
        searching = Searching(self)
        searching.run()
        return searching.results()


search = call("search", SearchOptions)


class Searching:
    """Searches that were asked for, checked. It keeps what is done if it is interrupted."""

    def __init__(self, options: SearchOptions) -> None:
        from arborsim.play.episode import cells_of
        from arborsim.products.search.run import (
            SearchJob,
            check_fits,
            chosen_arms,
            must_be_known,
            served_arms,
            served_policies,
        )
        from arborsim.searches.bank import open_bank

        self._options, path = options, Path(options.bank)
        named = choices.names(options.algorithms)
        widths = choices.whole_numbers(options.widths, "--width")
        asked, rest, left_out = chosen_arms(
            named, widths, options.sweep, setting_texts(options.settings)
        )
        chosen = choices.ChosenPolicies(options.policies)
        must_be_known(rest, [arm.algorithm for arm in asked], chosen.names)
        made = chosen.build(choices.policy_settings(chosen.names, rest))
        simulated = options.machine([path])
        check_fits(simulated)
        self.reader = open_bank(path)
        strict = options.strict
        arms, lacking = served_arms(self.reader, asked, optional="all" in named or not strict)
        kept, unserved = served_policies(self.reader, made, optional=chosen.every or not strict)
        self._left_out = list(dict.fromkeys((*left_out, *lacking, *unserved)))
        cells = cells_of(kept, choices.budgets(options.budgets))
        if not arms or not cells:
            raise UsageError(f"nothing is left to run: {'; '.join(self._left_out)}")
        self.job = SearchJob(
            path, arms, cells, simulated, quality=options.quality,
            dedupe=not options.keep_duplicates, first=options.first,
            count=options.episodes or None, strict=strict, workers=options.workers,
        )  # fmt: skip
        self.job.open()

    @property
    def problems(self) -> range:
        """Those that are searched."""
        return self.job.chosen(self.reader)

    def run(self) -> None:
        """Search all problems. What is done stays if this is interrupted."""
        from arborsim.report.progress import shown

        with shown(self._options.progress, self.job.work(self.reader)) as advance:
            self.job.run(advance)

    def results(self) -> SearchResults:
        """The results of the problems that are done."""
        from arborsim.machine.numbers import assumed_numbers
        from arborsim.products.provenance import (
            machine_facts,
            search_heading,
            search_notes,
            search_settings,
        )
        from arborsim.products.search.results import verdicts

        job, results = self.job, tuple(self.job.ordered())
        metadata = made_by(
            "search",
            equivalent("search", self._options),
            *_LIBRARIES,
            **machine_facts(job.machine, [self.reader.info.geometry]),
            heading=search_heading(job, self.reader, results),
            settings=search_settings(job, self.reader),
            assumed=assumed_numbers(job.machine.profile),
            verdicts=verdicts(results),
            notes=search_notes(job.machine, results),
            left_out=[*self._left_out, *job.notes()],
            not_by_levels=sorted({each.label for each in results if not each.by_levels}),
            complete=job.problems == len(self.problems),
        )
        return SearchResults(results, metadata, job, job.skipped)


class SearchResults(Results):
    """How right searches are, and what they cost, problem by problem."""

    kind = "search"
    raw: tuple[SearchResult, ...]

    def __init__(
        self,
        raw: Sequence[SearchResult],
        metadata: Mapping[str, Any],
        job: SearchJob | None = None,
        skipped: Sequence[SkippedSearch] = (),
    ) -> None:
        super().__init__(tuple(raw), metadata)
        self._skipped = tuple(skipped)
        self._job = job  # None if the results come from a file

    @property
    def complete(self) -> bool:
        """Whether all problems were searched. False after an interruption."""
        return bool(self.metadata["complete"])

    def to_pandas(self) -> pd.DataFrame:
        """One row per problem, algorithm, width, policy and budget.

        Main columns: `episode`, `algorithm`, `swept`, `width`, `policy`, `budget`, `correct`
        (missing if not judged), `kv_tokens`, `model_calls`, `generated_tokens`, `bank_misses`,
        `peak_hbm_kv_bytes`, `hbm_kv_byte_s`, `total_s` and its parts, `attention_kept`.  Searches
        for which a budget was too small come last: `left_out` says why.
        """
        import pandas as pd

        frame = pd.DataFrame([result.flat() for result in self.raw])
        if self.raw:
            frame["correct"] = frame["correct"].astype("boolean")
        return with_left_out(frame, [vars(each) for each in self._skipped], ["attention_kept_note"])

    def summary(self) -> pd.DataFrame:
        """One row per algorithm, width, policy and budget.

        `accuracy` has a 95% Clopper-Pearson interval (`low`, `high`). Other figures are means per
        search, and with ``_vs_rebase`` multiples of REBASE's.
        """
        import pandas as pd

        return pd.DataFrame(self._rows())

    def _rows(self) -> list[dict[str, Any]]:
        from arborsim.products.search.results import rows_of

        found = []
        for row in rows_of(self.raw, self._skipped):
            own = {k: v for k, v in vars(row).items() if k not in ("figures", "reference")}
            ratios = {f"{name}_vs_rebase": row.times(name) for name in row.figures}
            found.append({**own, **row.figures, **ratios})
        return found

    def to_json(self) -> str:
        from arborsim.core import documents

        said = ("heading", "settings", "assumed", "verdicts", "notes", "left_out")
        return documents.to_json(
            {
                **{name: self.metadata[name] for name in said},
                "rows": self._rows(),
                "searches": [result.flat() for result in self.raw],
            }
        )

    def report(
        self,
        path: str | os.PathLike[str],
        problems: Sequence[int] | None = None,
        *,
        progress: bool = False,
    ) -> Path:
        """Write one self-contained HTML page, with the trees of some `problems`.

        Those are the first that all searches solve, that some do and that none does, unless they
        are named.  Results of a file, and of an interrupted run, have no trees.

        Raises
        ------
        UsageError
            The page cannot be written, or a problem was not searched.
        """
        from arborsim.report.report import write

        trees, missing, stopped = self._trees(problems or [], progress)
        path = output_path(path)
        write(self.describe(trees, missing), path)
        if stopped:
            raise KeyboardInterrupt
        return path

    def describe(self, trees: Sequence[ProblemTrees] = (), missing: Sequence[str] = ()) -> Report:
        from arborsim.products.search.report import SearchReport, report_of

        said = self.metadata
        return report_of(
            SearchReport(
                f"{said['heading']}.",
                self.raw,
                tuple(trees),
                said["settings"],
                tuple(said["assumed"]),
                tuple(line.removeprefix("left out: ") for line in said["left_out"]),
                tuple(said["verdicts"]),
                (*said["notes"], *missing),
                self._skipped,
            )
        )

    def _trees(
        self, problems: Sequence[int], progress: bool
    ) -> tuple[Sequence[ProblemTrees], list[str], bool]:
        """The trees, why there are none, and whether Ctrl-C left them out."""
        from arborsim.products.search.trees import chosen_problems, take_trees
        from arborsim.report.progress import shown

        job = self._job
        if job is None:
            return (), [_FROM_FILE], False
        if not self.complete:
            return (), [_INTERRUPTED], False
        titled = chosen_problems(self.raw, problems)
        try:
            with shown(progress, len(titled) * len(job.arms) * len(job.cells)) as advance:
                return take_trees(job, titled, advance), [], False
        except KeyboardInterrupt:  # the results are there, and worth a page
            return (), [_NO_TREES], True

    @classmethod
    def read(cls, frame: pd.DataFrame, metadata: Mapping[str, Any]) -> SearchResults:
        """The results in a file."""
        from arborsim.core.measurements import Measurements, TimeSplit
        from arborsim.products.search.results import SearchResult, Simulated, SkippedSearch

        apart = set(metadata["not_by_levels"])
        columns = columns_of(SearchResult, Simulated, Measurements, TimeSplit)
        check_columns(frame, columns, missing=("attention_kept",))
        found = frame.to_dict("records")
        names = [each.name for each in fields(SkippedSearch)]
        skipped = [
            SkippedSearch(**{name: row[name] for name in names}) for row in found if row["left_out"]
        ]
        ran = [_result(row, apart) for row in found if not row["left_out"]]
        return cls(ran, metadata, skipped=skipped)


def _result(row: Mapping[str, Any], apart: set[str]) -> SearchResult:
    """A row of the table as the record that it was made of."""
    import pandas as pd

    from arborsim.core.measurements import Measurements
    from arborsim.products.search.results import SearchResult, Simulated

    simulated = Simulated(
        Measurements.of_row(row), row["budget_tokens"], row["attention_kept"], row["hbm_kv_byte_s"],
        row["peak_held_kv_bytes"], row["held_kv_byte_s"], row["attention_kept_note"],
    )  # fmt: skip
    own = {f.name: row[f.name] for f in fields(SearchResult) if f.name in row}
    own["correct"] = None if pd.isna(row["correct"]) else bool(row["correct"])
    found = SearchResult(**own, simulated=simulated)
    return replace(found, by_levels=found.label not in apart)
