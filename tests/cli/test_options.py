"""Options declared once: the call, the command, its help, and completion of names."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import pytest

import arborsim
from arborsim.cli.app import COMMANDS, load, main
from arborsim.cli.commands import NAMES, Command, complete
from arborsim.core.errors import UsageError
from arborsim.core.settings import MOST_INT
from arborsim.products.declare import (
    Count,
    InPython,
    Option,
    Options,
    call,
    declared,
    described,
    equivalent,
)
from arborsim.products.options import JobOptions, MachineOptions, PolicyOptions

#: Every option as it is accepted, with its type, range and default.
KNOWN = Path(__file__).with_name("options.txt")


@dataclass(frozen=True, kw_only=True)
class Heat(Options, panel="Heat"):
    """How hot.

    Parameters
    ----------
    degrees
        How hot.

        In Python also a float.
    """

    degrees: Count = 180


@dataclass(frozen=True)
class Oven(Heat):
    """Bake.

    Parameters
    ----------
    shelf
        Which ``shelf``.
    what
        Repeatable.
    mode
        How.

    Returns
    -------
    str
    """

    shelf: int
    _: KW_ONLY
    what: Annotated[Sequence[str], Option("bake", default=["bread"])] = ()
    mode: Literal["air", "grill"] | None = None
    fan: bool = True
    quiet: InPython = False

    def results(self) -> str:
        return f"{self.shelf} {self.degrees} {[*self.what]} {self.mode} {self.fan} {self.quiet}"


bake = call("bake", Oven)


def baked(oven: Oven, *, timer: int = 5) -> str:
    """Bake.

    Parameters
    ----------
    timer
        Minutes.
    """
    return f"{oven.results()} {timer}"


def run(*arguments: str) -> Any:
    return Command("bake", baked).main(list(arguments), standalone_mode=False)


def test_fields_are_options_and_keywords() -> None:
    assert bake(2, what=["cake"], quiet=True) == "2 180 ['cake'] None True True"
    given = ("2", "--bake", "cake", "--bake", "tart", "--no-fan", "--mode", "air", "--timer", "9")
    assert run(*given) == "2 180 ['cake', 'tart'] air False False 9"
    assert run("1", "--degrees", "90") == "1 90 ['bread'] None True False 5"
    for wrong in ([], ["1", "--degrees", "-1"], ["1", "--quiet"], ["1", "--mode", "sun"]):
        with pytest.raises(click.ClickException):
            run(*wrong)
    with pytest.raises(UsageError, match="degrees must be a whole number of 0 or more, not -1"):
        bake(1, degrees=-1)


def test_help_shows_what_docstrings_say() -> None:
    command = Command("bake", baked)
    panels = command.panels(click.Context(command))
    assert panels["Arguments"] == [("shelf", "Which shelf.  [required]")]
    assert panels["Heat"] == [("--degrees INTEGER", "How hot.  [default: 180; x>=0]")]
    assert ("--fan / --no-fan", "  [default: fan]") in panels["Options"]
    assert ("--mode [air|grill]", "How.") in panels["Options"]
    assert command.help == "Bake."
    assert str(inspect.signature(bake)).startswith("(shelf: int, *, what: ")
    assert "degrees\n    How hot." in inspect.getdoc(bake).partition("Returns")[0]


def test_a_call_is_kept_as_the_command_that_does_the_same() -> None:
    assert equivalent("bake", Oven(2)) == "arborsim bake 2"
    oven = Oven(1, what=("cake", "tart"), fan=False, quiet=True, degrees=90)
    assert equivalent("bake", oven) == "arborsim bake 1 --bake cake,tart --no-fan --degrees 90"
    assert equivalent("bake", Oven(1, what=(object,))).startswith("arborsim.bake('1', what=(")


def every_command() -> Iterator[tuple[str, Command]]:
    """The commands and those below them."""
    for name in COMMANDS:
        made = load(name)
        below = {**getattr(made, "others", {}), **getattr(made, "commands", {})}
        found = {"": made, **below} if isinstance(made, Command) else below
        yield from ((f"{name} {each}".strip(), one) for each, one in found.items())


def text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(text, value))
    said = str(value).lower() if isinstance(value, bool) else str(value)
    return "" if value in (None, MISSING) else said


def line(name: str, made: Any) -> str:
    """An option of `KNOWN`."""
    option = made.option
    default = made.default if option.default is None else option.default
    kinds = {bool: "flag", str: "TEXT", int: "INTEGER", float: "NUMBER", Path: "PATH"}
    kind = "|".join(made.kind) if isinstance(made.kind, tuple) else kinds[made.kind]
    most = None if option.most == MOST_INT else option.most
    span = f" {text(option.least)}..{text(most)}" if (option.least, most) != (None, None) else ""
    flag = made.name.upper() if made.argument else made.flag
    need = " required" if default is MISSING else ""
    return f"{name}: {flag} {kind}{'...' * option.many}{span}{need} = {text(default)}".rstrip()


def test_every_option_is_taken_as_it_was() -> None:
    found = [
        line(name, each)
        for name, one in every_command()
        for each in one.options
        if not each.option.python
    ]
    assert sorted(found) == sorted(KNOWN.read_text().splitlines())


def test_every_option_is_described() -> None:
    for name, one in every_command():
        assert one.help, name
        for each in one.options:
            assert each.help, f"{name} {each.name}"
            assert each.help.endswith((".", "]", ")")), each.help


def test_no_description_is_of_an_option_that_is_not_there() -> None:
    groups = {each.group for _, one in every_command() for each in one.options}
    assert groups
    for name in ("replay", "search", "live", "record", "plan", "sweep", "results", "tune"):
        kind = getattr(arborsim, name).options
        known = {each.name for each in declared(kind)}
        for each in (kind, PolicyOptions, JobOptions, MachineOptions):
            assert set(described(each)) <= known | {one.name for one in declared(each)}
        assert set(inspect.signature(getattr(arborsim, name)).parameters) == known


@pytest.mark.parametrize("columns", ["80", "160"])
@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_panels_and_fits(
    name: str,
    columns: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main([name, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= int(columns)
    panels = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert len(set(panels)) == len(panels)
    if name in ("replay", "live", "record"):
        assert panels[-1] == "Expert:"
        assert "Options:" in panels[:2]


def shown(command: Command) -> list[str]:
    """The names that help has, with what they take."""
    return [
        words for panel in command.panels(click.Context(command)).values() for words, _ in panel
    ]


def test_help_names_no_type_of_python() -> None:
    for name, one in every_command():
        for words in shown(one):
            takes = set(re.findall(r"\w+", " ".join(words.split()[1:])))
            assert not takes & {"list", "Path", "str", "int", "float", "range"}, (name, words)


@pytest.mark.parametrize("kind", NAMES)
def test_names_can_be_completed(kind: str) -> None:
    known = complete(kind, "")
    assert known
    assert complete(kind, f"x,{known[-1]}")[0] == f"x,{known[-1]}"
    assert complete(kind, "no such name") == []


def test_files_and_folders_can_be_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "many").mkdir()
    for name in ("mine.parquet", "mine.txt", "mine.jsonl", "other.parquet"):
        (tmp_path / name).touch()
    assert complete("trace", "m") == ["many/", "mine.parquet"]
    assert complete("results", "m") == ["many/", "mine.jsonl", "mine.parquet"]


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("arborsim rep", "replay"),
        ("arborsim replay --pol", "--policy"),
        ("arborsim replay --policy full,epik", "full,epikv"),
        ("arborsim plan --gpu h10", "h100"),
        ("arborsim live --search tot-b", "tot-bfs"),
        ("arborsim comp", "compare"),
        ("arborsim compare a b --fail", "--fail-over"),
        ("arborsim plot r.parquet --kind h", "heat"),
        ("arborsim plot r.parquet --metric t", "time"),
        ("arborsim doctor --j", "--json"),
    ],
)
def test_a_shell_is_offered_names(typed: str, offered: str) -> None:
    asked = {"_ARBORSIM_COMPLETE": "bash_complete", "COMP_WORDS": typed,
             "COMP_CWORD": str(typed.count(" "))}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "arborsim"], env={**os.environ, **asked}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert f"plain,{offered}" in done.stdout.split(), done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_offered_every_command(shell: str) -> None:
    word = "" if shell == "fish" else "1"
    asked = {"_ARBORSIM_COMPLETE": f"{shell}_complete", "COMP_WORDS": "arborsim ",
             "COMP_CWORD": word}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "arborsim"], env={**os.environ, **asked}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    for name in COMMANDS:
        assert name in done.stdout, done.stderr


def test_completion_is_installed_once_where_the_shell_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for shell, name in (("bash", ".bashrc"), ("fish", ".config/fish/completions/arborsim.fish")):
        monkeypatch.setenv("SHELL", f"/bin/{shell}")
        assert main(["--show-completion"]) == 0
        line = capsys.readouterr().out.splitlines()[-1]
        assert f"_ARBORSIM_COMPLETE={shell}_source" in line
        assert main(["--install-completion"]) == main(["--install-completion"]) == 0
        assert (tmp_path / name).read_text() == f"{line}\n"
    monkeypatch.setenv("SHELL", "/bin/csh")
    assert main(["--install-completion"]) == 2
    assert "csh is not known" in capsys.readouterr().err


def test_help_imports_no_command_and_a_command_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from arborsim.cli.app import main\n"
        "main(sys.argv[1:])\n"
        "heavy = ('numpy', 'pandas', 'pyarrow', 'plotly', 'rich', 'torch', 'simpy')\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    for arguments in (["--help"], ["--version"], ["policies", "--help"], ["plan", "--help"]):
        shown = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
        )
        assert shown.stdout.splitlines()[-1] == "[]", arguments
