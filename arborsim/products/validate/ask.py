"""Results of `arborsim validate`, read from their file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborsim.core import documents
from arborsim.core.outputs import output_path
from arborsim.products.results import Results

if TYPE_CHECKING:
    import pandas as pd

    from arborsim.products.validate.results import Validation
    from arborsim.report.report import Report


class ValidationResults(Results):
    """How far simulated searches are from live ones, in decisions, bytes, seconds and answers."""

    kind = "validate"
    raw: Validation

    def __init__(self, raw: Validation, request: Mapping[str, Any]) -> None:
        from arborsim.products.validate.files import metadata_of

        super().__init__(raw, metadata_of(raw))
        self._request = request

    def to_pandas(self) -> pd.DataFrame:
        """One row per problem, policy and budget: `CellCheck` has its columns."""
        import pandas as pd

        return pd.DataFrame([vars(check) for check in self.raw.checks])

    def summary(self) -> pd.DataFrame:
        """One row per policy and budget, over all problems."""
        import pandas as pd

        from arborsim.products.validate.results import lines_of

        return pd.DataFrame([vars(line) for line in lines_of(self.raw.checks)])

    def to_json(self) -> str:
        from arborsim.products.validate.results import lines_of, rank_agreements, term_errors

        lines = lines_of(self.raw.checks)
        return documents.to_json(
            {
                "about": dict(self.raw.about),
                "left_out": self.raw.left_out,
                "rows": lines,
                "errors": term_errors(lines),
                "ranks": rank_agreements(self.raw.checks),
            }
        )

    def describe(self) -> Report:
        from arborsim.products.validate.report import report_of

        return report_of(self.raw)

    def save(self, path: str | os.PathLike[str]) -> Path:
        from arborsim.products.validate.files import write_results

        path = output_path(path)
        if path.suffix != ".parquet":
            return super().save(path)
        write_results(self.raw, self._request, path)
        return path

    @classmethod
    def read_file(cls, path: Path) -> ValidationResults:
        """The results in ``results.parquet`` of a validation."""
        from arborsim.products.validate.files import read_results

        return cls(*read_results(path))
