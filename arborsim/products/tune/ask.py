"""`arborsim.tune`: settings of a policy, tuned for memory, time and quality at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborsim.core.errors import UsageError
from arborsim.core.outputs import output_path
from arborsim.core.settings import MOST_INT
from arborsim.core.tables import made_by
from arborsim.products import choices
from arborsim.products.equivalent import equivalent
from arborsim.products.results import Results, not_in_file

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    import pandas as pd
    from rich.console import Console

    from arborsim.products.choices import Files, Settings
    from arborsim.products.tune.run import Tuned
    from arborsim.report.table import Table


def tune(
    traces: Files,
    *,
    policy: str,
    vary: str | Sequence[str] = (),
    budget: str = "0.2:0.8",
    settings: Settings = (),
    trials: int = 40,
    memory: str = "peak",
    quality: str = "kept",
    seed: int = 0,
    worker: int = 0,
    storage: str = "",
    study: str = "",
    gpu: str = "h100",
    host: str = "",
    engine: str = "vllm",
    model: str = "",
    kv_dtype: str = "",
    weights: str = "",
    recall: str = "stage",
    page_size: int = 1,
    tree_attention: bool = True,
    progress: bool = False,
) -> TuneResults:
    """Find settings of a policy that no others beat in memory, time and quality.

    Every trial replays the even episodes of the traces; the front is replayed again on the odd
    ones.

    Parameters
    ----------
    traces : path or sequence of paths
        Trace files.
    policy : str
        A name, ``"package.module:Class"``, or the file of a composition (``"mine.toml"``).
    vary : str or sequence of str
        Settings to vary: ``"place.ddr=0:4"``, ``"sinks=0,4,16"``, or a name alone where the policy
        knows the range.  "" for all that are shares in [0, 1].
    budget : str
        Shares of what full retention holds to try: ``"0.2:0.8"``, or ``"0.25,0.5"``.
    settings : mapping or sequence of str
        Settings that stay as given.
    trials : int
        Trials that the study is to have, those of earlier runs and of other workers included.
    memory : {"peak", "byte-seconds"}
        What memory is: the mean of the searches' peaks in HBM, or HBM bytes times seconds.
    quality : {"kept", "error"}
        What quality is: the attention kept, or the error of the attention output (traces with
        vectors).
    seed, worker : int
        Of what is tried.  With one worker the same seed gives the same trials.  Workers that share
        a study have different numbers.
    storage : str
        URL of the database that keeps the study, as SQLAlchemy takes it
        (``"sqlite:///study.sqlite"``); "" keeps nothing.
    study : str
        Name of the study; "" for one that follows from what is asked.
    gpu, host, engine, model, kv_dtype, weights, recall, page_size, tree_attention
        As in `arborsim.replay`.
    progress : bool
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
    from arborsim.products.provenance import machine_facts, machine_settings
    from arborsim.products.tune.run import Question, budget_range, space_of
    from arborsim.products.tune.run import tune as run
    from arborsim.report.progress import Stages
    from arborsim.trace.reader import open_trace

    command = equivalent("tune", tune, locals())
    paths = choices.files(traces)
    choices.at_least(0, MOST_INT, seed=seed)
    choices.at_least(0, worker=worker)
    choices.at_least(1, trials=trials)
    if len(choices.names(policy)) != 1:
        raise UsageError(f"--policy {policy}: one policy is tuned at a time")
    given = choices.policy_settings([policy], choices.setting_texts(settings))[policy]
    simulated = choices.machine(
        paths, gpu=gpu, host=host, engine=engine, model=model, kv_dtype=kv_dtype, weights=weights,
        recall=recall, page_size=page_size, tree_attention=tree_attention,
    )  # fmt: skip
    varied = [str(each) for each in choices.listed(vary) if str(each)]
    question = Question(
        tuple(paths), policy, space_of(policy, varied, given), budget_range(str(budget)),
        simulated, given, memory, quality, seed,
    )  # fmt: skip
    asked = {"storage": storage, "study": study, "worker": worker}
    if progress:
        with Stages() as stages:
            found = run(question, trials, **asked, advance=stages)  # type: ignore[arg-type]
    else:
        found = run(question, trials, **asked)  # type: ignore[arg-type]
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


class TuneResults(Results):
    """Trials of settings, and the front of those that no other beats.

    Attributes
    ----------
    raw : Tuned
        The records that tables and pages are made of.  They may change between versions.
    """

    kind = "tune"
    raw: Tuned

    def __init__(self, raw: Tuned, metadata: Mapping[str, Any]) -> None:
        super().__init__(metadata)
        self.raw = raw

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
        """Write a file for each setting of the front; the files, from the least memory on.

        A composition becomes one that `arborsim.replay` takes as a policy; settings of another
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
        from arborsim.products.replay.report import write_report

        if self.raw.question is None:
            raise not_in_file("the page shows memory over time", self._again)
        if self.raw.held_out is None:
            raise UsageError("no trace has a second episode, so nothing was held out to report on")
        path = output_path(path)
        write_report(self.raw.held_out, path)
        return path

    def print(self, console: Console | None = None) -> None:
        from arborsim.products.tune.tables import print_front

        print_front(self.raw, console)

    def _tables(self) -> Iterable[tuple[str, Table[Any]]]:
        from arborsim.products.tune.tables import front_table

        return [("", front_table(self.raw))]

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
