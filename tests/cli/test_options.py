"""Options as dataclasses, help by panel, completion of names, and how long a command may be."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

import arborsim.products
from arborsim.cli.app import COMMANDS, load, main
from arborsim.products.command import (
    NAMES,
    RENAMED,
    PanelCommand,
    argument,
    command,
    completing,
    option,
    panel,
)

SOURCES = sorted(
    path
    for path in Path(arborsim.products.__file__).parent.rglob("*.py")
    if "command" in path.stem or path.parent.name == "catalog"
)
LONGEST_COMMAND = 60


@dataclass(frozen=True)
class Oven:
    """Options of a test."""

    shelf: int = option(..., "Which shelf.")
    degrees: int = panel("Expert")(180, "How hot.", min=0)
    what: list[str] = option(["bread"], "Repeatable.", "--what", "-w")


def run(function: object, *arguments: str) -> None:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(cls=PanelCommand)(function)  # type: ignore[type-var]
    app(list(arguments), standalone_mode=False)


def test_fields_are_options_and_come_back_as_their_dataclass() -> None:
    seen = []

    @command
    def heat(
        oven: Oven,
        where: str = argument(..., "A kitchen."),
        timer: int = option(5, "Minutes."),
    ) -> None:
        seen.append((where, oven, timer))

    run(heat, "home", "--shelf", "2", "-w", "cake", "--what", "tart")
    run(heat, "home", "--shelf", "1", "--degrees", "90", "--timer", "9")
    assert seen == [
        ("home", Oven(2, 180, ["cake", "tart"]), 5),
        ("home", Oven(1, 90, ["bread"]), 9),
    ]
    with pytest.raises(Exception, match="shelf"):
        run(heat, "home")


def test_the_default_of_a_group_is_the_default_of_its_options() -> None:
    seen = []

    @command
    def cool(oven: Oven = Oven(shelf=0, degrees=4, what=["milk"])) -> None:
        seen.append(oven)

    run(cool)
    run(cool, "--degrees", "6")
    assert seen == [Oven(0, 4, ["milk"]), Oven(0, 6, ["milk"])]


def test_two_options_of_one_name_are_refused() -> None:
    def bake(oven: Oven, other: Oven) -> None:
        """Never run."""

    with pytest.raises(ValueError, match="shelf"):
        command(bake)


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


def test_every_command_is_listed_with_its_own_first_line() -> None:
    for name in COMMANDS:
        assert load(name).help, name


def every_command() -> Iterator[tuple[str, PanelCommand]]:
    """The commands and those below them."""
    for name in COMMANDS:
        made = load(name)
        below = {**getattr(made, "others", {}), **getattr(made, "commands", {})}
        found = {"": made, **below} if isinstance(made, PanelCommand) else below
        yield from ((f"{name} {each}".strip(), one) for each, one in found.items())


def parsed(command: PanelCommand, *words: str) -> typer.Context:
    return command.make_context("it", list(words), resilient_parsing=True)  # type: ignore[no-any-return]


def shown(command: PanelCommand) -> list[str]:
    """The names that help has, with what they take."""
    panels = command.panels(parsed(command)).values()
    return [words for panel in panels for words, _ in panel]


@pytest.mark.parametrize("old", RENAMED)
def test_earlier_names_of_options_are_taken_and_not_shown(old: str) -> None:
    new = RENAMED[old]
    having = [each for _, each in every_command() if any(new in p.opts for p in each.params)]
    assert having
    for one in having:
        taken = parsed(one, new, "2").params
        assert taken != parsed(one).params
        assert parsed(one, old, "2").params == parsed(one, f"{old}=2").params == taken
        assert not [each for each in shown(one) if old in each.replace(",", " ").split()]


def test_help_names_no_type_of_python() -> None:
    for name, one in every_command():
        for words in shown(one):
            takes = set(re.findall(r"\w+", " ".join(words.split()[1:])))
            assert not takes & {"list", "Path", "str", "int", "float", "range"}, (name, words)


@pytest.mark.parametrize("kind", NAMES)
def test_names_can_be_completed(kind: str) -> None:
    complete = completing(kind)
    known = complete("")
    assert known
    assert complete(f"x,{known[-1]}")[0] == f"x,{known[-1]}"
    assert complete("no such name") == []


def test_files_and_folders_can_be_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "many").mkdir()
    for name in ("mine.parquet", "mine.txt", "mine.jsonl", "other.parquet"):
        (tmp_path / name).touch()
    assert completing("trace")("m") == ["many/", "mine.parquet"]
    assert completing("results")("m") == ["many/", "mine.jsonl", "mine.parquet"]


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
    asked = {"_ARBORSIM_COMPLETE": "complete_bash", "COMP_WORDS": typed,
             "COMP_CWORD": str(typed.count(" "))}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "arborsim"], env={**os.environ, **asked}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert offered in done.stdout.split(), done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_offered_every_command(shell: str) -> None:
    asked = {"_ARBORSIM_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": "arborsim ",
             "_TYPER_COMPLETE_FISH_ACTION": "get-args"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "arborsim"], env={**os.environ, **asked}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    for name in COMMANDS:
        assert name in done.stdout, done.stderr


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


def commands(tree: ast.Module) -> list[ast.FunctionDef]:
    """The functions of a file that are commands: called as the file is, or made commands."""
    return [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and (
            node.name.rstrip("_") in COMMANDS
            or any("command" in ast.dump(each) for each in node.decorator_list)
        )
    ]


def test_a_command_is_its_signature_and_a_few_lines() -> None:
    found = {}
    for path in SOURCES:
        for function in commands(ast.parse(path.read_text())):
            assert function.end_lineno is not None
            found[f"{path.stem}.{function.name}"] = function.end_lineno - function.lineno + 1
    names = {name.rpartition(".")[2].rstrip("_") for name in found}
    assert names >= set(COMMANDS) - {"calibrate", "hardware"}  # these have commands of their own
    too_long = {name: lines for name, lines in found.items() if lines > LONGEST_COMMAND}
    assert too_long == {}
