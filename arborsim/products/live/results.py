"""Results of `arborsim.live`, from a run, its log or a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborsim.core.errors import ArborsimError, UsageError
from arborsim.core.tables import check_columns, columns_of, made_by
from arborsim.policies.base import hints_of
from arborsim.products import choices
from arborsim.products.declare import setting_texts
from arborsim.products.results import Results

if TYPE_CHECKING:
    import pandas as pd

    from arborsim.play.backends import LiveResult
    from arborsim.products.live.tables import LiveReport
    from arborsim.report.report import Report

_LIBRARIES = ("numpy", "pandas", "pyarrow")


class LiveResults(Results):
    """How many answers are right under each policy and budget, and what its cache took."""

    kind = "live"
    raw: LiveReport

    def to_pandas(self) -> pd.DataFrame:
        """One row per problem, policy and budget.

        Main columns: `episode`, `policy`, `budget`, `budget_tokens`, `correct` (missing if not
        judged), `tokens`, `wall_s`, `peak_hbm_kv_bytes`, `allocated_bytes`, `infeasible` (why the
        budget could not hold the search).
        """
        from arborsim.products.live.tables import live_frame

        frame = live_frame(self.raw)
        if self.raw.results:
            frame["correct"] = frame["correct"].astype("boolean")
        return frame

    def summary(self) -> pd.DataFrame:
        """One row per policy and budget.

        `correct` of `judged`, with the 95% Clopper-Pearson interval (`low`, `high`) of `accuracy`.
        `difference` to full retention, and the `p` of Fisher's exact test.
        """
        import pandas as pd

        from arborsim.products.live.tables import live_rows, row_record

        return pd.DataFrame([row_record(row) for row in live_rows(self.raw)])

    def to_json(self) -> str:
        from arborsim.products.live.tables import live_json

        return live_json(self.raw)

    def describe(self) -> Report:
        from arborsim.products.live.report import report_of

        return report_of(self.raw)

    @classmethod
    def read(cls, frame: pd.DataFrame, metadata: Mapping[str, Any]) -> LiveResults:
        """The results in a Parquet file. Memory over time is not in it."""
        from arborsim.core.measurements import Measurements, TimeSplit
        from arborsim.core.records import convert
        from arborsim.play.backends import LiveFacts, LiveResult
        from arborsim.products.live.tables import LiveReport

        said = metadata
        check_columns(frame, columns_of(LiveResult, Measurements, TimeSplit))
        report = LiveReport(
            convert(LiveFacts, said["facts"]),
            tuple(_result(row) for row in frame.to_dict("records")),
            said["request"], said["command"], said["shadow"], frozenset(said["unbounded"]),
            tuple(said["reading"]),
        )  # fmt: skip
        return cls(report, metadata)

    @classmethod
    def read_log(cls, path: Path) -> LiveResults:
        """The results in a log of ``arborsim live --out``."""
        from arborsim.core.records import convert
        from arborsim.play.backends import LiveFacts
        from arborsim.play.live_log import LiveRecords, request_of
        from arborsim.products.live.tables import LiveReport

        log: LiveRecords[LiveResult] = LiveRecords(path)
        head = log.read()
        if not head:
            raise UsageError(f"{path}: the log holds no results yet")
        request = request_of(head, path)
        cells = request.get("cells", ())
        order = {(cell["policy"], cell["budget"]): place for place, cell in enumerate(cells)}
        results = sorted(
            log.records,
            key=lambda r: (r.episode, order.get((r.policy, r.budget), len(order))),
        )
        unbounded, reading = not_bounded(cells)
        report = LiveReport(
            convert(LiveFacts, head.get("facts"), f"{path}: facts"), tuple(results), request,
            str(head.get("command", "")), bool(request.get("shadow")), unbounded, reading,
        )  # fmt: skip
        return cls(report, live_metadata(report))


def live_metadata(report: LiveReport) -> dict[str, Any]:
    """The metadata of a live run's results."""
    from arborsim.products.live.tables import cautions, left_out, live_rows

    facts = report.facts
    return made_by(
        "live",
        report.command,
        *_LIBRARIES,
        gpu=report.request.get("gpu", {}).get("name", facts.device),
        host="",
        engine="",
        model=facts.model,
        weights_dtype=facts.dtype,
        kv_dtype=facts.dtype,
        facts=facts,
        settings={name: str(value) for name, value in report.request.items() if name != "cells"},
        request=report.request,
        shadow=report.shadow,
        unbounded=sorted(report.unbounded),
        reading=report.reading,
        assumed=[],
        notes=cautions(report, live_rows(report)),
        left_out=[
            {"policy": policy, "budget": budget, "detail": why[0], "searches": len(why)}
            for (policy, budget), why in left_out(report).items()
        ],
        does_not_fit=[],
    )


def not_bounded(cells: Iterable[Mapping[str, Any]]) -> tuple[frozenset[str], tuple[str, ...]]:
    """Policies of a log that do not keep to the budget, and those whose budget is read."""
    from arborsim.policies.registry import build

    unbounded, reading = set(), []
    for cell in cells:
        texts = setting_texts(cell.get("settings", {}))
        try:
            policy = build(cell["policy"], dict(map(choices.assigned, texts)), code=False)
        except ArborsimError:  # of a package that is not installed here
            continue
        if not policy.bounded:
            unbounded.add(policy.name)
            if hints_of(policy).bounds_page:
                reading.append(policy.name)
    return frozenset(unbounded), tuple(reading)


def _result(row: Mapping[str, Any]) -> LiveResult:
    """A row of the table as the record that it was made of."""
    import pandas as pd

    from arborsim.core.measurements import Measurements
    from arborsim.play.backends import LiveResult

    own = {f.name: row[f.name] for f in fields(LiveResult) if f.name in row}
    own["correct"] = None if pd.isna(row["correct"]) else bool(row["correct"])
    return LiveResult(**own, measured=Measurements.of_row(row))
