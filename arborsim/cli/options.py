"""Options that several commands share, in groups that become parts of a request."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from arborsim.cli.command import argument, option, panel
from arborsim.core.errors import UnknownName, UsageError

if TYPE_CHECKING:
    from arborsim.core.geometry import Geometry
    from arborsim.core.tiers import Budget
    from arborsim.machine.machine import Machine
    from arborsim.policies.base import Policy

machine_option, run_option, output_option = panel("Machine"), panel("Run"), panel("Output")
expert_option = panel("Expert")  # what is hardly ever needed; help shows it last
RECALLS = ("stage", "stream", "near", "ondemand")


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

    @property
    def every(self) -> bool:
        """Whether all policies were asked for; one that cannot run is then left out."""
        return "all" in names(self.policy)

    def names(self, *, oracle: bool = True) -> list[str]:
        """The chosen policies; ``all`` is every registered one, with or without the `oracle`."""
        from arborsim.policies.registry import available
        from arborsim.run.results import ORACLE

        chosen = names(self.policy)
        if "all" in chosen:
            every = [name for name in available() if oracle or name != ORACLE]
            chosen = [*every, *(n for n in chosen if n != "all" and n not in available())]
        if not chosen:
            raise UsageError("--policy names no policy")
        return chosen

    def budgets(self) -> list[Budget]:
        """The budgets, at least one."""
        from arborsim.core.tiers import Budget

        found = [Budget.parse(text) for text in names(self.budget)]
        if not found:
            raise UsageError("--budget names no budget")
        return found


@dataclass(frozen=True)
class MachineOptions:
    """The machine and model that are charged for."""

    gpu: str = machine_option("h100", "GPU profile: a name or a TOML file.", complete="gpu")
    host: str = machine_option("", "Host to put the GPU into: a name or file.", complete="host")
    engine: str = machine_option(
        "vllm",
        "What serves on it: vllm, sglang, trtllm, transformers or a file.",
        complete="engine",
    )
    model: str = machine_option(
        "",
        "Model to charge bytes and seconds for: a name or config.json [default: recorded].",
        complete="model",
    )
    kv_dtype: str = machine_option("", "Type of its cache: fp8, bf16, ... [default: the model's].")
    weights: str = machine_option("", "Type of its weights: fp8, int4, ... [default: the model's].")
    recall: str = machine_option(
        "stage", "How DDR tokens are read: stage, stream, near or ondemand."
    )
    page_size: int = machine_option(1, "Tokens per KV page.", min=1)
    tree_attention: bool = machine_option(
        True, "Read ancestors that branches share once per batch."
    )

    def machine(self, traces: Sequence[Path], **more: bool) -> Machine:
        """The machine; `more` are fields of `Machine` that these options do not set."""
        from arborsim.machine.lookup import load_profile
        from arborsim.machine.machine import Machine

        check_recall(self.recall)
        profile = load_profile(self.gpu, self.host or None, self.engine)
        geometry = self._geometry(traces)
        return Machine(profile, geometry, self.recall, self.page_size, self.tree_attention, **more)

    def _geometry(self, traces: Sequence[Path]) -> Geometry | None:
        """None for the recorded model, as it was recorded."""
        from arborsim.machine.config import with_types
        from arborsim.machine.lookup import load_geometry
        from arborsim.trace.reader import TraceReader

        geometry = load_geometry(self.model) if self.model else None
        if geometry is None and (self.weights or self.kv_dtype):
            recorded = list(dict.fromkeys(TraceReader(path).info.geometry for path in traces))
            if len(recorded) != 1:
                option = "--weights" if self.weights else "--kv-dtype"
                raise UsageError(
                    f"{option}: the traces were recorded on several models; give --model"
                )
            geometry = recorded[0]
        return geometry and with_types(geometry, self.weights, self.kv_dtype)


@dataclass(frozen=True)
class JobOptions:
    """Which recorded searches are replayed, and by how many processes."""

    quality: bool = option(True, "Measure attention kept, where it was recorded (a large column).")
    first: int = run_option(0, "Number of the first episode.", min=0)
    episodes: int = run_option(0, "Episodes per trace.", shown="all", min=0)
    jobs: int = run_option(
        1, "Processes that share the episodes; same results.", "--workers", "--jobs", min=1
    )
    skip_infeasible: bool = expert_option(
        False, "Leave out a policy whose budget is too small for a search.", "--skip-infeasible"
    )

    def fields(self) -> dict[str, Any]:
        """As the fields of `Replay` and `SearchJob`."""
        return {
            "quality": self.quality, "first": self.first, "count": self.episodes or None,
            "workers": self.jobs, "skip_infeasible": self.skip_infeasible,
        }  # fmt: skip


@dataclass(frozen=True)
class OutputOptions:
    """Files to write."""

    out: Path | None = output_option(None, "Write results to this file.")
    report: Path | None = output_option(None, "Write a self-contained HTML page.")

    @property
    def files(self) -> dict[str, Path]:
        """The files that were asked for, by option."""
        given = {f"--{each.name}": getattr(self, each.name) for each in fields(self)}
        return {option: path for option, path in given.items() if isinstance(path, Path)}

    def check(self, *inputs: Path) -> None:
        """Refuse, before the work, what cannot be written or would overwrite another file."""
        given = dict.fromkeys((path.resolve() for path in inputs), "the command reads it")
        for name, path in self.files.items():
            check_output(path, name)
            if taken := given.get(path.resolve()):
                raise UsageError(f"{name} {path}: {taken}; choose another name")
            given[path.resolve()] = f"{name} names the same file"


def names(text: str | Sequence[str]) -> list[str]:
    """``"a, b,c"``, or several of these, as names without repetitions."""
    whole = text if isinstance(text, str) else ",".join(text)
    return list(dict.fromkeys(name.strip() for name in whole.split(",") if name.strip()))


def whole_numbers(text: str, option: str) -> list[int]:
    """``"16,64"`` as numbers of 1 or more."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"{option} {text}: expected whole numbers of 1 or more, by comma")
    return [int(part) for part in parts]


