"""`arborsim calibrate`: measure hyper-parameters of policies, or a machine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.outputs import check_writable
from arborsim.products.choices import names
from arborsim.products.declare import AnyPath, Count, Option, Options, Positive, Seed, Written
from arborsim.products.options import Expert, TraceFiles, check_profile, command_line, interruptible
from arborsim.products.record.problems import problem_choice
from arborsim.report.progress import Stages

if TYPE_CHECKING:
    from arborsim.products.calibrate.backend import ModelChoice
    from arborsim.products.calibrate.documents import Calibration
    from arborsim.products.calibrate.hardware import PassAgreement

#: What the table of a machine shows: a number's name, how it is scaled, and its unit.
_SHOWN = (
    ("flops_per_s", 1e-12, "TFLOP/s"), ("mfu", 100, "%"), ("hbm_bytes_per_s", 1e-9, "GB/s"),
    ("mbu", 100, "%"), ("kv_read_efficiency", 100, "%"), ("overlap", 100, "%"),
    ("ddr_bytes_per_s", 1e-9, "GB/s"), ("eager_bytes_per_s", 1e-9, "GB/s"),
    ("dequantise_bytes_per_s", 1e-9, "GB/s"),
    ("h2d_bytes_per_s", 1e-9, "GB/s"), ("d2h_bytes_per_s", 1e-9, "GB/s"),
    ("pcie_latency_s", 1e6, "us"), ("pageable_factor", 100, "%"), ("per_layer_s", 1e6, "us"),
    ("per_step_s", 1e6, "us"), ("per_sequence_s", 1e6, "us"), ("decision_base_s", 1e6, "us"),
    ("decision_per_token_s", 1e9, "ns"), ("launch_s", 1e6, "us"), ("move_s", 1e6, "us"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options):
    """The model that is measured.

    Parameters
    ----------
    model
        chain, a folder with weights of that task, or with --prompts a language model.
    prompts
        Judged problems in words: a file, hf:NAME or made:NAME, as of record.
    judge
        Prompts: what judges, as of record.
    field
        Prompts: prompt=NAME or answer=NAME. Repeatable.
    recipe
        Prompts: gsm8k, math500, aime, choice or needle.
    task
        chain, for a folder with own weights.
    device
        cpu or cuda.
    batch
        Sequences at a time.
    """

    model: str = "chain"
    prompts: AnyPath | None = None
    judge: str = ""
    field: Annotated[Mapping[str, Any] | Sequence[str], Option("field")] = ()
    recipe: str = ""
    task: str = ""
    device: str = "cpu"
    batch: Positive = 32

    def choice(self, **options: int) -> ModelChoice:
        """The model, with those of its task's options that were given."""
        from arborsim.products.calibrate.backend import ModelChoice

        given = {name: value for name, value in options.items() if value}
        return ModelChoice(
            self.model, self.task, given, self.device, self.batch, problem_choice(self)
        )


@dataclass(frozen=True, kw_only=True)
class CalibrationOutput(Options):
    """The calibration and its plot.

    Parameters
    ----------
    out
        The calibration to write (TOML).
    plot
        The plot to write.
    """

    out: Written
    plot: Annotated[Written | None, Option(shown="OUT with .html")] = None

    @property
    def page(self) -> Path:
        """Where the plot goes."""
        return self.out.with_suffix(".html") if self.plot is None else self.plot

    def check(self) -> None:
        """Refuse, before the work, what cannot be written."""
        check_writable(self.out, "--out")
        check_writable(self.page, "--plot")
        if self.page == self.out:
            raise UsageError(f"--out {self.out} is where the plot goes: name it .toml")

    def write(self, made: Calibration, figure: Any, notes: Iterable[str]) -> None:
        """Write both files and print what was found."""
        from arborsim.core.outputs import write_text
        from arborsim.products.calibrate.documents import write_figure

        write_text(self.out, made.to_toml())
        write_figure(figure, self.page)
        for line in (*notes, made.finding, f"wrote {self.out} and {self.page}"):
            print(line)


