"""Fidelity that was measured, to stand next to other results of the same policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from arborsim.core.errors import UsageError
from arborsim.core.tables import read_table
from arborsim.play.results import Fidelity, ReplayResult
from arborsim.products.choices import Files
from arborsim.products.declare import listed
from arborsim.products.fidelity.results import FidelityResults
from arborsim.products.fidelity.tables import rows_of
from arborsim.products.replay.answers import NEAR, apart, complete


@dataclass(frozen=True)
class Measured:
    """One policy with all its settings, under one budget."""

    policy: str
    settings: Mapping[str, Any]
    fidelity: Fidelity


@dataclass(frozen=True)
class KnownFidelity:
    """All that files hold. Of equals the first is taken."""

    rows: tuple[Measured, ...] = ()

    def of(self, policy: str, settings: Mapping[str, Any], budget: str) -> Fidelity | None:
        """That of a policy with these settings under a budget, or the nearest one up to `NEAR`."""
        mine = complete(policy, settings)
        near = [
            (apart(row.fidelity.budget, budget), row.fidelity)
            for row in self.rows
            if row.policy == policy and row.settings == mine
        ]
        known = [each for each in near if each[0] <= NEAR]
        return min(known, key=lambda each: each[0])[1] if known else None

    def of_replay(self, result: ReplayResult) -> ReplayResult:
        """A replay with the fidelity of each policy, with its settings, and budget."""
        if not self.rows:
            return result
        equal, found = result.found(), {}
        for row in result.episodes:
            cell = row.trace, row.policy, row.budget
            if cell not in found and row.policy in result.policies:
                budget = equal[cell].found if cell in equal else row.budget
                found[cell] = self.of(row.policy, result.policies[row.policy], budget)
        known = {cell: each for cell, each in found.items() if each is not None}
        return replace(result, fidelity=known)


def known_fidelity(given: Files) -> KnownFidelity:
    """Fidelity in files of ``arborsim fidelity``: its logs, or results that it saved.

    Raises
    ------
    UsageError
        A file holds other results, or files are of several models, which do not compare.
    """
    rows: list[Measured] = []
    for path in map(Path, listed(given)):
        rows += _rows(_read(path))
    if len(models := list(dict.fromkeys(row.fidelity.model for row in rows))) > 1:
        raise UsageError(f"--fidelity: figures of {' and '.join(models)} do not compare: give one")
    return KnownFidelity(tuple(rows))


def _read(path: Path) -> FidelityResults:
    if path.suffix != ".parquet":
        return FidelityResults.read_log(path)
    frame, metadata = read_table(path)
    if metadata["kind"] != FidelityResults.kind:
        raise UsageError(f"--fidelity {path}: these are results of {metadata['kind']}")
    return FidelityResults.read(frame, metadata)


def _rows(results: FidelityResults) -> Sequence[Measured]:
    report = results.raw
    cells = {(cell["policy"], cell["budget"]): cell for cell in report.request["cells"]}
    found = []
    for row in rows_of(report):
        settings = complete(row.policy, cells[row.policy, row.budget]["settings"])
        kl, same, scope = row.kl, row.agreement.value, (row.tokens, row.documents)
        of_row = Fidelity(kl.value, kl.low, kl.high, same, *scope, row.budget, report.facts.model)
        found.append(Measured(row.policy, settings, of_row))
    return found