def check_recall(recall: str, known: Sequence[str] = RECALLS) -> None:
    """Refuse an unknown way to read DDR tokens."""
    if recall not in known:
        raise UnknownName("recall mode", recall, known)


def command_line() -> str:
    """The command that is running, for the metadata of what it makes."""
    return shlex.join(["arborsim", *sys.argv[1:]])


def search_help() -> str:
    """The names that an option for searches takes; asks no installed package for its own."""
    from arborsim.search import SHIPPED

    return f"{', '.join(SHIPPED)}; or package.module:Class."


def assigned(setting: str, form: str = "name=value") -> tuple[str, str]:
    """Name and value of a ``--set``, which has that form."""
    name, equals, value = (part.strip() for part in setting.partition("="))
    if not equals or not name:
        raise UsageError(f"--set {setting}: expected {form}")
    return name, value


def policy_settings(chosen: Sequence[str], given: Iterable[str]) -> dict[str, dict[str, str]]:
    """What ``--set`` gives to each of the chosen policies, as `registry.build` takes it.

    ``parameter=value`` is for every chosen policy that has the parameter.  In
    ``policy.parameter=value`` a policy is meant only if one of that name was chosen: parameters of
    composed policies have a dot themselves (``allocate.alpha``).
    """
    from arborsim.policies.registry import available, build, find

    kinds = {name: find(name) for name in chosen}
    values: dict[str, dict[str, str]] = {name: {} for name in chosen}
    for setting in given:
        key, value = assigned(setting, "name=value or policy.name=value")
        meant, parameter = _meant(key, kinds)
        if not meant:
            head = key.partition(".")[0]
            if head in available() and head != key:
                raise UsageError(f"--set {setting}: policy {head} is not among {', '.join(chosen)}")
            build(chosen[0], {key: value})  # raises, naming the nearest parameters
        for name in meant:
            values[name][parameter] = value
    return values


def _meant(key: str, kinds: Mapping[str, type[Policy]]) -> tuple[list[str], str]:
    """The policies that a key of ``--set`` is for, and the parameter."""
    from arborsim.policies.registry import parameter_name

    for name, kind in kinds.items():
        for prefix in (f"{name}.", f"{kind.name}."):
            if key.startswith(prefix):
                return [name], key.removeprefix(prefix)
    return [name for name, kind in kinds.items() if parameter_name(kind, key)], key


def build_policies(settings: Mapping[str, Mapping[str, str]]) -> list[Policy]:
    """The policies with their settings; tables go by their names, which must differ."""
    from arborsim.policies.registry import build

    policies: dict[str, Policy] = {}
    for name, values in settings.items():
        made = build(name, dict(values))
        if made.name in policies:
            raise UsageError(f"--policy {name}: there is another policy called {made.name}")
        policies[made.name] = made
    return list(policies.values())


def check_output(path: Path, option: str) -> None:
    """Refuse an output path that cannot be written, before the work is done."""
    if path.is_dir():
        raise UsageError(f"{option}: {path} is a directory")
    if not path.parent.is_dir():
        raise UsageError(f"{option}: there is no directory {path.parent}")
    # Asking for permissions would not do: read-only disks and special folders refuse all the same.
    there = path.exists()
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise UsageError(f"{option}: cannot write {path}: {error.strerror}") from None
    if not there:
        path.unlink()


def print_json(document: Any) -> None:
    """Print it as strict JSON."""
    import json

    typer.echo(json.dumps(document, indent=2, allow_nan=False))
