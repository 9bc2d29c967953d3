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
from pathlib import Path
from typing import Any

import click
import click.shell_completion

from arborsim.cli.commands import Command
from arborsim.core import __version__
from arborsim.core.errors import ArborsimError, UnknownName, UsageError
from arborsim.report.words import plain

#: Help text of each command in the list of commands.
COMMANDS = {
    "replay": "Replay traces under KV-cache policies.",
    "search": "Run search algorithms on a bank of recorded thoughts.",
    "plan": "Find the load GPUs, policies and budgets carry, and its cost.",
    "sweep": "Replay a grid of policies and machines, cell by cell.",
    "results": "Show what a sweep found: filtered, grouped, exported.",
    "record": "Run searches on a live model and record them.",
    "live": "Search live under KV-cache policies that really remove tokens.",
    "fidelity": "Compare next tokens under policies with full retention's.",
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
    "observe": "Measure a served model, and fit an engine to it.",
}
#: The module of each command that is not `command` in the product of its name.
_HOME = {
    "results": "sweep.command",
    "inspect": "traces.tables",
    "policies": "catalog.policies",
    "hardware": "catalog.hardware",
    "models": "catalog.models",
    "schema": "schemas",
    "doctor": "catalog.doctor",
    "import": "traces.import_command",
}
#: How the loader and threads say that there is no memory.
_NO_ROOM = ("failed to map segment", "cannot allocate memory", "can't start new thread")


#: What asks the program for completions, and where a shell reads how it is asked.
_COMPLETE = "_ARBORSIM_COMPLETE"
_SHELLS = {
    "bash": (".bashrc", f'eval "$({_COMPLETE}=bash_source arborsim)"'),
    "zsh": (".zshrc", f'eval "$({_COMPLETE}=zsh_source arborsim)"'),
    "fish": (
        ".config/fish/completions/arborsim.fish",
        f"{_COMPLETE}=fish_source arborsim | source",
    ),
}


class Commands(click.Group):
    """The commands: each is imported when it is run, or asked for its help or completions."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return load(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise UnknownName("command", args[0], COMMANDS)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def load(name: str) -> Any:
    """The command called `name`, or the group of that name.

    A module may have `SUBCOMMANDS`: functions by name, which take over where their name is the
    first argument.  Without a function of the command's name, they are all there is.
    """
    module = import_module(f"arborsim.products.{_HOME.get(name, f'{name}.command')}")
    below = {each: Command(each, f) for each, f in getattr(module, "SUBCOMMANDS", {}).items()}
    if function := getattr(module, name, None):
        return Command(name, function, below)
    return click.Group(name, {**below}, help=COMMANDS[name], no_args_is_help=True)


def _completion(ctx: click.Context, option: click.Parameter, asked: bool) -> None:
    """Print how the user's shell asks for completions, or write it where the shell reads it."""
    if not asked or ctx.resilient_parsing:
        return
    shell = Path(os.environ.get("SHELL", "")).name
    if shell not in _SHELLS:
        raise UsageError(f"{shell or 'this shell'} is not known: completion is for bash, zsh, fish")
    name, line = _SHELLS[shell]
    path = Path.home() / name
    if option.name == "show_completion":
        print(line)
        ctx.exit()
    if not path.exists() or line not in path.read_text(encoding="utf-8"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
    print(f"{path} has it: completion works in a new {shell}")
    ctx.exit()


def _version(ctx: click.Context, option: click.Parameter, shown: bool) -> None:
    if shown:
        print(f"arborsim {__version__}")
        ctx.exit()


def _flag(name: str, act: Any, help: str) -> click.Option:
    return click.Option(
        [name], is_flag=True, is_eager=True, expose_value=False, callback=act, help=help
    )


app = Commands(
    "arborsim",
    help="What a KV-cache policy costs, and what it breaks, when a language model searches.",
    params=[
        _flag("--version", _version, "Print the version."),
        _flag("--install-completion", _completion, "Let your shell complete names and options."),
        _flag("--show-completion", _completion, "Print the line that does so."),
    ],
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Returns
    -------
    int
        0, or 2 after an error, which is printed as one line, or 130 after Ctrl-C or a SIGTERM,
        which does the same.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        with _terminable(), _any_output():
            code = _run(arguments or ["--help"])
            sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except ArborsimError as error:
        return _fail(str(error))
    except KeyboardInterrupt as left:  # which says what it left
        return _fail(f"interrupted{left}", 130)
    except click.ClickException as error:
        return _fail(f"{error.format_message()} (--help shows the options)")
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


def _run(arguments: list[str]) -> Any:
    """The command's result. Help and completions return 0."""
    if asked := os.environ.get(_COMPLETE):
        return click.shell_completion.shell_complete(app, {}, "arborsim", _COMPLETE, asked)
    try:
        with app.make_context("arborsim", arguments) as context:
            return app.invoke(context)
    except click.exceptions.NoArgsIsHelpError as error:  # a group without a command
        print(error.format_message())
        return 0
    except click.exceptions.Exit as done:
        return done.exit_code


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
