"""Commands whose options are dataclasses, and help with a section for each panel of options.

Typer reads one parameter per option.  Options that several commands share, or that become one
request, are fields of a frozen dataclass here::

    @dataclass(frozen=True)
    class MachineOptions:
        gpu: str = option("h100", "GPU profile.")

    @command
    def replay(
        traces: list[Path] = argument(..., "Trace files."),
        machine: MachineOptions = MachineOptions(gpu="h200"),
    ) -> None: ...

`command` writes the fields out into the signature that Typer sees, and puts what was given back
into the dataclass.  The instance that is a parameter's default holds the defaults of its options;
without one they are those of the fields.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import inspect
import os
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from copy import copy
from dataclasses import MISSING, Field, field, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer
import typer.core

from arborsim.core.errors import UsageError
from arborsim.core.outputs import output_path, refuse_inputs
from arborsim.core.settings import MOST_COUNT, MOST_INT

T = TypeVar("T")
#: What knows the names that complete an option.
NAMES = {
    "policy": "arborsim.policies.registry:available",
    "algorithm": "arborsim.searches:search_names",
    "gpu": "arborsim.machine.lookup:profile_names",
    "host": "arborsim.machine.lookup:host_names",
    "engine": "arborsim.machine.lookup:engine_names",
    "model": "arborsim.machine.lookup:geometry_names",
    "calibration": "arborsim.products.calibrate.documents:shipped",
    "schema": "arborsim.products.schemas:schema_names",
    "plot": "arborsim.products.plot.plots:kinds",
    "metric": "arborsim.products.plot.plots:metrics",
}
#: Endings of the files that complete an argument.
FILES = {"trace": (".parquet",), "results": (".parquet", ".jsonl")}
#: Earlier names of options, which commands that have the new name still take.
RENAMED = {
    "--workers": "--jobs", "--gpus": "--gpu", "--policies": "--policy", "--budgets": "--budget",
    "--prompt": "--prompt-tokens", "--accuracy": "--answers",
}  # fmt: skip
#: What help says that an option takes.
_TAKES = {str: "TEXT", Path: "PATH", int: "INTEGER", float: "NUMBER"}
_KEY, _WRITES = "arborsim.option", "arborsim.writes"


def panel(name: str | None, kind: Callable[..., Any] = typer.Option) -> Callable[..., Any]:
    """A maker of options that help shows in a panel of that name.

    A maker takes the default (``...``: it must be given), the help text, names where they do not
    follow from the field's, `complete`: which of `NAMES` a shell offers, `shown`: what help says in
    place of an empty default, `writes`: whether it names a file that is written, and what Typer
    takes, such as ``min``.
    """

    def made(
        default: Any, help: str, *names: str, complete: str = "", shown: str = "",
        writes: bool = False, **more: Any,
    ) -> Any:  # fmt: skip
        completion = completing(complete) if complete else None
        if writes:
            more["parser"] = output_path
        about = kind(
            *names, help=help, rich_help_panel=name, show_default=shown or True,
            autocompletion=completion, **more,
        )  # fmt: skip
        known = {_KEY: about, _WRITES: writes}
        if default is ...:
            return field(metadata=known)
        if isinstance(default, list):
            return field(default_factory=default.copy, metadata=known)
        return field(default=default, metadata=known)

    return made


option, argument = panel(None), panel(None, typer.Argument)


def completing(kind: str) -> Callable[[str], list[str]]:
    """Completes the last name of ``a,b,c``; imports what knows the names only when called."""

    def complete(incomplete: str) -> list[str]:
        module, _, attribute = NAMES[kind].partition(":")
        before, comma, last = incomplete.rpartition(",")
        known = getattr(import_module(module), attribute)()
        return [f"{before}{comma}{name}" for name in known if name.startswith(last)]

    return _complete_file(FILES[kind]) if kind in FILES else complete


def _complete_file(endings: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Completes files with one of these endings, and folders to look for them in."""

    def complete(incomplete: str) -> list[str]:
        found = sorted(glob.glob(f"{glob.escape(incomplete)}*"))
        return [
            f"{path}/" if os.path.isdir(path) else path
            for path in found
            if os.path.isdir(path) or path.endswith(endings)
        ]

    return complete


