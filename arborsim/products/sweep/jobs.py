"""The cells that a grid comes to: every combination of its lists, checked before anything runs.

Paths are relative to the folder of the grid's file.
"""

from __future__ import annotations

import glob
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any

from arborsim.core.documents import digest, file_digest
from arborsim.core.errors import MissingSignal, UsageError
from arborsim.core.installed import sources
from arborsim.core.outputs import real_path
from arborsim.core.records import convert, located
from arborsim.core.settings import setting_text
from arborsim.machine.config import with_types
from arborsim.machine.lookup import load_geometry, load_profile
from arborsim.machine.machine import unsuited
from arborsim.play import served
from arborsim.play.results import ANY
from arborsim.policies.registry import build, values_of
from arborsim.products.calibrate.documents import apply, read_calibration
from arborsim.products.options import MachineOptions
from arborsim.products.replay.run import SOURCES
from arborsim.products.sweep.arms import Arm, arms_of, code_of, shown
from arborsim.products.sweep.grid import MACHINE, PART, Budgets, Group, grid_of, read_toml
from arborsim.searches import find_search
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import Geometry

#: Grows when a cell's file changes its meaning: cells of other versions are computed again.
VERSION = 2
#: Parameters that tell a cell from all others of its folder: the first columns of its file.
PARAMETERS = (
    *("kind", "trace", "policy", "settings", "budget"),
    *(*MACHINE, *PART, "more"),
)
#: The sources that a cell's figures depend on.
CODE = {
    "replay": (
        *SOURCES,
        *(f"arborsim/products/{n}.py" for n in ("choices", "options", "replay/ask")),
    ),
    "live": ("arborsim", "arborsim_torch"),
}
#: Keys of ``[[live]]`` that take a list as it is.
_WHOLE = ("stop",)


@dataclass(frozen=True)
class Job:
    """A cell to compute: what it is, and the arguments that compute it."""

    head: Mapping[str, Any]  #: its parameters: the first columns of its file
    given: Mapping[str, Any]  #: arguments of `arborsim.replay` or `arborsim.live`; paths are whole
    inputs: Mapping[str, str]  #: digests of what the files among them hold
    left_out: str = ""  #: why it cannot run, if that is known

    @property
    def kind(self) -> str:
        return str(self.head["kind"])

    @cached_property
    def code(self) -> str:
        """A digest of the sources that its figures depend on."""
        return sources(*CODE[self.kind])

    @cached_property
    def setting(self) -> str:
        """A digest of its parameters, whatever the inputs hold."""
        return setting_of(self.head)

    @cached_property
    def address(self) -> str:
        """The name of its file: its setting, then a digest of contents of inputs and code, too."""
        made_of = digest([VERSION, self.code, self.head, self.inputs])
        return f"{self.setting}-{made_of[:16]}"

    @property
    def name(self) -> str:
        """``"h2o at budget 0.5 on game24-tot.parquet, h100"``."""
        at = "" if self.head["budget"] == ANY else f" at budget {self.head['budget']}"
        return f"{self.head['policy']}{at} on {self.head['trace']}, {self.head['gpu']}"


def setting_of(head: Mapping[str, Any]) -> str:
    """A digest of the parameters in a cell's head, or row."""
    return digest({name: head[name] for name in PARAMETERS})[:16]


Check = Callable[[Mapping[str, Any]], None]
Announce = Callable[[int], None]


def read_jobs(
    path: Path,
    check_live: Check,
    allow_code: bool = False,
    announce: Announce = lambda cells: None,
) -> list[Job]:
    """The cells of a grid in TOML, each once; a `UsageError` is one line that names the file.

    `check_live` refuses arguments of `arborsim.live` that cannot work.  With `allow_code`, policies
    and searches may be ``package.module:Class``.  `announce` is told how many cells of replays the
    lists multiply to before any is made: millions take minutes, and gigabytes of memory.
    """
    if not path.exists():
        raise UsageError(
            f"{path}: cannot be read (No such file or directory); `arborsim sweep --example` "
            "prints a grid to begin with"
        )
    with located(str(path)):
        return jobs_of(read_toml(path, allow_code), path.parent, check_live, announce)


