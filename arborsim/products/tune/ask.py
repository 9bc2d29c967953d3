"""`arborsim.tune`: settings of a policy, tuned for memory, time and quality at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from arborsim.core.errors import UsageError
from arborsim.core.outputs import output_path
from arborsim.products import choices
from arborsim.products.choices import Files, Settings, Traces
from arborsim.products.declare import (
    Count,
    InPython,
    Option,
    Positive,
    Seed,
    call,
    equivalent,
    listed,
    setting_texts,
)
from arborsim.products.options import MachineOptions
from arborsim.products.results import Results, not_in_file

if TYPE_CHECKING:
    import os

    import pandas as pd

    from arborsim.products.tune.run import Tuned
    from arborsim.report.report import Report

_STUDY = "sqlite:///tune.sqlite"  # where the command keeps the study


@dataclass(frozen=True)
class TuneOptions(MachineOptions):
    """Tune a policy's settings and budget for memory, time and quality at once.

    Trials replay the even episodes of the traces. The front, settings that no others beat, is
    replayed on the odd ones, which no trial has seen. The same command goes on with the study.

    Parameters
    ----------
    traces
        Trace files.
    policy
        The policy: a name, package.module:Class, or the file of a composition.
    vary
        A setting to vary: NAME=LOW:HIGH, NAME=a,b,c, or NAME where its range is known. Repeatable.
    budget
        Budgets to try: a range of shares of full retention's, or shares by comma.
    settings
        name=value that stays as given. Repeatable.
    trials
        Trials that the study is to have, those of earlier runs and other workers included.
    memory
        The memory that counts: peak (mean of the searches' peaks in HBM) or byte-seconds.
    quality
        The quality that counts: fidelity (KL to full retention, of --fidelity), kept (attention) or
        error (of its output, in traces with vectors).
    fidelity
        Results of arborsim fidelity, of the settings and budgets to choose from. Repeatable.
    seed
        Seed of what is tried: with one worker the same seed gives the same trials.
    worker
        Number of this process among those that share the study at the same time.
    storage
        Database that keeps the study: a URL, as SQLAlchemy takes it.

        In Python "" keeps nothing, which is the default.
    study
        Name of the study.
    progress
        Show a bar on standard error once it takes longer than two seconds.

    Returns
    -------
    TuneResults

    Raises
    ------
    ArborsimError
        A name, range, file or combination of arguments that cannot work, Optuna is not installed,
        the study in the storage is another one, or none of the settings can run.

    Examples
    --------
    >>> import arborsim
    >>> found = arborsim.tune("traces/chain-tree.parquet", policy="staircase", trials=30)
    ... # doctest: +SKIP
    >>> found.summary()  # doctest: +SKIP
    """

    traces: Traces
    _: KW_ONLY
    policy: Annotated[str, Option(complete="policy")]
    vary: Annotated[str | Sequence[str], Option(shown="all that are shares in [0, 1]")] = ()
    budget: str = "0.2:0.8"
    settings: Settings = ()
    trials: Positive = 40
    memory: str = "peak"
    quality: str = "kept"
    fidelity: Files = ()
    seed: Seed = 0
    worker: Count = 0
    storage: Annotated[str, Option(default=_STUDY, silent=True)] = ""
    study: Annotated[str, Option(shown="made from what is asked", silent=True)] = ""
    progress: InPython = False

    def results(self) -> TuneResults:
        """Run the trials that the study lacks."""
        from arborsim.core.tables import made_by
        from arborsim.products.fidelity.known import known_fidelity
        from arborsim.products.provenance import machine_facts, machine_settings
        from arborsim.products.tune.run import Question, tune
        from arborsim.products.tune.space import budget_range, space_of
        from arborsim.report.progress import Stages
        from arborsim.trace.reader import open_trace

        command = equivalent("tune", self)
        paths = choices.files(self.traces)
        if len(choices.names(self.policy)) != 1:
            raise UsageError(f"--policy {self.policy}: one policy is tuned at a time")
        given = choices.policy_settings([self.policy], setting_texts(self.settings))[self.policy]
        measured = known_fidelity(self.fidelity)
        simulated = self.machine(paths)
        varied = [str(each) for each in listed(self.vary) if str(each)]
        question = Question(
            tuple(paths), self.policy,
            {} if measured.rows and not varied else space_of(self.policy, varied, given),
            budget_range(str(self.budget)), simulated, given, self.memory, self.quality, self.seed,
            measured,
        )  # fmt: skip
        asked = {"storage": self.storage, "study": self.study, "worker": self.worker}
        with Stages() if self.progress else nullcontext(lambda what, done, total: None) as advance:
            found = tune(question, self.trials, advance=advance, **asked)  # type: ignore[arg-type]
        recorded = [open_trace(path).info.geometry for path in paths]
        shown = {"command": command, **machine_settings(simulated, recorded)}
        if found.held_out is not None:
            found = replace(found, held_out=replace(found.held_out, settings=shown))
        metadata = made_by(
            "tune", command, "numpy", "optuna", "pyarrow", "simpy",
            **machine_facts(simulated, recorded), settings=shown,
            question={**question.asked(), "policy": found.policy},
            varied=[[name, kind.text] for name, kind in question.varied.items()],
        )  # fmt: skip
        return TuneResults(found, metadata)


tune = call("tune", TuneOptions)


class TuneResults(Results):
    """Trials of settings, and the front of those that no other beats."""

    kind = "tune"
    raw: Tuned

    def to_pandas(self) -> pd.DataFrame:
        """One row per trial, in the order in which they began.

        Columns: `trial`, `budget`, a column per setting that was varied, `tuned_memory`,
        `tuned_time` (both as shares of full retention's) and `tuned_quality` on the episodes that
        were tuned on, the same as `held_out_...` for the `front`, and the `reason` why settings
        cannot run.
        """
        from arborsim.products.tune.tables import to_frame

        return to_frame(self.raw)

    def summary(self) -> pd.DataFrame:
        """The front: the rows of `to_pandas` that no other beats, from the least memory on."""
        frame = self.to_pandas()
        front = frame[frame["front"]].sort_values(["tuned_memory", "trial"])
        return front.drop(columns=["front", "reason"]).reset_index(drop=True)

    def to_json(self) -> str:
        from arborsim.core.documents import to_json

        rows = self.to_pandas().to_dict("records")
        return to_json({"metadata": self.metadata, "trials": rows})

    def front(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write a file for each setting of the front. Returns them, least memory first.

        A composition becomes one that `arborsim.replay` takes as a policy. Settings of another
        policy become a calibration.

        Raises
        ------
        UsageError
            A file cannot be written, or the results come from a file.
        """
        from arborsim.products.tune.run import write_front

        if self.raw.question is None:
            raise not_in_file("files need the policy that was tuned", self._again)
        return write_front(self.raw, Path(folder), self.metadata["command"])

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write the page of a replay: the front on the held-out episodes, with full retention.

        Raises
        ------
        UsageError
            The page cannot be written, nothing was held out, or the results come from a file.
        """
        from arborsim.products.replay.report import report_of
        from arborsim.report.report import write

        if self.raw.question is None:
            raise not_in_file("the page shows memory over time", self._again)
        if self.raw.held_out is None:
            raise UsageError("no trace has a second episode, so nothing was held out to report on")
        path = output_path(path)
        write(report_of(self.raw.held_out), path)
        return path

    def describe(self) -> Report:
        from arborsim.products.tune.tables import report_of

        return report_of(self.raw)

    @property
    def _again(self) -> str:
        return f"the same command goes on from its study: {self.metadata['command']}"

    @classmethod
    def read(cls, frame: pd.DataFrame, metadata: Mapping[str, Any]) -> TuneResults:
        """The trials in a file."""
        from arborsim.products.tune.tables import from_frame

        asked = metadata["question"]
        policy, memory, quality = (str(asked[key]) for key in ("policy", "memory", "quality"))
        varied = [name for name, _ in metadata["varied"] if name != "budget"]
        return cls(from_frame(frame, policy, memory, quality, varied), metadata)
