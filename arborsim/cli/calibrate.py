"""`arborsim calibrate`: hyper-parameters measured on a model instead of taken from a paper."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arborsim.cli.calibrate_hardware import hardware
from arborsim.cli.progress import PatientProgress

if TYPE_CHECKING:
    from arborsim.calibrate.backend import ModelChoice
    from arborsim.calibrate.document import Calibration

calibrate = typer.Typer(
    help="Find hyper-parameters of policies, or what a machine can do, by measuring.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
)
calibrate.command(short_help="Measure this machine: a profile for `replay --gpu FILE`.")(hardware)

OutOption = Annotated[Path, typer.Option(help="The calibration to write (TOML).")]
PlotOption = Annotated[
    Path | None, typer.Option(help="The plot to write [default: OUT with .html].")
]
ModelOption = Annotated[str, typer.Option(help="chain, or a folder with weights of that task.")]
TaskOption = Annotated[str, typer.Option(help="chain, for a folder with own weights.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Of the bootstrap.")]
BatchOption = Annotated[int, typer.Option(min=1, help="Sequences at a time.")]
DeviceOption = Annotated[str, typer.Option(help="cpu or cuda.")]


class _Regenerate(StrEnum):
    answer = "answer"
    rest = "rest"


@calibrate.command(short_help="EpiKV's layers and bands of hidden-state change.")
def bands(
    out: OutOption,
    model: ModelOption = "chain",
    task: TaskOption = "",
    traces: Annotated[int, typer.Option(min=2, help="Correct greedy reasonings to use.")] = 24,
    lines: Annotated[int, typer.Option(min=0, help="chain: program lines; 0: 96.")] = 0,
    split: Annotated[str, typer.Option(help="Problems: train or test.")] = "train",
    first: Annotated[int, typer.Option(min=0, help="Number of the first problem.")] = 0,
    window: Annotated[int, typer.Option(min=1, help="Occluded tokens.")] = 32,
    stride: Annotated[int, typer.Option(min=1, help="Tokens between windows.")] = 16,
    regenerate: Annotated[
        _Regenerate,
        typer.Option(help="After a window: the answer alone (the paper), or the rest."),
    ] = _Regenerate.answer,
    batch: BatchOption = 32,
    seed: SeedOption = 0,
    device: DeviceOption = "cpu",
    plot: PlotOption = None,
) -> int:
    """EpiKV's layers and bands: where hidden-state change tells important tokens.

    Windows of correct greedy reasonings are occluded; a token is important if the answer changes.
    Sets layers of epikv and hs-variance and bands of band-adaptive.
    """
    from arborsim.calibrate.backend import OcclusionRequest, get_calibrating_backend
    from arborsim.calibrate.bands import FIRST_LAYER, find_bands
    from arborsim.calibrate.documents import bands_calibration
    from arborsim.calibrate.plots import bands_figure
    from arborsim.core.errors import UsageError

    plot = _outputs(out, plot)
    if stride > window:
        raise UsageError(f"--stride {stride} leaves tokens between windows of {window} untested")
    request = OcclusionRequest(
        _choice(model, task, {"lines": lines} if lines else {}, device, batch),
        traces, split, first, window, stride, regenerate.value,
    )  # fmt: skip
    with _interruptible(), Stages() as stages:
        occlusions = get_calibrating_backend().occlude(request, stages)
        try:
            found = find_bands(occlusions.traces, seed)
        except UsageError as error:
            hint = "" if regenerate is _Regenerate.rest else "; try --regenerate rest"
            raise UsageError(f"nothing was written: {error}{hint}") from None
    made = bands_calibration(found, occlusions, request, seed, _command())
    rows = [
        [str(item.layer), _of(item.layer, found.a, found.b), f"{item.mean:+.3f}",
         f"[{item.low:+.3f}, {item.high:+.3f}]", f"{item.pooled:+.3f}"]
        for item in found.layers
    ]  # fmt: skip
    _table(("layer", "", "rho, mean of traces", "95% interval", "rho, pooled"), rows)
    mean, low, high = found.contrast
    notes = [
        f"{found.traces} of {made.traces} traces hold important and other tokens (effective n); "
        f"{found.important:.0%} of {found.tokens} reasoning tokens are important",
        f"z_A - z_B with layers chosen on other traces: rho {mean:+.3f} [{low:+.3f}, {high:+.3f}]",
        f"layers below {FIRST_LAYER} are not chosen; occluded tokens were {occlusions.padding}",
    ]
    _finish(made, out, bands_figure(found, made.finding), plot, notes)
    return 0


@calibrate.command(short_help="ArborKV's theta: what a block is worth.")
def msve(
    traces: Annotated[list[Path], typer.Argument(help="Recorded searches.", show_default=False)],
    out: OutOption,
    model: ModelOption = "chain",
    task: TaskOption = "",
    ridge: Annotated[
        float, typer.Option(min=1e-9, help="Penalty on coefficients of features of unit size.")
    ] = 1.0,
    batch: BatchOption = 32,
    seed: SeedOption = 0,
    device: DeviceOption = "cpu",
    plot: PlotOption = None,
) -> int:
    """ArborKV's theta: what search value, certainty and attention say of a block's worth.

    Every block on the path to a right answer is hidden from what follows, which is generated anew;
    a logistic fit tells from the features which blocks the answer needs.
    """
    from arborsim.calibrate.backend import get_calibrating_backend
    from arborsim.calibrate.blocks import mask_searches
    from arborsim.calibrate.documents import msve_calibration
    from arborsim.calibrate.msve import FEATURES, fit_msve
    from arborsim.calibrate.plots import msve_figure
    from arborsim.core.errors import UsageError

    plot = _outputs(out, plot)
    choice = _choice(model, task, {}, device, batch)
    with _interruptible(), Stages() as stages:
        searches = mask_searches(traces, get_calibrating_backend(), choice, stages)
        try:
            found = fit_msve(searches.blocks, ridge, seed)
        except UsageError as error:
            raise UsageError(f"nothing was written: {error}") from None
    made = msve_calibration(found, searches, ridge, seed, _command())
    rows = [
        [name, f"{theta:+.3f}", f"[{low:+.3f}, {high:+.3f}]", f"{alone:.3f}"]
        for name, theta, low, high, alone in zip(
            FEATURES, found.theta, found.low, found.high, found.auc_alone, strict=True
        )
    ]
    _table(("feature", "theta", "95% interval", "AUC alone"), rows)
    notes = [
        f"{found.blocks} blocks of {found.traces} traces; the answer is lost without "
        f"{found.lost:.0%} of them; {found.unjudged} blocks more lead to no right answer anyway",
        f"AUC on traces the fit has not seen: {found.auc:.3f}",
        f"{searches.right} of {searches.all} searches ended right",
    ]
    _finish(made, out, msve_figure(found, made.finding), plot, notes)
    return 0


@calibrate.command(short_help="ARKV's temperatures and gamma.")
def arkv(
    traces: Annotated[
        list[Path], typer.Argument(help="Traces of --capture qkv.", show_default=False)
    ],
    out: OutOption,
    budget: Annotated[str, typer.Option(help="Budgets to tune for, as of replay.")] = "0.25,0.5",
    trials: Annotated[int, typer.Option(min=1, help="The published values included.")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampler.")] = 0,
    plot: PlotOption = None,
) -> int:
    """ARKV's temperatures and gamma: least error of the attention output in replays.

    Tunes on every second episode, by Optuna, and checks on the others.  Needs no model.
    """
    from arborsim.calibrate.arkv import RANGES, episodes_of, replay_error, tune
    from arborsim.calibrate.documents import arkv_calibration
    from arborsim.calibrate.plots import arkv_figure
    from arborsim.cli.options import names

    plot = _outputs(out, plot)
    own, others = episodes_of(traces, odd=False), episodes_of(traces, odd=True)
    budgets = names(budget)
    with _interruptible(), Stages() as stages:
        held_out = replay_error(others, budgets) if others else None
        found = tune(replay_error(own, budgets), held_out, trials, seed, stages)
    made = arkv_calibration(found, traces, len(own), len(others), budgets, seed, _command())
    rows = [
        [name, f"{found.published[name]:.4g}", f"{found.values[name]:.4g}", f"{low:g} .. {high:g}"]
        for name, (low, high) in RANGES.items()
    ]
    _table(("setting", "published", "found", "searched"), rows)
    notes = [f"{trials} trials on {len(own)} episodes; {len(others)} others held out"]
    _finish(made, out, arkv_figure(found, made.finding), plot, notes)
    return 0


class Stages:
    """A patient bar for each stage of the work (`arborsim.calibrate.backend.OnProgress`)."""

    def __init__(self) -> None:
        self._bar: PatientProgress | None = None
        self._what, self._done = "", 0

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._bar is None or what != self._what:
            self._close()
            self._bar = PatientProgress(total)
            self._what, self._done = what, 0
        self._bar.advance(what, done - self._done)
        self._done = done

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.__exit__(None, None, None)

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()


@contextmanager
def _interruptible() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("arborsim: interrupted; nothing was written", err=True)
        raise typer.Exit(130) from None


def _choice(model: str, task: str, options: dict[str, Any], device: str, batch: int) -> ModelChoice:
    from arborsim.calibrate.backend import ModelChoice

    return ModelChoice(model, task, options, device, batch=batch)


def _outputs(out: Path, plot: Path | None) -> Path:
    """Check both outputs before the work; returns where the plot goes."""
    from arborsim.cli.options import check_output
    from arborsim.core.errors import UsageError

    plot = out.with_suffix(".html") if plot is None else plot
    check_output(out, "--out")
    check_output(plot, "--plot")
    if plot.resolve() == out.resolve():
        raise UsageError(f"--out {out} is where the plot goes: name it .toml")
    return plot


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)


def _finish(made: Calibration, out: Path, figure: Any, plot: Path, notes: Sequence[str]) -> None:
    from arborsim.calibrate.plots import write_figure

    made.write(out)
    write_figure(figure, plot)
    for line in (*notes, made.finding, f"wrote {out} and {plot}"):
        typer.echo(line)


def _of(layer: int, a: int, b: int) -> str:
    return "A" if layer == a else "B" if layer == b else ""


def _command() -> str:
    return shlex.join(["arborsim", *sys.argv[1:]])
