"""Results of `arborsim.fidelity`, from a run, its log or a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborsim.core.errors import UsageError
from arborsim.core.tables import check_columns, columns_of, made_by
from arborsim.products.results import Results

if TYPE_CHECKING:
    import pandas as pd

    from arborsim.play.backends import LiveFacts
    from arborsim.play.fidelity import FidelityRequest, FidelityResult
    from arborsim.products.fidelity.tables import FidelityReport
    from arborsim.report.report import Report


class FidelityResults(Results):
    """How near each policy and budget keeps the next token's distribution to full retention's."""

    kind = "fidelity"
    raw: FidelityReport

    def to_pandas(self) -> pd.DataFrame:
        """One row per document, policy and budget.

        Main columns: `episode`, `document`, `policy`, `budget`, `budget_tokens`, `tokens`,
        `kl_tail`, and by part of the document, from 1 to 8, `counts_1` (judged tokens), `kl_1`
        (mean, nats), `agree_1` (a count), `nll_1` and `full_nll_1` (means, nats).
        """
        from arborsim.products.fidelity.tables import fidelity_frame

        return fidelity_frame(self.raw)

    def summary(self) -> pd.DataFrame:
        """One row per policy and budget.

        `kl`, `agreement` and `ratio` (of perplexities), each with `_low` and `_high`, the ends of
        its 95% interval by a bootstrap over documents, `kl_tail`, `documents` and judged `tokens`.
        """
        import pandas as pd

        from arborsim.products.fidelity.tables import row_record, rows_of

        return pd.DataFrame([row_record(row) for row in rows_of(self.raw)])

    def to_json(self) -> str:
        from arborsim.products.fidelity.tables import fidelity_json

        return fidelity_json(self.raw)

    def describe(self) -> Report:
        from arborsim.products.fidelity.report import report_of

        return report_of(self.raw)

    @classmethod
    def read(cls, frame: pd.DataFrame, metadata: Mapping[str, Any]) -> FidelityResults:
        """The results in a Parquet file."""
        from arborsim.core.records import convert
        from arborsim.play.backends import LiveFacts
        from arborsim.play.fidelity import FidelityResult
        from arborsim.products.fidelity.tables import FidelityReport, unflat

        check_columns(frame, columns_of(FidelityResult))
        results = tuple(
            convert(FidelityResult, vars(unflat(row))) for row in frame.to_dict("records")
        )
        facts = convert(LiveFacts, metadata["facts"])
        report = FidelityReport(facts, results, metadata["request"], metadata["command"])
        return cls(report, metadata)

    @classmethod
    def read_log(cls, path: Path) -> FidelityResults:
        """The results in a log of ``arborsim fidelity --out``."""
        from arborsim.core.records import convert
        from arborsim.play.backends import LiveFacts
        from arborsim.play.fidelity import FidelityResult
        from arborsim.play.live_log import LiveRecords, request_of

        log = LiveRecords[FidelityResult](path, FidelityResult)
        head = log.read()
        if not head:
            raise UsageError(f"{path}: the log holds no results yet")
        facts = convert(LiveFacts, head.get("facts"), f"{path}: facts")
        request = request_of(head, path)
        return cls(*_made(facts, log.records, request, str(head.get("command", ""))))


def of_run(
    request: FidelityRequest, facts: LiveFacts, results: Iterable[FidelityResult]
) -> tuple[FidelityReport, dict[str, Any]]:
    """The findings of a run, and its metadata."""
    from arborsim.play.live_log import describe

    return _made(facts, results, describe(request), request.command)


def _made(
    facts: LiveFacts, results: Iterable[FidelityResult], request: dict[str, Any], command: str
) -> tuple[FidelityReport, dict[str, Any]]:
    """In the order of documents, then of the request's cells."""
    from arborsim.products.fidelity.tables import FidelityReport, cautions, left_out, rows_of

    order = {(c["policy"], c["budget"]): i for i, c in enumerate(request.get("cells", ()))}
    found = sorted(results, key=lambda r: (r.episode, order.get((r.policy, r.budget), len(order))))
    report = FidelityReport(facts, tuple(found), request, command)
    return report, made_by(
        "fidelity",
        command,
        "numpy",
        "pandas",
        "pyarrow",
        model=facts.model,
        weights_dtype=facts.dtype,
        kv_dtype=facts.dtype,
        gpu=facts.device,
        facts=facts,
        settings={name: str(value) for name, value in request.items() if name != "cells"},
        request=request,
        assumed=[],
        does_not_fit=[],
        left_out=left_out(report),
        notes=cautions(report, rows_of(report)),
    )
