"""`arborsim.replay`: recorded searches under KV-cache policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from arborsim.core.errors import UsageError
from arborsim.core.statistics import Score
from arborsim.core.tables import check_columns, columns_of, made_by
from arborsim.products import choices
from arborsim.products.choices import Budgets, Files, OnePolicy, Traces
from arborsim.products.declare import InPython, Option, call, equivalent, listed, setting_texts
from arborsim.products.options import (
    Calibrations,
    Expert,
    JobOptions,
    MachineOptions,
    PolicyOptions,
)
from arborsim.products.results import Results, not_in_file

if TYPE_CHECKING:
    import os

    import pandas as pd
    from rich.console import Console

    from arborsim.play.results import EpisodeResult, ReplayResult
    from arborsim.policies.base import Policy
    from arborsim.products.replay.answers import Answers
    from arborsim.products.replay.run import Replay
    from arborsim.report.report import Report

_LIBRARIES = ("numpy", "pandas", "pyarrow", "simpy")
#: Rows of searches up to which the offline optimum is replayed unasked: it costs their square.
_SHORT_ROWS = 2048
#: Several, so that curves exist; chains of thought lose answers between the first two.
BUDGETS = (0.85, 0.7, 0.5)


@dataclass(frozen=True)
class ReplayOptions(PolicyOptions, JobOptions, MachineOptions):
    """Replay traces under KV-cache policies on a simulated GPU.

    Shows peak memory by tier, what was evicted, offloaded and recomputed, where the time went and
    the share of attention kept, all against full retention (policy full), and the right answers
    that live runs of the same settings gave.

    Parameters
    ----------
    traces
        Trace files.
    calibration
        Settings of policies from a calibration, a file or name, where --set gives none. Repeatable.
    full
        Also replay full retention, which others are compared with.
    oracle
        Also replay the offline optimum, the most attention that evicting can keep.

        By default only where no search has more than 2,048 rows, as it takes longer than policies
        do; under all policies, not that of single layers or heads.
    answers
        Log of arborsim live, whose right answers are shown. Repeatable.

        Right answers under the same policies, settings and budgets are shown with the replay, as
        are those that come with arborsim.
    fidelity
        Results of arborsim fidelity (its log or Parquet), shown with the replay. Repeatable.

        Policies, settings and budgets must be the same, and all files of one model.
    equal
        Compare at equal memory, not budgets: peak or byte-seconds.

        Each policy runs at the budget where its HBM peak, or its HBM footprint times seconds, is
        the share in `budgets` of full retention's.  `budget_found` says where.
    reference
        With --equal: the memory is what this policy takes at --budget.
    event_by_event
        One simulated event per decode iteration (slow check).
    keep_matrices
        A prefill that needs attention matrices holds all layers' (output_attentions).
    pictures
        Take the pictures of `ReplayResults.report` on the way. Without, it replays the first
        episode of each trace again.
    explain
        Keep every term of the time.

    Returns
    -------
    ReplayResults

    Examples
    --------
    >>> import arborsim
    >>> results = arborsim.replay(
    ...     "traces/chain-tree.parquet", policies=["epikv", "arborkv"], budgets=[0.5, 0.7],
    ...     model="llama-3.1-8b", episodes=2,
    ... )
    >>> results.summary()[["policy", "budget", "attention_kept"]]  # doctest: +SKIP
    """

    traces: Traces
    _: KW_ONLY
    budgets: Budgets = BUDGETS
    calibration: Calibrations = ()
    full: bool = True
    oracle: Annotated[bool | None, Option(shown="for searches of up to 2,048 rows")] = None
    answers: Files = ()
    fidelity: Files = ()
    equal: Annotated[str, Option(shown="equal budgets")] = ""
    reference: Annotated[OnePolicy, Option(shown="that share of full retention's")] = ""
    event_by_event: Annotated[bool, Expert] = False
    keep_matrices: Annotated[bool, Expert] = False
    pictures: InPython = False
    explain: Annotated[bool, Option(python=True)] = False

    def results(self) -> ReplayResults:
        """Replay, at equal memory if that was asked for."""
        from arborsim.products.fidelity.known import known_fidelity
        from arborsim.products.provenance import replay_settings
        from arborsim.products.replay.answers import answered, shipped
        from arborsim.products.replay.run import Replay
        from arborsim.report.progress import shown

        if self.reference and not self.equal:
            raise UsageError(
                "reference is the policy whose memory others get: also give equal, "
                "as peak or byte-seconds"
            )
        if self.equal and not self.full:
            raise UsageError("equal compares with what full retention takes: leave no-full out")
        paths = choices.files(self.traces)
        known = shipped()
        if logs := [Path(each) for each in listed(self.answers)]:
            from arborsim.products.replay.counting import known_answers

            known = known_answers(logs)
        measured = known_fidelity(self.fidelity)
        chosen = choices.ChosenPolicies(self.policies, oracle=self.oracle)
        given = choices.policy_settings(chosen.names, setting_texts(self.settings))
        made = chosen.build(choices.calibrated(given, listed(self.calibration), paths))
        simulated = self.machine(
            paths,
            event_by_event=self.event_by_event,
            explain=self.explain,
            keep_matrices=self.keep_matrices,
        )
        bound = self.oracle if self.quality else False
        job = Replay(
            paths,
            [*_references(made, paths, self.full, bound, chosen.every), *made],
            choices.budgets(self.budgets),
            simulated,
            quality=self.quality,
            first=self.first,
            count=self.episodes or None,
            pictures=self.pictures,
            asked=frozenset(() if chosen.every else chosen.all_names),
            strict=self.strict,
            workers=self.workers,
            fills=True,
        )
        readers = job.open()
        job.settings = replay_settings(job, readers)
        with shown(self.progress, job.work(readers)) as advance:
            if self.equal:
                from arborsim.products.replay.equal import at_equal_memory, reference_of

                reference = reference_of(self.reference, made)
                job = at_equal_memory(job, self.equal, reference, advance)
            result = measured.of_replay(answered(job.run(advance), known))
        if bound is None and not _short(paths):
            note = f"no offline optimum: a search has more than {_SHORT_ROWS:,} rows; --oracle."
            result = replace(result, notes=(*result.notes, note))
        return ReplayResults(result, _metadata(equivalent("replay", self), job, result), job, known)


replay = call("replay", ReplayOptions)


def _short(traces: list[Path]) -> bool:
    """Whether the offline optimum of every search is quick to find."""
    from arborsim.trace.reader import open_trace

    readers = map(open_trace, traces)
    return all(r.num_rows(n) <= _SHORT_ROWS for r in readers for n in range(r.num_episodes))


def _references(
    policies: list[Policy], traces: list[Path], full: bool, bound: bool | None, every: bool
) -> Iterator[Policy]:
    """Full retention if it is wanted, then the oracles that are and that a trace can serve.

    One for each kind of groups that the policies decide for: each bounds its own kind.  Without
    being asked (`bound` is None) only those that are quick to find and bound something, and of
    `every` policy only the one for the model as a whole.
    """
    from arborsim.play.results import BASELINE, ORACLE
    from arborsim.policies.registry import build
    from arborsim.signals.scores import GROUPINGS
    from arborsim.trace.reader import open_trace

    names = {policy.name for policy in policies}
    if full and BASELINE not in names:
        yield build(BASELINE)
    if bound is False or (bound is None and not _short(traces)):
        return
    kinds = {policy.grouping for policy in policies if policy.uses_budget}
    readers = [open_trace(path) for path in traces]
    for per in GROUPINGS:
        oracle = build(ORACLE, {"per": per})
        wanted = per in kinds and (bool(bound) or per == GROUPINGS[0] or not every)
        wanted = wanted or (bool(bound) and not kinds and per == GROUPINGS[0])
        given = any(oracle.label == policy.label for policy in policies)
        if wanted and not given and any(all(map(r.has, oracle.reads())) for r in readers):
            yield oracle


def _metadata(command: str, job: Replay, result: ReplayResult) -> dict[str, Any]:
    from arborsim.products.provenance import machine_facts
    from arborsim.trace.reader import open_trace

    recorded = [open_trace(path).info.geometry for path in job.traces]
    return made_by(
        "replay",
        command,
        *_LIBRARIES,
        **machine_facts(job.machine, recorded),
        kv_bytes_per_token={each.trace: each.kv_bytes_per_token for each in result.episodes},
        settings=result.settings,
        assumed=result.assumed,
        notes=result.notes,
        left_out=result.left_out,
        does_not_fit=result.does_not_fit,
        equal=result.equal,
        full=[[*cell, *vars(found).values()] for cell, found in result.full.items()],
        asked=result.asked,
        recordings=result.recordings,
        policies=result.policies,
        answers=[
            {"trace": trace, "policy": policy, "row_budget": budget, "answered": asdict(found)}
            for (trace, policy, budget), found in result.answers.items()
        ],
        fidelity=[[*cell, asdict(found)] for cell, found in result.fidelity.items()],
    )


class ReplayResults(Results):
    """Costs of policies on recorded searches, and what they keep."""

    kind = "replay"
    raw: ReplayResult

    def __init__(
        self,
        raw: ReplayResult,
        metadata: Mapping[str, Any],
        job: Replay | None = None,
        known: Answers | None = None,
    ) -> None:
        super().__init__(raw, metadata)
        self._known = known  # None for the answers that come with arborsim
        self._job = job  # None if the results come from a file

    def to_pandas(self) -> pd.DataFrame:
        """One row per search, policy and budget.

        Main columns: `trace`, `episode`, `policy`, `budget`, `budget_tokens`,
        `peak_hbm_kv_bytes`, `peak_ddr_bytes`, `evicted_tokens`, `offloaded_tokens`, `total_s` and
        its parts (`prefill_s`, `decode_s`, `policy_s`, `exposed_transfer_s`, `rehydration_s`),
        `tokens_per_s`, `attention_kept` and `oracle_gap` (shares), `output_error`.  What could not
        run has one row per trace, at the end: `left_out` says why.
        """
        from arborsim.products.replay.tables import to_frame

        return to_frame(self.raw)

    def summary(self) -> pd.DataFrame:
        """One row per trace, policy and budget, over all searches.

        Peaks are the largest of any search, times and tokens sums, `attention_kept` is the mean
        over generated tokens. `hbm_vs_full`, `time_vs_full` and `speed_vs_full` are relative to
        full retention on the same trace.  `right` of `answered` are answers counted live
        (missing where they were not), with their 95% interval `right_low` to `right_high`.
        `answers_differ` says what is not as in the row, such as the budget.  `kl` to `kl_high` and
        `agreement` are fidelity measured live (missing where it was not).
        """
        import pandas as pd

        from arborsim.core.measurements import stored_columns

        rows = []
        for row in self.raw.rows(self.raw.left_out):
            found = asdict(row)
            time, relative = found.pop("time"), found.pop("relative")
            del found["stored"], found["counters"]
            answered = _answer_columns(found.pop("answers"))
            if measured := found.pop("fidelity"):
                ends = {f"kl_{end}": measured[end] for end in ("low", "high")}
                answered |= {name: measured[name] for name in ("kl", "agreement")} | ends
            rows.append({
                **found, **row.counters, **stored_columns(row.stored), **time, **answered,
                "total_s": row.total_s, "tokens_per_s": row.tokens_per_s,
                "hbm_vs_full": relative["peak_hbm"], "time_vs_full": relative["time"],
                "speed_vs_full": relative["tokens_per_s"],
                "at_once_vs_full": relative["at_once"],
                "full_tokens_per_s_vs_full": relative["full_tokens_per_s"],
            })  # fmt: skip
        return pd.DataFrame(rows)

    def to_json(self) -> str:
        from arborsim.products.replay.tables import to_json

        return to_json(self.raw)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write one self-contained HTML page, with the table, figures and pictures of searches.

        Raises
        ------
        UsageError
            The page cannot be written, nothing was replayed, or the results come from a file.
        """
        if self._job is None:
            raise not_in_file(
                "the page shows memory over time and pictures of searches",
                f"replay again: {self.metadata['command']} --report {path}",
            )
        if not self._job.pictures and self.raw.episodes:
            self.raw = _with_pictures(self.raw, self._job)
            self._job = replace(self._job, pictures=True)
        return super().report(path)

    def describe(self, view: str = "auto") -> Report:
        from arborsim.products.replay.report import report_of

        return report_of(self.raw, self._known, view)

    def print(
        self, console: Console | None = None, notes: bool = False, view: str = "auto"
    ) -> None:
        """Print the results as `view` says.

        ``"table"`` has all figures, ``"matrix"`` a line per policy, ``"pareto"`` is drawn with
        characters, and ``"auto"`` is the table or, with many policies, the matrix.
        """
        if view == "pareto":
            from arborsim.products.plot.plots import plots_of
            from arborsim.report.images import print_plots

            print_plots(plots_of(self.describe(), view), console)
        else:
            from arborsim.report.text import print_report

            print_report(self.describe(view), console, notes)

    @classmethod
    def read(cls, frame: pd.DataFrame, metadata: Mapping[str, Any]) -> ReplayResults:
        """The results in a file: everything but pictures, memory over time and cost terms."""
        from arborsim.core.measurements import Measurements, TimeSplit
        from arborsim.core.records import convert
        from arborsim.machine.serving import FullGpu
        from arborsim.play.results import (
            Answered,
            EpisodeResult,
            EqualBudget,
            Fidelity,
            LeftOut,
            ReplayResult,
        )

        kv_bytes = convert(dict[str, int], metadata.get("kv_bytes_per_token", {}))
        columns = columns_of(EpisodeResult, Measurements, TimeSplit)
        check_columns(frame, columns, missing=("attention_kept", "output_error"))
        found = ReplayResult(
            tuple(
                _episode(row, kv_bytes) for row in frame.to_dict("records") if not row["left_out"]
            ),
            (),
            dict(metadata["settings"]),
            tuple(metadata["assumed"]),
            tuple(convert(LeftOut, each) for each in metadata["left_out"]),
            (),
            tuple(metadata["notes"]),
            tuple(metadata["does_not_fit"]),
            metadata.get("recordings", {}),
            metadata.get("policies", {}),
            {
                (each["trace"], each["policy"], each["row_budget"]): convert(
                    Answered, each["answered"]
                )
                for each in metadata.get("answers", ())
            },
            {(t, p, b): convert(Fidelity, each) for t, p, b, each in metadata.get("fidelity", ())},
            tuple(convert(EqualBudget, each) for each in metadata.get("equal", ())),
            {(t, p, b): FullGpu(n, rate) for t, p, b, n, rate in metadata.get("full", ())},
            tuple(metadata.get("asked", ())),
        )
        return cls(found, metadata)


