"""Commands of functions: their options, their help by panel, and what a shell completes.

Options are declared with `arborsim.products.declare`. Click parses them.
"""

from __future__ import annotations

import contextlib
import glob
import inspect
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from arborsim.core.errors import UsageError
from arborsim.core.outputs import output_path, refuse_inputs
from arborsim.core.settings import MOST_COUNT, MOST_INT
from arborsim.core.units import is_plain
from arborsim.products.declare import Declared, declared, written

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
#: What help says that an option takes.
_TAKES = {str: "TEXT", Path: "PATH", int: "INTEGER", float: "NUMBER"}


_NONE: Mapping[str, Any] = {}


class Command(click.Command):
    """A command whose help has a section for each panel of options.

    `others` are commands that take over where their name is the first argument.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], others: Mapping[str, Command] = _NONE
    ) -> None:
        self.options = declared(function)
        self.function, self.others = function, dict(others)
        kinds = list(inspect.get_annotations(function, eval_str=True).values())
        said = next((kind for kind in kinds if hasattr(kind, "results")), function)
        help = re.split(r"\n\w+\n---+\n", inspect.cleandoc(said.__doc__ or ""))[0].strip()
        found = [_parameter(each) for each in self.options if not each.option.python]
        super().__init__(name, callback=self._run, help=help, params=found)

    def _run(self, **given: Any) -> Any:
        """Call the function. It may not write over what it reads.

        Those are files that arguments name, and files that those name.
        """
        given = {name: value for name, value in given.items() if value not in (None, ())}
        mine = [each for each in self.options if not each.option.python]
        mine.sort(key=lambda each: each.flag != "--out")  # an error about two names the other
        outputs = {each.flag: Path(given[each.name]) for each in mine
                   if each.option.writes and given.get(each.name)}  # fmt: skip
        if outputs:
            read = [given.get(each.name) for each in mine if not each.option.writes]
            refuse_inputs(outputs, files_named(read))
        grouped: dict[str, dict[str, Any]] = {each.group: {} for each in self.options}
        for each in mine:
            value = given.get(each.name, each.option.default)
            most = each.option.most or MOST_COUNT
            if isinstance(value, int) and abs(value) > most:
                raise UsageError(f"{each.flag}: must be at most {most:,}, not {value!r:.40}")
            if value is not None:
                value = list(value) if isinstance(value, tuple) else value
                grouped[each.group][each.name] = value
        kinds = inspect.get_annotations(self.function, eval_str=True)
        own = grouped.pop("", {})
        return self.function(
            **own, **{name: kinds[name](**fields) for name, fields in grouped.items()}
        )

    def make_context(
        self, info_name: Any, args: list[str], parent: Any = None, **extra: Any
    ) -> click.Context:
        if args and (other := self.others.get(args[0])):
            return other.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)

    def panels(self, ctx: click.Context) -> dict[str, list[tuple[str, str]]]:
        """Arguments and options with what help says of them, by panel."""
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for each in self.options:
            if not each.option.python:
                panel = "Arguments" if each.argument else each.option.panel or "Options"
                panels.setdefault(panel, []).append(_record(each))
        panels["Options"].append(("--help", "Show this message and exit."))
        order = sorted(panels, key=lambda name: name == "Expert")
        return {panel: panels[panel] for panel in order if panels[panel]}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.others:
            with formatter.section("Commands"):
                formatter.write_dl(
                    [(n, each.get_short_help_str(80)) for n, each in self.others.items()]
                )
        for panel, shown in self.panels(ctx).items():
            with formatter.section(panel):
                formatter.write_dl(shown)


def _parameter(made: Declared) -> click.Parameter:
    """The parameter that click parses. The function knows the defaults."""
    option, many = made.option, made.option.many
    required = made.default is MISSING and option.default is None
    kind = _type(made)
    completes: Any = _completing(option.complete) if option.complete else None
    if made.argument:
        return click.Argument(
            [made.name], type=kind, nargs=-1 if many else 1, required=required,
            metavar=(made.name if required else f"[{made.name}]") + "..." * many,
            shell_complete=completes,
        )  # fmt: skip
    if kind is bool:
        flags = [made.name, f"{made.flag}/{made.flag.replace('--', '--no-', 1)}"]
        return click.Option(flags, default=None, help=made.help)
    known: dict[str, Any] = {} if required else {"default": None}  # click takes None for given
    return click.Option(
        [made.name, made.flag], type=kind, multiple=many, required=required, help=made.help,
        shell_complete=completes, **known,
    )  # fmt: skip


def _type(made: Declared) -> Any:
    least, most = made.option.least, made.option.most
    if isinstance(made.kind, tuple):
        return click.Choice(made.kind)
    if made.option.writes:
        return output_path
    if made.kind in (int, float):
        return _Number(made, least, None if most == MOST_INT else most)
    return made.kind


class _Number(click.ParamType[Any]):
    """A number of an option, in its range; it may have a unit."""

    def __init__(self, made: Declared, least: float | None, most: float | None) -> None:
        ranges: dict[type, Any] = {int: click.IntRange, float: click.FloatRange}
        plain: Any = made.kind if least is None else ranges[made.kind](least, most)
        self._made, self._plain = made, click.types.convert_type(plain)
        self.name = "integer" if made.kind is int else "number"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if isinstance(value, str) and not is_plain(value):
            with contextlib.suppress(UsageError):
                value = written(self._made.name, value, self._made.kind)
        return self._plain.convert(value, param, ctx)


def _record(made: Declared) -> tuple[str, str]:
    """The line of help for an option: its names with what it takes, and what it means."""
    option, required = made.option, made.default is MISSING and made.option.default is None
    default = made.default if option.default is None else option.default
    facts = ["required"] if required else []
    if option.shown:
        facts.append(f"default: ({option.shown})")
    elif not (required or default is None or default is False or default in ("", ())):
        facts.append(f"default: {_default(made, default)}")
    least, most = option.least, option.most
    if least is not None and made.kind in (int, float):
        facts.append(f"x>={least}" if most in (None, MOST_INT) else f"{least}<=x<={most}")
    help = f"{made.help}  [{'; '.join(facts)}]" if facts else made.help
    if made.argument:
        return f"{made.name}..." if option.many else made.name, help
    if made.kind is bool:
        both = f"{made.flag} / {made.flag.replace('--', '--no-', 1)}"
        return made.flag if default is False else both, help
    takes = f"[{'|'.join(made.kind)}]" if isinstance(made.kind, tuple) else _TAKES[made.kind]
    return f"{made.flag} {takes}", help


def _default(made: Declared, value: Any) -> str:
    if value is True:
        return made.flag.strip("-")
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _completing(kind: str) -> Callable[[Any, Any, str], list[Any]]:
    from click.shell_completion import CompletionItem

    return lambda ctx, param, typed: [CompletionItem(name) for name in complete(kind, typed)]


def complete(kind: str, typed: str) -> list[str]:
    """Names of a kind that complete the last one of ``a,b,c``, or files."""
    if kind in FILES:
        found = sorted(glob.glob(f"{glob.escape(typed)}*"))
        return [
            f"{path}/" if os.path.isdir(path) else path
            for path in found
            if os.path.isdir(path) or path.endswith(FILES[kind])
        ]
    module, _, attribute = NAMES[kind].partition(":")
    before, comma, last = typed.rpartition(",")
    known = getattr(import_module(module), attribute)()
    return [f"{before}{comma}{name}" for name in known if name.startswith(last)]


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
