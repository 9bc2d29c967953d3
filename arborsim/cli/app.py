"""The `arborsim` command: loads the command that is run, and turns every error into one line."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import typer
import typer.core

from arborsim import __version__
from arborsim.core.errors import ArborsimError, UsageError
from arborsim.products.command import PanelCommand
from arborsim.report.words import plain

# Typer may use the click package or a copy of its own; this is whichever it raises.
ClickException: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)

#: Help text of each command in the list of commands.
COMMANDS = {
    "replay": "Replay traces under KV-cache policies.",
    "search": "Run search algorithms on a bank of recorded thoughts.",
    "plan": "Find the load GPUs, policies and budgets carry, and its cost.",
    "sweep": "Replay a grid of policies and machines, cell by cell.",
    "results": "Show what a sweep found: filtered, grouped, exported.",
    "record": "Run searches on a live model and record them.",
    "live": "Search live under KV-cache policies that really remove tokens.",
    "validate": "Search live and simulated side by side, and compare.",
    "plot": "Draw results in the terminal, as a page or as an image.",
    "compare": "Compare two runs: what differs, and by how much.",
    "inspect": "Show what a trace holds: origin, sizes, signals.",
    "generate": "Make a trace of searches drawn from distributions of lengths.",
    "policies": "List the policies, or explain one: method, source, settings.",
    "hardware": "List the GPUs and hosts, or explain one, number by number.",
    "models": "List the models, or explain one: bytes per token, weights, room.",
    "schema": "Print the JSON schema of what a command prints with --json.",
    "tune": "Tune a policy for memory, time and quality on traces.",
    "calibrate": "Find settings of policies by measuring, or a machine's speed.",
    "doctor": "Show what is installed, what works with it, and what is missing.",
    "import": "Make a trace of a recording in another format.",
}
#: The module of each command that is not `command` in the product of its name.
_HOME = {
    "results": "sweep.results_command",
    "inspect": "traces.inspect_command",
    "policies": "catalog.policies",
    "hardware": "catalog.hardware",
    "models": "catalog.models",
    "schema": "catalog.schema_command",
    "doctor": "catalog.doctor",
    "import": "traces.import_command",
}
#: How the loader and threads say that there is no memory.
_NO_ROOM = ("failed to map segment", "cannot allocate memory", "can't start new thread")


class Commands(typer.core.TyperGroup):
    """The commands: each is imported when it is run, or asked for its help or completions."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {
            name: typer.core.TyperCommand(name, short_help=said) for name, said in COMMANDS.items()
        }

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, listed, rest = super().resolve_command(ctx, args)
        return name, load(name) if name and listed else None, rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # Typer would make it exit code 130 and no word
            raise typer.Abort from None


def load(name: str) -> Any:
    """The command called `name`, or the group of that name, as Typer runs it.

    A module may give its command `SUBCOMMANDS`: functions by name, which take over where their name
    is the first argument.
    """
    attribute = "import_" if name == "import" else name
    module = import_module(f"arborsim.products.{_HOME.get(name, f'{name}.command')}")
    found = getattr(module, attribute)
    if isinstance(found, typer.Typer):
        return typer.main.get_command(found)
    made = _alone(name, found)
    made.others = {n: _alone(n, each) for n, each in getattr(module, "SUBCOMMANDS", {}).items()}
    return made


def _alone(name: str, function: Any) -> Any:
    """One command, as Typer runs it."""
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(name, cls=PanelCommand)(function)
    return typer.main.get_command(alone)


app = typer.Typer(
    name="arborsim",
    cls=Commands,
    help="What a KV-cache policy costs, and what it breaks, when a language model searches.",
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help needs no rich, whose import doubles the start-up time
)


def _version(shown: bool) -> None:
    if shown:
        typer.echo(f"arborsim {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """What a KV-cache policy costs, and what it breaks, when a language model searches."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Returns
    -------
    int
        0; 2 after an error, which is printed as one line; 130 after Ctrl-C, or a SIGTERM, which
        does the same.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        with _terminable(), _any_output():
            code = app(arguments or ["--help"], prog_name="arborsim", standalone_mode=False)
            sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except ArborsimError as error:
        return _fail(str(error))
    except (typer.Abort, KeyboardInterrupt):
        return _fail("interrupted", 130)
    except ClickException as error:
        said = error.format_message()  # type: ignore[attr-defined]
        if type(error).__name__ == "NoArgsIsHelpError":  # a group without a command: its help
            print(said)
            return 0
        return _fail(f"{said} (--help shows the options)")
    except BrokenPipeError:  # `arborsim ... | head` has read enough, which is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as error:  # what rich makes of a broken pipe
        if isinstance(error.__context__, BrokenPipeError):
            return 0
        raise
    except UnicodeEncodeError as error:  # only names of files are not text
        name = ascii(error.object)[1:-1]
        return _fail(f"{name}: this name of a file is not UTF-8: rename the file")
    except (MemoryError, ImportError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(said in str(error) for said in _NO_ROOM):
            raise
        why = f" ({error})" if str(error) else ""
        return _fail(
            f"out of memory{why}: run fewer --jobs, ask for less at once, or take a machine with "
            "more memory"
        )
    except OSError as error:  # a full disk, a file that was taken away meanwhile
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}")


@contextmanager
def _any_output() -> Iterator[None]:
    """Printing works where an output knows only some characters, or only errors go nowhere."""
    with ExitStack() as opened:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None and name == "stdout":
                raise UsageError("standard output is closed: send it to a file, or to /dev/null")
            if stream is None:
                setattr(sys, name, opened.enter_context(open(os.devnull, "w", encoding="utf-8")))
                opened.callback(setattr, sys, name, None)
            elif hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace" if name == "stdout" else "backslashreplace")
        yield


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the work as Ctrl-C does: what is done is kept, and no process is left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _remedy(message: str) -> str:
    """Advice for errors of the environment rather than of the command."""
    if os.strerror(errno.EMFILE) in message:
        return ": raise the limit of open files (ulimit -n 4096), or run fewer --jobs"
    try:
        os.getcwd()
    except OSError:
        return "; the working folder was deleted: change to one that exists"
    return ""


def _fail(message: str, code: int = 2) -> int:
    said = plain(" ".join(f"{message}{_remedy(message)}".split()))
    try:
        print(f"arborsim: {said}", file=sys.stderr, flush=True)
    except OSError:  # only the exit code can tell; what is left is not tried again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    return code


if __name__ == "__main__":
    sys.exit(main())
