"""Options that several products share."""

from __future__ import annotations

import json as documents
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from arborsim.core.errors import UsageError
from arborsim.core.outputs import check_writable
from arborsim.products.choices import Budgets, Policies, Settings, check_recall, geometry
from arborsim.products.declare import (
    AnyPath,
    Count,
    InPython,
    Option,
    Options,
    Positive,
    Written,
    at_least,
)

if TYPE_CHECKING:
    from arborsim.machine.machine import Machine
    from arborsim.products.results import Results

Json = Annotated[bool, Option(panel="Output")]
#: Traces that a command reads.
TraceFiles = Annotated[Sequence[Path], Option(complete="trace")]
#: An option that is hardly ever needed; help shows these last.
Expert = Option(panel="Expert")
Calibrations = Annotated[str | Sequence[str], Option(complete="calibration")]


@dataclass(frozen=True, kw_only=True)
class PolicyOptions(Options):
    """Policies with their settings, and the budgets that they run under.

    Parameters
    ----------
    policies
        Policies by name (by comma, or all), package.module:Class, or the file of a composition.
        Repeatable.

        In Python also policies made there.
    budgets
        Tokens (2048) or share of what full retention holds (0.25), by comma. Repeatable.

        In Python a float in (0, 1] is a share, an int a number of tokens.
    settings
        name=value, or NAME.name=value for one policy or search. Repeatable.

        In Python also a mapping: ``{"sinks": 4, "h2o.per": "shared"}``.
    """

    policies: Policies = "full"
    budgets: Budgets = 0.5
    settings: Settings = ()


@dataclass(frozen=True, kw_only=True)
class MachineOptions(Options, panel="Machine"):
    """The machine and model that are charged for.

    Parameters
    ----------
    gpu
        GPU profile: a name or a TOML file.
    host
        Host to put the GPU into: a name or file.
    engine
        What serves on it: vllm, sglang, trtllm, transformers, live, live-graphs or a file.
    model
        Model to charge bytes and seconds for: a name or config.json.
    kv_dtype
        Type of its cache: fp8, bf16, ...
    weights
        Type of its weights: fp8, int4, ...
    recall
        How DDR tokens are read: stage, stream, near or ondemand.
    page_size
        Tokens per KV page.
    tree_attention
        Read ancestors that branches share once per batch.
    """

    gpu: Annotated[str, Option(complete="gpu")] = "h100"
    host: Annotated[str, Option(complete="host")] = ""
    engine: Annotated[str, Option(complete="engine")] = "vllm"
    model: Annotated[str, Option(complete="model", shown="recorded")] = ""
    kv_dtype: Annotated[str, Option(shown="the model's")] = ""
    weights: Annotated[str, Option(shown="the model's")] = ""
    recall: str = "stage"
    page_size: Positive = 1
    tree_attention: bool = True

    def __post_init__(self) -> None:
        from arborsim.memory.pages import MOST_PAGE_TOKENS

        super().__post_init__()
        check_recall(self.recall)
        at_least(1, MOST_PAGE_TOKENS, page_size=self.page_size)

    def machine(self, traces: Sequence[Path], **more: bool) -> Machine:
        """The simulated machine. `more` are fields of `Machine` of that name."""
        from arborsim.machine.lookup import load_profile
        from arborsim.machine.machine import Machine

        profile = load_profile(self.gpu, self.host or None, self.engine)
        charged = geometry(traces, str(self.model), str(self.kv_dtype), str(self.weights))
        return Machine(profile, charged, self.recall, self.page_size, self.tree_attention, **more)