def hardware(
    *,
    out: Written = Path("machine.toml"),
    model: str = "chain",
    device: str = "cpu",
    quick: bool = False,
    policy: Annotated[str, Option(complete="policy", shown="as many as 150 seconds allow")] = "",
    overwrite: bool = False,
) -> None:
    """Measure this machine: a profile for `replay --gpu FILE`.

    It has copies, kernels, overheads and decisions. Overheads are fitted to forward passes of the
    model. The error on others is reported.

    Parameters
    ----------
    out
        The profile to write (TOML).
    model
        chain, a folder, or config:NAME (random weights).
    device
        cpu, cuda or cuda:1.
    quick
        Fewer sizes and repetitions.
    policy
        Policies to time, by comma.
    overwrite
        Replace the file.
    """
    from datetime import UTC, datetime

    from arborsim.core.outputs import write_text
    from arborsim.policies.registry import available
    from arborsim.products.calibrate.backend import HardwareRequest, get_measuring_backend
    from arborsim.products.calibrate.hardware import make_profile, profile_toml
    from arborsim.products.calibrate.policy_cost import measure_decisions

    check_profile(out, overwrite)
    chosen = names(policy)
    for name in chosen:
        if name not in available():
            raise UnknownName("policy", name, available())
    timed = tuple(name for name in chosen if name != "full")  # which is timed with any of them
    request = HardwareRequest(model, device, quick=quick, policies=timed)
    with interruptible():
        with Stages() as stages:
            measured = get_measuring_backend().measure_hardware(request, stages)
            decisions = measure_decisions(quick, stages)
        threads = os.environ.get("OMP_NUM_THREADS")
        ran = f"OMP_NUM_THREADS={threads} {command_line()}" if threads else command_line()
        date = datetime.now(UTC).date().isoformat()
        profile, agreements = make_profile(out.stem, measured, decisions, date, ran)
        write_text(out, profile_toml(profile))
    rows = [(name, f"{getattr(profile, name) * scale:.3g}", unit) for name, scale, unit in _SHOWN]
    _table(("number", "value", "unit"), rows)
    for line in (*measured.notes, *_show_agreements(agreements), f"wrote {out}"):
        print(line)


def bands(
    output: CalibrationOutput,
    model: ModelOptions,
    *,
    traces: Annotated[int, Option(least=2)] = 24,
    lines: Annotated[Count, Option(shown="96")] = 0,
    split: str = "train",
    first: Count = 0,
    window: Annotated[Positive, Expert] = 32,
    stride: Annotated[Positive, Expert] = 16,
    regenerate: Annotated[Literal["answer", "rest"], Expert] = "answer",
    seed: Seed = 0,
) -> None:
    """EpiKV's layers and bands of hidden-state change.

    Windows of correct greedy reasonings are occluded. A token is important if the answer changes.
    Sets layers of epikv and hs-variance and bands of band-adaptive.

    Parameters
    ----------
    traces
        Correct greedy reasonings to use.
    lines
        chain: program lines.
    split
        Problems: train or test.
    first
        Number of the first problem.
    window
        Occluded tokens.
    stride
        Tokens between windows.
    regenerate
        After a window: the answer alone (the paper), or the rest.
    seed
        Seed of what is drawn.
    """
    from arborsim.products.calibrate.backend import OcclusionRequest, get_calibrating_backend
    from arborsim.products.calibrate.bands import bands_calibration, bands_figure, find_bands

    output.check()
    if stride > window:
        raise UsageError(f"--stride {stride} leaves tokens between windows of {window} untested")
    choice = model.choice(lines=lines)
    request = OcclusionRequest(choice, traces, split, first, window, stride, regenerate)
    with interruptible(), Stages() as stages:
        occlusions = get_calibrating_backend().occlude(request, stages)
        try:
            found = find_bands(occlusions.traces, seed)
        except UsageError as error:
            hint = "" if regenerate == "rest" else "; try --regenerate rest"
            raise UsageError(f"nothing was written: {error}{hint}") from None
    made = bands_calibration(found, occlusions, request, seed, command_line())
    notes = _show_bands(found, made.traces, occlusions.padding)
    output.write(made, bands_figure(found, made.finding), notes)


