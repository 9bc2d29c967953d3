"""`arborsim schema`: what ``--json`` really prints follows it, and a changed document does not."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import arborsim
from arborsim.cli.app import COMMANDS as EVERY
from arborsim.cli.app import load, main
from arborsim.products.declare import Declared
from arborsim.products.schemas import schema_names, schema_of
from tests.plan.make import small_plan

BANK, TRACE = "tests/golden/bank.parquet", "traces/game24-tot.parquet"
COMMANDS = {
    "replay": [TRACE, "--policy", "all", "--budget", "0.5", "--episodes", "1"],
    "search": [BANK, "--algorithm", "rebase,mcts", "--width", "4", "--episodes", "2",
               "--policy", "full,h2o,streaming-llm", "--budget", "0.9,0.05"],
    "inspect": [TRACE],
    "policies": [],
    "hardware": [],
    "models": [],
    "doctor": [],
}  # fmt: skip
ONE = {"policies": "h2o", "hardware": "h100", "models": "llama-3.1-8b"}


@pytest.fixture(scope="module")
def printed() -> Callable[..., Any]:
    """What a command prints; each runs once."""
    kept: dict[tuple[str, ...], Any] = {}

    def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
        if arguments not in kept:
            capsys.readouterr()
            assert main([*arguments, "--json"]) in (0, 1)
            kept[arguments] = json.loads(capsys.readouterr().out)
        return kept[arguments]

    return run


def problems(name: str, document: Any) -> list[str]:
    return [error.message for error in Draft202012Validator(schema_of(name)).iter_errors(document)]


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_printed_follows_the_schema(
    name: str, printed: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert problems(name, printed(capsys, name, *COMMANDS[name])) == []
    if name in ONE:
        assert problems(name, printed(capsys, name, ONE[name])) == []


def test_a_plan_and_a_live_run_follow_theirs() -> None:
    from arborsim.products.plan.files import to_json

    assert problems("plan", json.loads(to_json(small_plan()))) == []
    live = arborsim.load_results("tests/golden/live.jsonl")
    assert problems("live", json.loads(live.to_json())) == []


@pytest.mark.parametrize("name", ["replay", "inspect", "models"])
def test_a_key_that_goes_or_changes_its_type_is_found(
    name: str, printed: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    document = printed(capsys, name, *COMMANDS[name])
    for path in _places(document):
        for change in (_without, _as_object):
            if problems(name, change(copy.deepcopy(document), path)):
                break
        else:
            raise AssertionError(f"{name}: nothing says what {path} is")


def _places(document: Any) -> list[tuple[Any, ...]]:
    """Keys of the document, of its first rows, and of their first records."""
    found: list[tuple[Any, ...]] = []
    for key, value in document.items() if isinstance(document, dict) else [(0, document[0])]:
        if isinstance(document, dict):
            found.append((key,))
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, dict) and key not in ("settings", "info", "spreads"):
            where = (key, 0) if isinstance(value, list) else (key,)
            found += [(*where, name) for name in first]
    return found


def _parent(document: Any, path: tuple[Any, ...]) -> Any:
    for step in path[:-1]:
        document = document[step]
    return document


def _without(document: Any, path: tuple[Any, ...]) -> Any:
    del _parent(document, path)[path[-1]]
    return document


def _as_object(document: Any, path: tuple[Any, ...]) -> Any:
    _parent(document, path)[path[-1]] = {"no": []}
    return document


@pytest.mark.parametrize("name", schema_names())
def test_schemas_are_schemas_and_printed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", name]) == 0
    schema = json.loads(capsys.readouterr().out)
    Draft202012Validator.check_schema(schema)
    assert schema == json.loads(json.dumps(schema_of(name)))
    text = json.dumps(schema)
    for record in schema.get("$defs", {}):
        assert f'"#/$defs/{record}"' in text, f"{record} is not used"


def options_of(command: object) -> tuple[Declared, ...]:
    """None of a group of commands."""
    return getattr(command, "options", ())


def test_every_command_with_json_has_one(capsys: pytest.CaptureFixture[str]) -> None:
    having = {
        name for name in EVERY if any(each.name == "json" for each in options_of(load(name)))
    } - {"compare"}  # whose rows depend on what is compared
    assert having == set(schema_names())
    assert main(["schema", "replai"]) == 2
    assert "did you mean replay" in capsys.readouterr().err
