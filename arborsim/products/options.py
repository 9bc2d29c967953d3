"""Options that several commands share, in groups that become parts of a request."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import typer

from arborsim.core.errors import UsageError
from arborsim.core.outputs import check_writable
from arborsim.products.command import argument, option, panel

machine_option, run_option, output_option = panel("Machine"), panel("Run"), panel("Output")
expert_option = panel("Expert")  # what is hardly ever needed; help shows it last


def traces_argument() -> Any:
    return argument(..., "Trace files.", complete="trace")


def json_option() -> Any:
    return output_option(False, "Print JSON instead of tables.", "--json")


def calibration_option() -> Any:
    about = (
        "Settings of policies from a calibration, a file or name, where --set or a workload gives "
        "none; repeatable."
    )
    return option([], about, complete="calibration")


@dataclass(frozen=True)
class PolicyOptions:
    """Policies with their settings, and the budgets that they run under."""

    policy: list[str] = option(
        ["full"], "Policies by comma, or 'all'; repeatable.", complete="policy"
    )
    budget: list[str] = option(
        ["0.5"], "Tokens (2048) or share of what full retention holds (0.25), by comma; repeatable."
    )
    set_: list[str] = option(
        [], "name=value, or NAME.name=value for one policy or search; repeatable.", "--set"
    )

    def fields(self) -> dict[str, Any]:
        """As arguments of the functions that `arborsim` exports."""
        return {"policies": self.policy, "budgets": self.budget, "settings": self.set_}


@dataclass(frozen=True)
class MachineOptions:
    """The machine and model that are charged for."""

    gpu: str = machine_option("h100", "GPU profile: a name or a TOML file.", complete="gpu")
    host: str = machine_option("", "Host to put the GPU into: a name or file.", complete="host")
    engine: str = machine_option(
        "vllm",
        "What serves on it: vllm, sglang, trtllm, transformers, live, live-graphs or a file.",
        complete="engine",
    )
    model: str = machine_option(
        "",
        "Model to charge bytes and seconds for: a name or config.json.",
        complete="model",
        shown="recorded",
    )
    kv_dtype: str = machine_option("", "Type of its cache: fp8, bf16, ...", shown="the model's")
    weights: str = machine_option("", "Type of its weights: fp8, int4, ...", shown="the model's")
    recall: str = machine_option(
        "stage", "How DDR tokens are read: stage, stream, near or ondemand."
    )
    page_size: int = machine_option(1, "Tokens per KV page.", min=1)
    tree_attention: bool = machine_option(
        True, "Read ancestors that branches share once per batch."
    )

    def fields(self) -> dict[str, Any]:
        """As arguments of the functions that `arborsim` exports."""
        return dict(vars(self))


@dataclass(frozen=True)
class JobOptions:
    """Which recorded searches are replayed, and by how many processes."""

    quality: bool = option(True, "Measure attention kept, where it was recorded (a large column).")
    first: int = run_option(0, "Number of the first episode.", min=0)
    episodes: int = run_option(0, "Episodes per trace.", shown="all", min=0)
    jobs: int = run_option(1, "Processes that share the episodes; same results.", min=1)
    strict: bool = run_option(
        False, "Stop where a policy or budget cannot run: no row that says why.", "--strict"
    )

    def fields(self) -> dict[str, Any]:
        """As arguments of the functions that `arborsim` exports."""
        return {
            "quality": self.quality, "first": self.first, "episodes": self.episodes or None,
            "workers": self.jobs, "strict": self.strict,
        }  # fmt: skip


@dataclass(frozen=True)
class OutputOptions:
    """Files to write."""

    out: Path | None = output_option(None, "Write results to this file.", writes=True)
    report: Path | None = output_option(None, "Write a self-contained HTML page.", writes=True)

    @property
    def files(self) -> dict[str, Path]:
        """The files that were asked for, by option."""
        given = {f"--{each.name}": getattr(self, each.name) for each in fields(self)}
        return {option: path for option, path in given.items() if isinstance(path, Path)}

    def check(self) -> None:
        """Refuse, before the work, what cannot be written.

        `command` has refused files that the command reads.
        """
        for name, path in self.files.items():
            if name == "--report":
                check_ending(path, name, ".html")
            check_writable(path, name)


def check_ending(path: Path, option: str, ending: str) -> None:
    """Refuse a name that says another kind of file than will be written; devices have no kind."""
    if path.suffix != ending and (path.is_file() or not path.exists()):
        raise UsageError(f"{option} {path}: the name must end in {ending}")


def command_line() -> str:
    """The command that is running, for the metadata of what it makes."""
    return shlex.join(["arborsim", *sys.argv[1:]])


def search_help() -> str:
    """The names that an option for searches takes; asks no installed package for its own."""
    from arborsim.searches import SHIPPED

    return f"{', '.join(SHIPPED)}; or package.module:Class."


def print_json(document: Any) -> None:
    """Print it as strict JSON."""
    import json

    typer.echo(json.dumps(document, indent=2, allow_nan=False))
