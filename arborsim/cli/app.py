"""The `arborsim` command: registers the commands and turns every error into one line."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
import typer.core

from arborsim import __version__
from arborsim.cli.calibrate import calibrate
from arborsim.cli.generate import generate
from arborsim.cli.hardware import hardware
from arborsim.cli.import_ import import_
from arborsim.cli.inspect import inspect
from arborsim.cli.live import live
from arborsim.cli.models import models
from arborsim.cli.plan import plan
from arborsim.cli.policies import policies
from arborsim.cli.record import record
from arborsim.cli.replay import replay
from arborsim.cli.search import search
from arborsim.cli.validate import validate
from arborsim.core.errors import ArborsimError

# Typer may use the click package or a copy of its own; this is whichever it raises.
ClickException: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)


class _Commands(typer.core.TyperGroup):
    """The commands; Ctrl-C in one that does not take care of it is said, not passed in silence."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # Typer would make it exit code 130 and no word
            raise typer.Abort from None


app = typer.Typer(
    name="arborsim",
    cls=_Commands,
    help="What a KV-cache policy costs, and what it breaks, when a language model searches.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help needs no rich, whose import doubles the start-up time
)
# Click cuts the first line of a docstring where the list of commands has no room for it.
app.command()(replay)
app.command()(search)
app.command(short_help="Find the load GPUs, policies and budgets carry, and its cost.")(plan)
app.command()(record)
app.command(short_help="Search live under KV-cache policies that really remove tokens.")(live)
app.command(short_help="Search live and simulated side by side, and compare.")(validate)
app.command(short_help="Show what a trace holds: origin, sizes, signals.")(inspect)
app.command(short_help="Make a trace of searches drawn from distributions of lengths.")(generate)
app.command(short_help="List the policies, or explain one: method, source, settings.")(policies)
app.command(short_help="List the GPUs and hosts, or explain one, number by number.")(hardware)
app.command(short_help="List the models, or explain one: bytes per token, weights, room.")(models)
app.add_typer(
    calibrate,
    name="calibrate",
    short_help="Find settings of policies by measuring, or a machine's speed.",
)
app.add_typer(import_, name="import", short_help="Make a trace of a recording in another format.")


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
        0; 2 after an error, which is printed as one line; 130 after Ctrl-C.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = app(arguments or ["--help"], prog_name="arborsim", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except ArborsimError as error:
        return _fail(str(error))
    except typer.Abort:
        return _fail("interrupted", 130)
    except ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # a group without a command: its help
            print(error.format_message())  # type: ignore[attr-defined]
            return 0
        return _fail(f"{error.format_message()} (--help shows the options)")  # type: ignore[attr-defined]
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:  # `arborsim ... | head`: nobody reads on, which is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full disk, a file that was taken away meanwhile
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}")


def _fail(message: str, code: int = 2) -> int:
    print(f"arborsim: {' '.join(message.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