def command(function: Callable[..., T]) -> Callable[..., T]:
    """A command for Typer to read, some of whose parameters are groups of options.

    It refuses to write over what it reads: files that arguments name, and files that those name.
    """
    hints = get_type_hints(function)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    options, written = [], []
    for parameter in inspect.signature(function).parameters.values():
        if kind := groups.get(parameter.name):
            kinds = get_type_hints(kind)
            given = None if parameter.default is parameter.empty else parameter.default
            options += [_option(each, each.name, kinds[each.name], given) for each in fields(kind)]
            written += [each.name for each in fields(kind) if each.metadata[_WRITES]]
        else:
            options.append(_option(parameter.default, parameter.name, hints[parameter.name]))
            written += [parameter.name] if parameter.default.metadata[_WRITES] else []

    @functools.wraps(function)
    def run(**given: Any) -> T:
        outputs = {f"--{name.strip('_')}": given[name] for name in written if given[name]}
        if outputs:
            read = [value for name, value in given.items() if name not in written]
            refuse_inputs(outputs, files_named(read))
        for name, value in given.items():
            most = MOST_INT if name == "seed" else MOST_COUNT
            if isinstance(value, int) and abs(value) > most:
                dashed = name.replace("_", "-")
                raise UsageError(f"--{dashed}: must be at most {most:,}, not {value!r:.40}")
        filled = {
            name: kind(**{each.name: given.pop(each.name) for each in fields(kind)})
            for name, kind in groups.items()
        }
        return function(**given, **filled)

    made: Any = run
    made.__signature__ = inspect.Signature(options)
    made.__annotations__ = {option.name: option.annotation for option in options}
    return run


def files_named(values: Iterable[Any]) -> set[Path]:
    """Files that values of arguments name: alone, by comma, behind "=" or "file:", or in TOML."""
    found: set[Path] = set()
    waiting = [(value, Path()) for value in values]
    while waiting:
        value, folder = waiting.pop()
        if isinstance(value, list | tuple | dict):
            parts = value.values() if isinstance(value, dict) else value
            waiting += [(part, folder) for part in parts]
        elif isinstance(value, str | Path):
            words = str(value), *str(value).replace("=", ",").split(",")
            named = {each.removeprefix("file:") for each in words} - {""}
            for path in {folder / each for each in named if len(each) < 4096} - found:
                # No name of a file, or no TOML, or one that is too deep.
                with contextlib.suppress(OSError, ValueError, RecursionError):
                    if path.is_file():
                        found.add(path)
                        if path.suffix == ".toml":
                            waiting.append((tomllib.loads(path.read_text()), path.parent))
    return found


def _option(made: Field[Any], name: str, kind: Any, group: Any = None) -> inspect.Parameter:
    """A parameter for Typer; an instance of its group holds the default."""
    default: Any = made.default if group is None else getattr(group, name)
    if default is MISSING:
        factory = made.default_factory
        default = factory() if callable(factory) else inspect.Parameter.empty
    about = copy(made.metadata[_KEY])
    if isinstance(about, typer.models.OptionInfo):
        about.metavar = _takes(kind)
    annotation = Annotated[kind, about]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _takes(kind: Any) -> str | None:
    """What help says of a type, of a list what each is; None for flags and choices."""
    inner = map(_takes, get_args(kind)) if get_origin(kind) is not Literal else ()
    return _TAKES.get(kind) or next(filter(None, inner), None)


def group(help: str) -> typer.Typer:
    """A command with subcommands."""
    return typer.Typer(help=help, add_completion=False, no_args_is_help=True, rich_markup_mode=None)


def subcommand(
    of: typer.Typer, short_help: str | None = None
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Adds a function to a group, listed with `short_help` or its first line."""
    return lambda made: of.command(cls=PanelCommand, short_help=short_help)(command(made))


class PanelCommand(typer.core.TyperCommand):
    """A command whose plain help has a section per ``rich_help_panel``.

    Typer itself shows panels through rich only, whose import doubles the time that help takes.
    `others` are commands that take over where their name is the first argument.
    """

    others: Mapping[str, PanelCommand] = MappingProxyType({})

    def make_context(
        self, info_name: Any, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        if args and (other := self.others.get(args[0])):
            return other.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for parameter in self.params for name in parameter.opts}
        return super().parse_args(ctx, [_current(each, known) for each in args])

    def panels(self, ctx: Any) -> dict[str, list[tuple[str, str]]]:
        """Arguments and options with what help says of them, by panel."""
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            if shown := parameter.get_help_record(ctx):
                kind = "Options"
                if parameter.param_type_name == "argument":  # its name says what it takes
                    kind, shown = "Arguments", (shown[0].partition(" ")[0], shown[1])
                panel = getattr(parameter, "rich_help_panel", None) or kind
                panels.setdefault(panel, []).append(shown)
        order = sorted(panels, key=lambda name: name == "Expert")
        return {panel: panels[panel] for panel in order if panels[panel]}

    def format_options(self, ctx: Any, formatter: Any) -> None:
        if self.others:
            with formatter.section("Commands"):
                formatter.write_dl([(n, other.get_short_help_str(80)) for n, other in
                                    self.others.items()])  # fmt: skip
        for panel, shown in self.panels(ctx).items():
            with formatter.section(panel):
                formatter.write_dl(shown)


def _current(argument: str, known: Collection[str]) -> str:
    """An argument, by the new name if it is an option by its earlier one (`RENAMED`)."""
    name, equals, value = argument.partition("=")
    now = RENAMED.get(name)
    return f"{now}{equals}{value}" if now in known and name not in known else argument
