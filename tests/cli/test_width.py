"""Commands in terminals of any width, and of none that is known."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import arborsim
from arborsim.cli.app import main
from arborsim.products.plan.plan import Planner
from arborsim.products.plan.workload_file import read_workload
from arborsim.report.table import LEAST_WIDTH
from arborsim.trace.writer import TraceWriter
from tests.bank.banks import bank_columns, bank_info
from tests.plan.make import knowing

ROOT = Path(__file__).parents[2]
CHAIN = ROOT / "traces" / "chain-linear.parquet"
PLAN = ROOT / "tests" / "golden" / "workload.toml"
GRID = f'traces = ["{CHAIN}"]\npolicies = ["raas"]\nbudgets = [0.5]\nepisodes = 1\n'


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with results of replays, searches and plans, and a sweep's cells.

    The plan's candidates are evaluated once, as what is printed of them is what is tested.
    """
    folder = tmp_path_factory.mktemp("made")
    with TraceWriter(folder / "bank.parquet", bank_info()) as writer:
        writer.write_episode(bank_columns(0))
    (folder / "grid.toml").write_text(GRID)
    patch = pytest.MonkeyPatch()
    patch.setattr(Planner, "run", knowing(Planner(read_workload(PLAN)).run()))
    patch.chdir(folder)
    for command in (
        f"replay {CHAIN} --episodes 2 --policy thinkv,epikv --no-oracle --out replay.parquet",
        "search bank.parquet --algorithm rebase --width 4 --out search.parquet",
        f"plan {PLAN} --out plan.parquet",
        "sweep grid.toml --out cells",
    ):
        assert main(command.split()) == 0
    yield folder
    patch.undo()


@pytest.mark.parametrize(
    "command",
    [
        f"replay {CHAIN} --episodes 1 --policy thinkv,epikv",
        f"replay {CHAIN} --episodes 1 --policy raas --view table --explain",
        f"replay {CHAIN} --episodes 1 --policy thinkv,epikv --view matrix",
        "search bank.parquet --algorithm rebase --width 4",
        f"plan {PLAN}",
        f"plan {PLAN} --explain",
        "sweep grid.toml --out cells",
        "results cells",
        "results cells --by policy",
        *(f"plot {each}.parquet" for each in ("replay", "search", "plan")),
        *(f"compare {each}.parquet {each}.parquet" for each in ("replay", "search", "plan")),
        f"inspect {CHAIN}",
        f"inspect {CHAIN} --all --nodes 3",
        f"tune {CHAIN} --policy h2o --set per=shared --trials 2",
        "policies",
        "policies h2o",
        "hardware",
        "hardware h100",
        "models",
        "models llama-3.1-8b",
        "schema replay",
        "--help",
        "replay --help",
    ],
)
def test_a_command_prints_the_same_whatever_the_width(
    made: Path, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(made)
    shown = {}
    for columns in (0, 20, LEAST_WIDTH, 80, 160):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main(command.split()) == 0
        shown[columns] = capsys.readouterr().out
    if "--help" not in command:  # whose widths are Typer's
        assert shown[0] == shown[80]
        assert shown[20] == shown[LEAST_WIDTH]
        assert all("\N{HORIZONTAL ELLIPSIS}" not in each for each in shown.values())
    assert all(each.strip() for each in shown.values())


def test_there_is_one_console() -> None:
    """All that is printed passes `terminal`; `str` of results has a width of its own."""
    makers = []
    for path in sorted(Path(arborsim.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Console"):
                makers.append(path.name)
    assert makers == ["results.py", "table.py"]
