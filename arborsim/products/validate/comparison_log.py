"""The log of a comparison with measured runs, so that an interruption loses one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

from arborsim.core.documents import RecordLog, digest
from arborsim.core.errors import UsageError
from arborsim.core.installed import sources

_FORMAT, _VERSION = "arborsim-published", 1


class Kept(Protocol):
    """Figures of one run, without the run itself and what follows from it."""

    number: int  #: of the run in its file, from 0

    @classmethod
    def of(cls, number: int, played: Any) -> Kept: ...

    def played(self, run: Any) -> Any:
        """The run as it was compared."""


K = TypeVar("K", bound=Kept)


class ComparisonLog(RecordLog[K]):
    """The log of these runs, next to the table `out`; `other` is AIConfigurator's version, or "".

    Raises `UsageError` if an interrupted comparison is there and `resume` was not asked for, or if
    it is of other runs or another arborsim.
    """

    def __init__(
        self, out: Path, kind: type[K], runs: Sequence[Any], other: str, *, resume: bool
    ) -> None:
        super().__init__(out.with_name(f"{out.name}.partial.jsonl"), kind, _FORMAT, _VERSION)
        self._kind, self._runs = kind, runs
        made_of = [[asdict(run) for run in runs], other, sources("arborsim")]
        head = {"comparison": digest(made_of)}
        if self.path.exists():
            if not resume:
                raise UsageError(
                    f"{self.path} holds an interrupted comparison: go on with it by --resume, or "
                    "delete it"
                )
            before = self.read()
            if before and before.get("comparison") != head["comparison"]:
                raise UsageError(
                    f"--resume: {self.path} is of other runs, or another arborsim or "
                    "AIConfigurator: delete it"
                )
            if [each.number for each in self.records] != list(range(len(self.records))):
                raise UsageError(f"--resume: {self.path} is damaged (runs are missing): delete it")
        self.open(head)

    def keep(self, number: int, played: Any) -> None:
        """Write one run as it was compared."""
        self.add(self._kind.of(number, played))

    @property
    def played(self) -> list[Any]:
        """The first runs, as far as they are done."""
        return [each.played(run) for each, run in zip(self.records, self._runs, strict=False)]
