"""Commands whose options are dataclasses, and help with a section for each panel of options.

Typer reads one parameter per option.  Options that several commands share, or that become one
request, are fields of a frozen dataclass here::

    @dataclass(frozen=True)
    class MachineOptions:
        gpu: Annotated[str, typer.Option(help="GPU profile.")] = "h100"

    @command
    def replay(traces: Traces, machine: MachineOptions = MachineOptions(gpu="h200")) -> None: ...

`command` writes the fields out into the signature that Typer sees, and puts what was given back
into the dataclass.  The instance that is a parameter's default holds the defaults of its options;
without one they are those of the fields, and a field without a default must be given.
"""

from __future__ import annotations

import functools
import glob
import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import MISSING, field, fields, is_dataclass
from importlib import import_module
from typing import Any, TypeVar, get_type_hints

import typer
import typer.core

T = TypeVar("T")
#: What knows the names that complete an option.
NAMES = {
    "policy": "arborsim.policies.registry:available",
    "algorithm": "arborsim.search:search_names",
    "gpu": "arborsim.machine.lookup:profile_names",
    "host": "arborsim.machine.lookup:host_names",
    "model": "arborsim.machine.lookup:geometry_names",
    "calibration": "arborsim.calibrate.documents:shipped",
}


def panel(name: str | None, kind: Callable[..., Any] = typer.Option) -> Callable[..., Any]:
    """A maker of options that help shows in a panel of that name.

    A maker takes the help text, names where they do not follow from the field's, `complete`: which
    of `NAMES` a shell offers, `default`: what help says in place of an empty one, and what Typer
    takes, such as ``min``.
    """

    def made(help: str, *names: str, complete: str = "", default: str = "", **more: Any) -> Any:
        return kind(
            *names,
            help=help,
            rich_help_panel=name,
            show_default=default or True,
            autocompletion=completing(complete) if complete else None,
            **more,
        )

    return made


option, argument = panel(None), panel(None, typer.Argument)


def completing(kind: str) -> Callable[[str], list[str]]:
    """Completes the last name of ``a,b,c``; what knows the names is imported when it is asked."""

    def complete(incomplete: str) -> list[str]:
        module, _, attribute = NAMES[kind].partition(":")
        before, comma, last = incomplete.rpartition(",")
        known = getattr(import_module(module), attribute)()
        return [f"{before}{comma}{name}" for name in known if name.startswith(last)]

    return _complete_trace if kind == "trace" else complete


def _complete_trace(incomplete: str) -> list[str]:
    """Parquet files, and folders to look for them in."""
    found = sorted(glob.glob(f"{glob.escape(incomplete)}*"))
    folders = {path for path in found if os.path.isdir(path)}
    return [
        f"{path}/" if path in folders else path
        for path in found
        if path in folders or path.endswith(".parquet")
    ]


def several(*values: str) -> Any:
    """The default of a field that can be given several times."""
    return field(default_factory=lambda: list(values))


def command(function: Callable[..., T]) -> Callable[..., T]:
    """A command whose dataclass parameters are groups of options, for Typer to read."""
    hints = get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    groups = {p.name: hints[p.name] for p in parameters if is_dataclass(hints[p.name])}
    options = [option for p in parameters for option in _options(p, hints[p.name])]

    @functools.wraps(function)
    def run(**given: Any) -> T:
        filled = {
            name: kind(**{each.name: given.pop(each.name) for each in fields(kind)})
            for name, kind in groups.items()
        }
        return function(**given, **filled)

    made: Any = run
    made.__signature__ = inspect.Signature(options)
    made.__annotations__ = {option.name: option.annotation for option in options}
    return run


def _options(parameter: inspect.Parameter, kind: Any) -> Iterator[inspect.Parameter]:
    """A parameter as Typer is to see it: itself, or one for each field of a dataclass."""
    if not is_dataclass(kind):
        yield parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=kind)
        return
    hints = get_type_hints(kind, include_extras=True)
    for each in fields(kind):
        if parameter.default is not inspect.Parameter.empty:
            default = getattr(parameter.default, each.name)
        elif each.default is not MISSING:
            default = each.default
        elif each.default_factory is not MISSING:
            default = each.default_factory()
        else:
            default = inspect.Parameter.empty
        yield inspect.Parameter(
            each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[each.name]
        )


class PanelCommand(typer.core.TyperCommand):
    """A command whose plain help has a section per ``rich_help_panel``.

    Typer itself shows panels through rich only, whose import doubles the time that help takes.
    """

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            if shown := parameter.get_help_record(ctx):
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                panel = getattr(parameter, "rich_help_panel", None) or kind
                panels.setdefault(panel, []).append(shown)
        for panel in sorted(panels, key=lambda name: name == "Expert"):
            if panels[panel]:
                with formatter.section(panel):
                    formatter.write_dl(panels[panel])