def msve(
    output: CalibrationOutput,
    traces: TraceFiles,
    model: ModelOptions,
    *,
    ridge: Annotated[float, Expert, Option(least=1e-09)] = 1.0,
    seed: Seed = 0,
) -> None:
    """ArborKV's theta: what a block is worth.

    Theta weighs search value, certainty and attention. Every block on the path to a right answer is
    hidden from what follows, which is generated anew. A logistic fit tells from the features which
    blocks the answer needs.

    Parameters
    ----------
    traces
        Trace files.
    ridge
        Penalty on coefficients of features of unit size.
    seed
        Seed of what is drawn.
    """
    from arborsim.products.calibrate import msve as fitting
    from arborsim.products.calibrate.backend import get_calibrating_backend

    output.check()
    with interruptible(), Stages() as stages:
        searches = fitting.mask_searches(traces, get_calibrating_backend(), model.choice(), stages)
        try:
            found = fitting.fit_msve(searches.blocks, ridge, seed)
        except UsageError as error:
            raise UsageError(f"nothing was written: {error}") from None
    made = fitting.msve_calibration(found, searches, ridge, seed, command_line())
    rows = [
        (name, f"{theta:+.3f}", f"[{low:+.3f}, {high:+.3f}]", f"{alone:.3f}")
        for name, theta, low, high, alone in zip(
            fitting.FEATURES, found.theta, found.low, found.high, found.auc_alone, strict=True
        )
    ]
    _table(("feature", "theta", "95% interval", "AUC alone"), rows)
    notes = [
        f"{found.blocks} blocks of {found.traces} traces; the answer is lost without "
        f"{found.lost:.0%} of them; {found.unjudged} blocks more lead to no right answer anyway",
        f"AUC on traces the fit has not seen: {found.auc:.3f}",
        f"{searches.right} of {sum(each.num_episodes for each in searches.readers)} searches "
        "ended right",
    ]
    output.write(made, fitting.msve_figure(found, made.finding), notes)


def arkv(
    output: CalibrationOutput,
    traces: TraceFiles,
    *,
    budget: str = "0.25,0.5",
    trials: Positive = 40,
    seed: Seed = 0,
) -> None:
    """ARKV's temperatures and gamma.

    They are those of the least error of the attention output in replays. Tunes on every second
    episode of traces of --capture qkv, by Optuna, and checks on the others. Needs no model.

    Parameters
    ----------
    traces
        Trace files.
    budget
        Budgets to tune for, as of replay.
    trials
        The published values included.
    seed
        Seed of what is drawn.
    """
    from arborsim.products.calibrate import arkv as tuning

    output.check()
    own, others = tuning.episodes_of(traces, odd=False), tuning.episodes_of(traces, odd=True)
    budgets = names(budget)
    with interruptible(), Stages() as stages:
        held_out = tuning.replay_error(others, budgets) if others else None
        found = tuning.tune(tuning.replay_error(own, budgets), held_out, trials, seed, stages)
    made = tuning.arkv_calibration(
        found, traces, len(own), len(others), budgets, seed, command_line()
    )
    published = tuning.published()
    rows = [
        (name, f"{published[name]:.4g}", f"{found.values[name]:.4g}", f"{low:g} .. {high:g}")
        for name, (low, high) in tuning.RANGES.items()
    ]
    _table(("setting", "published", "found", "searched"), rows)
    notes = [f"{trials} trials on {len(own)} episodes; {len(others)} others held out"]
    output.write(made, tuning.arkv_figure(found, made.finding), notes)


SUBCOMMANDS = {"hardware": hardware, "bands": bands, "msve": msve, "arkv": arkv}


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from arborsim.report.table import grid, terminal

    terminal().print(grid(rows, heads, right=range(1, len(heads))))


def _show_bands(found: Any, traces: int, padding: str) -> list[str]:
    """The table of layers. Returns what to know about it."""
    from arborsim.products.calibrate.bands import FIRST_LAYER

    rows = [
        (str(layer), {found.b: "B", found.a: "A"}.get(layer, ""),
         *found.shown(layer).split(" ", 1), f"{pooled:+.3f}")
        for layer, pooled in enumerate(found.pooled)
    ]  # fmt: skip
    _table(("layer", "", "rho, mean of traces", "95% interval", "rho, pooled"), rows)
    mean, low, high = found.contrast
    return [
        f"{found.traces} of {traces} traces hold important and other tokens (effective n); "
        f"{found.important:.0%} of {found.tokens} reasoning tokens are important",
        f"z_A - z_B with layers chosen on other traces: rho {mean:+.3f} [{low:+.3f}, {high:+.3f}]",
        f"layers below {FIRST_LAYER} are not chosen; occluded tokens were {padding}",
    ]


def _show_agreements(agreements: Mapping[str, PassAgreement]) -> list[str]:
    """The table of predictions of passes. Returns which of them are in doubt."""
    from arborsim.products.calibrate.hardware import GOOD_ERROR

    rows = [
        (name, str(each.passes), f"{each.r2:.3f}", f"{each.median:.1%}", f"{each.largest:.1%}")
        for name, each in agreements.items()
    ]
    _table(("predictions", "passes", "R2", "median error", "largest"), rows)
    return [
        f"{name}: the median error is above {GOOD_ERROR:.0%}; measure again on an idle machine, "
        "or without --quick"
        for name, each in agreements.items()
        if name.endswith("held out") and each.median > GOOD_ERROR
    ]