def jobs_of(
    raw: Mapping[str, Any],
    base: Path,
    check_live: Check,
    announce: Announce = lambda cells: None,
) -> list[Job]:
    """`read_jobs`, of what `tomllib` made of the text, with paths relative to `base`."""
    grid = grid_of(raw)
    expander = _Replays(base, [group for _, group in grid.groups])
    cells = 0
    for place, group in grid.groups:
        with located(place):
            cells += expander.cells(group)
    announce(cells)
    jobs: dict[str, Job] = {}
    for place, group in grid.groups:
        with located(place):
            jobs.update((job.address, job) for job in expander.jobs(group))
    for place, table in grid.live:
        with located(place):
            jobs.update((job.address, job) for job in _live_jobs(table, base, check_live))
    return list(jobs.values())


# ------------------------------------------------------------------------- replays


class _Replays:
    """Makes cells of groups; opens each trace and profile once."""

    def __init__(self, base: Path, groups: Sequence[Group]) -> None:
        self._base = base
        self._readers: dict[Path, TraceReader] = {}
        for group in groups:
            for path in self._traces(group):
                self._readers.setdefault(path, TraceReader(path))
        self._digests = {path: file_digest(path) for path in self._readers}
        names = [path.name for path in self._readers]
        #: A trace goes by its file's name, with its folder where several have that name.
        self._names = {
            path: path.name if names.count(path.name) == 1 else os.path.relpath(path, base)
            for path in self._readers
        }
        self._profile = cache(self._load_profile)
        self._model = cache(self._load_model)

    def cells(self, group: Group) -> int:
        """How many combinations there are; some may be the same cell."""
        uses = Counter(use for use, _, _ in arms_of(group.policies, self._base))
        with located("policies"):
            arms = sum(
                number * (len(group.budgets) if build(use).uses_budget else 1)
                for use, number in uses.items()
            )
        return arms * len(self._traces(group)) * math.prod(map(len, group.machines))

    def jobs(self, group: Group) -> Iterator[Job]:
        """All combinations, those of a trace together."""
        machines = [
            MachineOptions(**dict(zip(MACHINE, values, strict=True)))
            for values in product(*group.machines)
        ]
        for path in self._traces(group):
            reader = self._readers[path]
            if not range(reader.num_episodes)[group.part["first"] :]:
                first = group.part["first"]
                raise UsageError(f"{path}: no episode {first}; it has {reader.num_episodes}")
            arms = self._arms(group, reader)
            for on in machines:
                types = on.model, on.weights, on.kv_dtype
                model, geometry = self._model(*types, reader.info.geometry)
                files = {key: self._file(getattr(on, key)) for key in ("gpu", "host", "engine")}
                inputs = {"trace": self._digests[path], "machine": self._profile(*files.values())}
                inputs["model"] = digest(geometry)
                told = vars(on) | group.part
                head = {"kind": "replay", "trace": self._names[path], "more": ""} | told
                given = {"traces": str(path)} | told | files
                given |= {"model": self._file(on.model, ".json")}
                given |= {"episodes": told["episodes"] or None}
                for arm in arms:
                    why = self._cannot(arm, reader, geometry)
                    cells = [b.text for b in group.budgets] if arm.policy.uses_budget else [ANY]
                    for budget in cells:
                        yield Job(
                            head | {"model": model} | arm.head(budget),
                            given | arm.given(budget),
                            inputs | arm.inputs,
                            why,
                        )

    def _traces(self, group: Group) -> list[Path]:
        found: dict[Path, None] = {}
        for text in group.traces:
            names = sorted(glob.glob(str(self._base / text))) if glob.has_magic(text) else [text]
            if not names:
                raise UsageError(f"traces: no file is called {text}")
            found |= dict.fromkeys(real_path(self._base / name) for name in names)
        return list(found)

    def _arms(self, group: Group, reader: TraceReader) -> list[Arm]:
        """Policies with their settings, calibrated ones where none are given; each once."""
        calibrations = [read_calibration(self._file(each)) for each in group.calibrations]
        layers = {str(reader.path): reader.info.geometry.layers}
        found: dict[str, Arm] = {}
        with located("policies"):
            for use, settings, asked in arms_of(group.policies, self._base):
                named = build(use).name
                for_it = [each for each in calibrations if named in each.policies]
                own = apply({named: settings}, for_it, layers)[named] if for_it else settings
                policy = build(use, dict(own))
                arm = Arm(use, policy, own, asked)
                found.setdefault(digest([policy.name, values_of(policy)]), arm)
        return list(found.values())

    def _cannot(self, arm: Arm, reader: TraceReader, geometry: Geometry) -> str:
        """Why a policy cannot run on a trace; that is an error where it was asked for by name."""
        try:
            served.require(arm.policy, reader, in_file=True)
            why = unsuited(arm.policy, geometry)
            if why and arm.asked:
                raise UsageError(why)
        except MissingSignal as error:
            if arm.asked:
                raise
            return str(error).replace(str(reader.path), self._names[reader.path])
        return why

    def _load_profile(self, gpu: str, host: str, engine: str) -> str:
        """A digest of all that is known of a machine."""
        return load_profile(gpu, host or None, engine).digest

    def _load_model(
        self, model: str, weights: str, kv_dtype: str, recorded: Geometry
    ) -> tuple[str, Geometry]:
        """Its name, and the model with these types."""
        geometry = load_geometry(self._file(model, ".json")) if model else recorded
        return geometry.name, with_types(geometry, weights, kv_dtype)

    def _file(self, name: str, ending: str = ".toml") -> str:
        return _whole(self._base, name, ending)


