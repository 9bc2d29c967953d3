"""`arborsim calibrate hardware`: a machine's profile, measured and not from a datasheet."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from arborsim.calibrate.hardware_fit import Agreement
    from arborsim.machine.profile import HardwareProfile

#: What the table shows: a number's name, how it is scaled, and its unit.
_SHOWN = (
    ("flops_per_s", 1e-12, "TFLOP/s"), ("mfu", 100, "%"), ("hbm_bytes_per_s", 1e-9, "GB/s"),
    ("mbu", 100, "%"), ("kv_read_efficiency", 100, "%"), ("overlap", 100, "%"),
    ("ddr_bytes_per_s", 1e-9, "GB/s"), ("eager_bytes_per_s", 1e-9, "GB/s"),
    ("dequantise_bytes_per_s", 1e-9, "GB/s"),
    ("h2d_bytes_per_s", 1e-9, "GB/s"), ("d2h_bytes_per_s", 1e-9, "GB/s"),
    ("pcie_latency_s", 1e6, "us"), ("pageable_factor", 100, "%"), ("per_layer_s", 1e6, "us"),
    ("per_step_s", 1e6, "us"), ("per_sequence_s", 1e6, "us"), ("decision_base_s", 1e6, "us"),
    ("decision_per_token_s", 1e9, "ns"),
)  # fmt: skip


def hardware(
    out: Annotated[Path, typer.Option(help="The profile to write (TOML).")] = Path("machine.toml"),
    model: Annotated[
        str, typer.Option(help="chain, a folder, or config:NAME (random weights).")
    ] = "chain",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")] = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and repetitions.")] = False,
    policy: Annotated[
        str,
        typer.Option(help="Policies to time, by commas; left out: as many as 150 seconds allow."),
    ] = "",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
) -> int:
    """A profile of this machine for `replay --gpu FILE`: copies, kernels, overheads, decisions.

    Overheads are fitted to forward passes of the model; the error on others is told.
    """
    from datetime import UTC, datetime

    from arborsim.calibrate.decision_cost import measure_decisions
    from arborsim.calibrate.hardware import HardwareRequest, get_measuring_backend
    from arborsim.calibrate.hardware_profile import make_profile, write_profile
    from arborsim.cli.calibrate import Stages, _command, _interruptible, _table

    _check(out, overwrite)
    request = HardwareRequest(model, device, quick=quick, policies=_policies(policy))
    with _interruptible():
        with Stages() as stages:
            measured = get_measuring_backend().measure_hardware(request, stages)
            decisions = measure_decisions(quick, stages)
        threads = os.environ.get("OMP_NUM_THREADS")
        command = f"OMP_NUM_THREADS={threads} {_command()}" if threads else _command()
        date = datetime.now(UTC).date().isoformat()
        made = make_profile(out.stem, measured, decisions, date, command)
        write_profile(made.profile, out)
    _table(("number", "value", "unit"), _rows(made.profile))
    _table(("predictions", "passes", "R2", "median error", "largest"), _errors(made.agreements))
    for line in (*measured.notes, *_doubts(made.agreements), f"wrote {out}"):
        typer.echo(line)
    return 0


def _check(out: Path, overwrite: bool) -> None:
    """Refuse what cannot be written before minutes of work."""
    from arborsim.cli.options import check_output
    from arborsim.core.errors import UsageError

    check_output(out, "--out")
    if out.suffix != ".toml":
        raise UsageError(f"--out {out}: name it .toml, which is how --gpu tells a file from a name")
    if out.exists() and not overwrite:
        raise UsageError(f"{out} exists: choose another --out, or --overwrite")
    if not os.access(out.parent, os.W_OK):
        raise UsageError(f"--out: the directory {out.parent} cannot be written to")


def _policies(names: str) -> tuple[str, ...]:
    """Registered names; full retention is timed with any of them."""
    from arborsim.core.errors import UnknownName
    from arborsim.policies.registry import available

    chosen = tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    for name in chosen:
        if name not in available():
            raise UnknownName("policy", name, available())
    return tuple(name for name in chosen if name != "full")


def _rows(profile: HardwareProfile) -> list[list[str]]:
    return [[name, f"{getattr(profile, name) * scale:.3g}", unit] for name, scale, unit in _SHOWN]


def _errors(agreements: Mapping[str, Agreement]) -> list[list[str]]:
    return [
        [name, str(each.passes), f"{each.r2:.3f}", f"{each.median:.1%}", f"{each.largest:.1%}"]
        for name, each in agreements.items()
    ]


def _doubts(agreements: Mapping[str, Agreement]) -> list[str]:
    from arborsim.calibrate.hardware_profile import GOOD_ERROR

    return [
        f"{name}: the median error is above {GOOD_ERROR:.0%}; measure again on an idle machine, "
        "or without --quick"
        for name, each in agreements.items()
        if name.endswith("held out") and each.median > GOOD_ERROR
    ]
