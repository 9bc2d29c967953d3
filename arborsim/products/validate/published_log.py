"""The log of `arborsim validate published`, so that an interruption loses one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from arborsim.core.documents import RecordLog, digest
from arborsim.core.errors import UsageError
from arborsim.core.installed import sources
from arborsim.products.validate.aiconfigurator import NotPredicted, Prediction
from arborsim.products.validate.published import PlayedRun, Simulated, oddness
from arborsim.products.validate.serving import ServingRun

_FORMAT, _VERSION = "arborsim-published", 1


@dataclass(frozen=True)
class Kept:
    """Figures of one run, without the run itself and what follows from it."""

    number: int  #: of the run in its file, from 0
    simulated: Simulated | None
    reason: str
    predicted: tuple[float, ...]  #: AIConfigurator's figures; none if it gave none
    refused: str | None  #: why it gave none; None if it did, or was not asked

    @classmethod
    def of(cls, number: int, played: PlayedRun) -> Kept:
        other = played.other
        predicted = tuple(other) if isinstance(other, Prediction) else ()
        refused = other.reason if isinstance(other, NotPredicted) else None
        return cls(number, played.simulated, played.reason, predicted, refused)

    def played(self, run: ServingRun) -> PlayedRun:
        """The run as it was compared."""
        other = Prediction(*self.predicted) if self.predicted else None
        refused = None if self.refused is None else NotPredicted(self.refused)
        return PlayedRun(run, self.simulated, self.reason, oddness(run), other or refused)


class PublishedLog(RecordLog[Kept]):
    """The log of these runs, next to the table `out`; `other` is AIConfigurator's version, or "".

    Raises `UsageError` if an interrupted comparison is there and `resume` was not asked for, or if
    it is of other runs or another arborsim.
    """

    def __init__(self, out: Path, runs: Sequence[ServingRun], other: str, *, resume: bool) -> None:
        super().__init__(out.with_name(f"{out.name}.partial.jsonl"), Kept, _FORMAT, _VERSION)
        self._runs = runs
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

    @property
    def played(self) -> list[PlayedRun]:
        """The first runs, as far as they are done."""
        return [each.played(run) for each, run in zip(self.records, self._runs, strict=False)]