@dataclass(frozen=True, kw_only=True)
class JobOptions(Options, panel="Run"):
    """Which recorded searches are replayed, and by how many processes.

    Parameters
    ----------
    quality
        Measure attention kept, where it was recorded (a large column).
    first
        Number of the first episode.
    episodes
        Episodes per trace.
    strict
        Stop where a policy or budget cannot run: no row that says why.
    workers
        Processes that share the episodes. Same results.

        A script then needs ``if __name__ == "__main__":``, as for all of Python's multiprocessing.
    progress
        Show a bar on standard error once it takes longer than two seconds.
    """

    quality: Annotated[bool, Option(panel="Options")] = True
    first: Count = 0
    episodes: Annotated[Count | None, Option(shown="all")] = None
    strict: bool = False
    workers: Annotated[Positive, Option(name="jobs", silent=True)] = 1
    progress: InPython = False


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Options, panel="Output"):
    """A page to write, and what to print.

    Parameters
    ----------
    report
        Write a self-contained HTML page.
    json
        Print JSON instead of tables.
    notes
        Print all notes, and what columns mean.
    """

    report: Written | None = None
    json: bool = False
    notes: bool = False

    @property
    def files(self) -> dict[str, Path]:
        """The files that were asked for, by option."""
        given = {f"--{each.name}": getattr(self, each.name) for each in fields(self)}
        order = sorted(given.items(), key=lambda each: each[0] != "--out")
        return {option: path for option, path in order if isinstance(path, Path)}

    def check(self) -> None:
        """Refuse, before the work, what cannot be written."""
        check_files(self.files)

    def write(self, results: Results) -> None:
        """Write the files that were asked for."""
        if self.report is not None:
            results.report(self.report)

    def print(
        self,
        results: Results,
        files: Iterable[Path] | None = None,
        show: Callable[[], None] | None = None,
    ) -> None:
        """Write the files, then print JSON alone, or tables and the names of all `files`."""
        self.write(results)
        if self.json:
            print(results.to_json())
            return
        (show or partial(results.print, notes=self.notes))()
        for path in self.files.values() if files is None else files:
            print(f"wrote {path}")


@dataclass(frozen=True, kw_only=True)
class OutputOptions(ReportOptions, panel="Output"):
    """Files to write, and what to print.

    Parameters
    ----------
    out
        Write results: .parquet, .csv or .json.
    """

    out: Written | None = None

    def check(self) -> None:
        from arborsim.core.tables import check_format

        if self.out is not None:
            check_format(self.out)
        super().check()

    def write(self, results: Results) -> None:
        if self.out is not None:
            results.save(self.out)
        super().write(results)


@contextmanager
def interruptible(left: str = "; nothing was written") -> Iterator[None]:
    """Ctrl-C in this work ends the command with exit code 130, and says what it left."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(left) from None


def check_files(files: Mapping[str, AnyPath | None]) -> dict[str, Path]:
    """The files that were asked for, by option. Refuses what cannot be written."""
    found = {option: Path(path) for option, path in files.items() if path is not None}
    for name, path in found.items():
        if name == "--report":
            check_ending(path, name, ".html")
        check_writable(path, name)
    return found


def check_profile(out: Path, overwrite: bool, also: str = "") -> None:
    """Refuse a profile, and the file of tables that it may have, that cannot be written."""
    check_writable(out, "--out")
    if out.suffix != ".toml":
        raise UsageError(f"--out {out}: name it .toml, which is how --gpu tells a file from a name")
    for path in (out, *([out.with_suffix(also)] if also else [])):
        check_writable(path, "--out")
        if path.exists() and not overwrite:
            raise UsageError(f"{path} exists: choose another --out, or --overwrite")


def check_ending(path: Path, option: str, ending: str) -> None:
    """Refuse a name that says another kind of file than will be written. Devices have no kind."""
    if path.suffix != ending and (path.is_file() or not path.exists()):
        raise UsageError(f"{option} {path}: the name must end in {ending}")


def command_line() -> str:
    """The command that is running, for the metadata of what it makes."""
    return shlex.join(["arborsim", *sys.argv[1:]])


def print_json(document: Any) -> None:
    """Print it as strict JSON."""
    print(documents.dumps(document, indent=2, allow_nan=False))