def _whole(base: Path, name: str, ending: str = ".toml") -> str:
    """The whole path of a file, or a name as it is."""
    path = base / name
    named = name.endswith(ending) or ("/" in name and path.exists())
    return str(real_path(path)) if named else name


# ------------------------------------------------------------------------- live runs


def _live_jobs(
    table: Mapping[str, Any], base: Path, check: Callable[[Mapping[str, Any]], None]
) -> Iterator[Job]:
    """Cells of a ``[[live]]`` block: every key is an argument of `arborsim.live`."""
    own = {key: table[key] for key in ("policies", "budgets") if key in table}
    chosen = convert(Budgets, own)
    if not chosen.policies:
        raise UsageError("policies names nothing: give at least one")
    others = {key: value for key, value in table.items() if key not in own}
    lists = {key: _choices(key, value) for key, value in others.items()}
    for values in product(*lists.values()):
        told = dict(zip(lists, values, strict=True))
        given, files = _with_files(told, base)
        apart = ("task", "model", "recall", "first", "episodes", "settings")
        more = {key: setting_text(value) for key, value in told.items() if key not in apart}
        more |= dict(each.split("=", 1) for each in _settings(told))
        head = MACHINE | {
            "kind": "live",
            "trace": told.get("task") or told.get("model") or "chain",
            "gpu": told.get("gpu", told.get("device", "cpu")),
            "engine": "",
            "model": told.get("model", ""),
            "weights": told.get("dtype", ""),
            "recall": told.get("recall", MACHINE["recall"]),
            "page_size": told.get("page_tokens", 0),
            **{key: told.get(key, 0) for key in ("first", "episodes")},
            "quality": False,
            "more": shown(more),
        }
        for use, settings, asked in arms_of(chosen.policies, base):
            policy = build(use, dict(settings))
            arm = Arm(use, policy, settings, asked)
            budgets = [b.text for b in chosen.budgets] if policy.uses_budget else [ANY]
            for budget in budgets:
                arguments = given | {"full": False} | arm.given(budget, _settings(given))
                check(arguments)
                yield Job(head | arm.head(budget), arguments, files | arm.inputs)


def _with_files(told: Mapping[str, Any], base: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Arguments with whole paths, and digests of what they name beyond arborsim's own sources."""
    given, files = dict(told), {}
    for key in ("model", "prompts", "reward", "embed"):
        path = base / str(told.get(key) or ".")
        if told.get(key) and path.exists():
            files[key] = digest({p.name: file_digest(p) for p in _files(path)})
            given[key] = str(real_path(path))
    if "gpu" in told:
        given["gpu"] = _whole(base, str(told["gpu"]))
    if told.get("shadow"):  # a simulated machine
        files["gpu"] = load_profile(str(given.get("gpu") or "h100")).digest
    kind, is_config, name = str(told.get("model") or "").partition("config:")
    if is_config and not kind:  # random weights
        name = _whole(base, name, ".json")
        given["model"], files["model"] = f"config:{name}", digest(load_geometry(name))
    if told.get("search"):
        files["search"] = digest(code_of(find_search(str(told["search"]))))
    return given, files


def _choices(key: str, value: Any) -> list[Any]:
    whole = key in _WHOLE or not isinstance(value, list)
    if not whole and not value:
        raise UsageError(f"{key} is empty: name at least one, or leave it out")
    return [value] if whole else value


def _settings(given: Mapping[str, Any]) -> list[str]:
    """Settings of the search and of all policies, as the block gives them."""
    table = given.get("settings", {})
    if not isinstance(table, Mapping):
        raise UsageError("settings must be a table such as { keep = 2 }")
    return [f"{key}={setting_text(value)}" for key, value in table.items()]


def _files(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