def _answer_columns(found: Mapping[str, Any] | None) -> dict[str, Any]:
    """Right answers, for a table. Missing where none were counted."""
    if found is None:
        names = ("right", "answered", "right_low", "right_high", "answers_differ")
        return dict.fromkeys(names)
    score = Score(*(found[each.name] for each in fields(Score)))
    return {
        "right": score.right, "answered": score.n, "right_low": score.low,
        "right_high": score.high, "answers_differ": ", ".join(found["differs"]),
    }  # fmt: skip


def _episode(row: Mapping[str, Any], kv_bytes: Mapping[str, int]) -> EpisodeResult:
    """A row of the table as the record that it was made of."""
    from arborsim.core.measurements import Measurements
    from arborsim.play.results import EpisodeResult

    apart = ("measured", "kv_bytes_per_token", "terms", "kept_note")
    own = {each.name: row[each.name] for each in fields(EpisodeResult) if each.name not in apart}
    kept, kv_bytes_per_token = row["attention_kept_note"], kv_bytes.get(row["trace"], 0)
    measured = Measurements.of_row(row)
    return EpisodeResult(
        **own, measured=measured, kv_bytes_per_token=kv_bytes_per_token, kept_note=kept
    ).simulated()


def _with_pictures(result: ReplayResult, job: Replay) -> ReplayResult:
    """With pictures of the first episode of each trace, which is replayed again."""
    again = replace(job, pictures=True, count=1, workers=1).run()
    cells = {(each.trace, each.policy, each.budget) for each in result.episodes}
    pictures = [p for p in again.pictures if (p.trace, p.policy, p.budget) in cells]
    maps = [m for m in again.token_maps if (m.trace, m.policy, m.budget) in cells]
    return replace(result, pictures=tuple(pictures), token_maps=tuple(maps))
