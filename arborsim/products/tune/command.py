"""`arborsim tune`: settings of a policy that no others beat in memory, time and quality."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

from arborsim.core.errors import UsageError
from arborsim.products import options
from arborsim.products.command import command, option
from arborsim.products.interrupt import interrupted


@dataclass(frozen=True)
class TuneOutput(options.OutputOptions):
    """What to write."""

    out: Path | None = options.output_option(
        None, "Write all trials: .parquet, .csv or .json.", writes=True
    )
    front: Path | None = options.output_option(
        None, "Folder to write a policy file (or calibration) into for each of the front."
    )
    report: Path | None = options.output_option(
        None, "Write the page of a replay of the front on the held-out episodes.", writes=True
    )

    json: bool = options.json_option()

    @property
    def files(self) -> dict[str, Path]:
        return {option: path for option, path in super().files.items() if option != "--front"}

    def check(self) -> None:
        from arborsim.core.tables import check_format

        if self.out is not None:
            check_format(self.out)
        if self.front is not None and self.front.exists() and not self.front.is_dir():
            raise UsageError(f"--front {self.front} is a file: name a folder")
        super().check()


@command
def tune(
    traces: list[Path] = options.traces_argument(),
    policy: str = option(
        ..., "The policy: a name or the file of a composition.", complete="policy"
    ),
    vary: list[str] = option(
        [],
        "A setting to vary: NAME=LOW:HIGH, NAME=a,b,c, or NAME where its range is known; "
        "repeatable.",
        shown="all that are shares in [0, 1]",
    ),
    budget: str = option("0.2:0.8", "Budgets to try: a range of shares, or shares by comma."),
    set_: list[str] = option([], "name=value that stays as given; repeatable.", "--set"),
    trials: int = option(40, "Trials that the study is to have, earlier ones included.", min=1),
    memory: str = option("peak", "What memory is: peak (mean over searches) or byte-seconds."),
    quality: str = option("kept", "What quality is: kept (attention) or error (of its output)."),
    seed: int = option(0, "Of what is tried.", min=0),
    worker: int = option(
        0, "Number of this process among those that share the study at the same time.", min=0
    ),
    storage: str = option(
        "sqlite:///tune.sqlite", "Database that keeps the study: a URL, as SQLAlchemy takes it."
    ),
    study: str = option("", "Name of the study.", shown="made from what is asked"),
    machine: options.MachineOptions = options.MachineOptions(),
    output: TuneOutput = TuneOutput(),
) -> None:
    """Tune a policy's settings and budget for memory, time and quality at once.

    Trials replay the even episodes of the traces. The front, settings that no others beat, is
    replayed on the odd ones, which no trial has seen. The same command goes on with the study.
    """
    from arborsim.products.tune.ask import tune as run

    output.check()
    try:
        found = run(
            traces, policy=policy, vary=vary, budget=budget, settings=set_, trials=trials,
            memory=memory, quality=quality, seed=seed, worker=worker, storage=storage, study=study,
            **machine.fields(), progress=True,
        )  # fmt: skip
    except KeyboardInterrupt:
        said = "; trials that had ended are in the study, and the same command goes on"
        raise typer.Exit(interrupted(said)) from None
    if output.out is not None:
        found.save(output.out)
    files = found.front(output.front) if output.front is not None else []
    if output.report is not None:
        found.report(output.report)
    if output.json:
        typer.echo(found.to_json())
        return
    found.print()
    for path in (*filter(None, (output.out, output.report)), *files):
        typer.echo(f"wrote {path}")
