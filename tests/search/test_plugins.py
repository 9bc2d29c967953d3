"""Searches that users bring: by their class, or installed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from arborsim.cli.app import main
from arborsim.core import plugins
from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.plugins import find_plugin
from arborsim.policies.base import Policy
from arborsim.searches import find_search, make_search, search_names, search_options
from arborsim.searches.arms import arms_of, chosen_algorithms, recipe_for, split_settings
from arborsim.searches.walk import walk
from arborsim.trace.writer import TraceWriter
from tests.bank.banks import bank_columns, bank_info, random_bank

CODE = """
from dataclasses import dataclass
from typing import ClassVar

from arborsim.searches import Expansion, Search
from arborsim.searches.tot import TotBfs

@dataclass
class Surest(Search):
    '''Goes on with the thought that the model itself found most likely.'''

    name: ClassVar[str] = "surest"
    synchronous: ClassVar[bool] = True
    width_option: ClassVar[str] = "tries"
    tries: int = 4
    patient: bool = True
    order: str = "logprob"

    @property
    def slots(self):
        return self.tries

    def expand(self, frontier, width):
        new = [leaf for leaf in frontier if leaf.visits == 0 and leaf.expandable]
        if not new or (any(leaf.finished for leaf in frontier) and not self.patient):
            return Expansion(done=True)
        best = max(new, key=lambda leaf: (getattr(leaf, self.order), -leaf.node))
        return Expansion({best.node: width})

@dataclass
class Rebase(Surest):
    name: ClassVar[str] = "rebase"

@dataclass
class Narrow(TotBfs):
    name: ClassVar[str] = "narrow"
    keep: int = 1
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a module of searches; what was imported from it is forgotten."""
    (tmp_path / "surest_searches.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "surest_searches", raising=False)
    return tmp_path


@pytest.fixture
def installed(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The same, as installed package that names them."""
    metadata = here / "surest_searches-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: surest-searches\nVersion: 1.0")
    (metadata / "entry_points.txt").write_text(
        "[arborsim.searches]\nsurest = surest_searches:Surest\nnarrow = surest_searches:Narrow\n"
        "lost = surest_searches:Lost\nrebase = surest_searches:Surest\n"
        "[arborsim.policies]\nlost = surest_searches:Lost\nsurest = surest_searches:Surest\n"
    )
    monkeypatch.syspath_prepend(here)
    plugins._points.cache_clear()
    yield here
    plugins._points.cache_clear()


def test_a_class_by_its_place(here: Path) -> None:
    name = "surest_searches:Surest"
    assert name not in search_names()
    search = make_search(name, tries="3", patient="false")
    assert (search.name, search.slots, search.patient) == ("surest", 3, False)  # type: ignore[attr-defined]
    assert search_options(name) == {"tries": 4, "patient": True, "order": "logprob"}
    with pytest.raises(UnknownName, match=r"option of surest_searches:Surest 'trys'.*tries"):
        make_search(name, trys=3)
    with pytest.raises(UsageError, match="patient must be true or false, not 'maybe'"):
        make_search(name, patient="maybe")
    assert walk(search, random_bank(3)).model_calls >= 3


def test_installed_searches_have_names(installed: Path) -> None:
    assert {"surest", "narrow", "lost", "rebase"} <= set(search_names())
    assert "surest_searches" not in sys.modules, "names are known without an import"
    assert find_search("rebase").__module__ == "arborsim.searches.levels", "shipped ones win"
    assert find_search("surest").__name__ == "Surest"
    assert make_search("narrow", children=3).slots == 3
    with pytest.raises(UnknownName, match="did you mean surest"):
        find_search("sursest")
    with pytest.raises(UsageError, match="search 'lost' cannot be imported: AttributeError"):
        find_search("lost")
    with pytest.raises(UsageError, match="policy 'lost' cannot be imported: AttributeError"):
        find_plugin("policy", "lost", Policy, "arborsim.policies")
    with pytest.raises(UsageError, match="policy 'surest' is not a subclass"):
        find_plugin("policy", "surest", Policy, "arborsim.policies")


def test_a_width_is_declared(here: Path) -> None:
    name, narrow = "surest_searches:Surest", "surest_searches:Narrow"
    assert [arm.make().slots for arm in arms_of(name, [2, 8], {})] == [2, 8]
    assert [(arm.width, arm.make().slots) for arm in arms_of(name, [2, 8], {"tries": "5"})] == [
        (5, 5)
    ]
    assert [arm.make().slots for arm in arms_of(narrow, [2, 8], {})] == [2, 8]
    arms = recipe_for([narrow], [2]).arms
    assert [arm.make().slots for arm in arms] == [2, 8]  # and as it is by default


def test_settings_find_a_class(here: Path) -> None:
    name = "surest_searches:Surest"
    given = ["surest.tries=3", f"{name}.patient=false", "width=4", "recent=2"]
    options, rest = split_settings([name, "rebase"], given)
    assert options == {name: {"tries": "3", "patient": "false"}, "rebase": {"width": "4"}}
    assert rest == ["recent=2"]


def test_tables_need_names_that_differ(installed: Path) -> None:
    with pytest.raises(UsageError, match="has the same name: leave one out"):
        chosen_algorithms(["surest", "surest_searches:Surest"])
    with pytest.raises(UsageError, match="is called rebase, as one that ships with arborsim"):
        find_search("surest_searches:Rebase")
    assert chosen_algorithms(["surest", "rebase", "surest"]) == ["surest", "rebase", "surest"]


def write_bank(path: Path) -> Path:
    with TraceWriter(path, bank_info(embeddings=False)) as writer:
        for seed in range(3):
            writer.write_episode(bank_columns(seed, embeddings=False))
    return path


def test_worker_processes_import_it_again(here: Path) -> None:
    bank = write_bank(here / "bank.parquet")
    frames = []
    for workers in (1, 2):
        out = here / f"{workers}.csv"
        command = f"search {bank} --algorithm surest_searches:Surest,rebase --width 4"
        assert main(f"{command} --jobs {workers} --out {out}".split()) == 0
        frames.append(out.read_bytes())
    assert frames[0] == frames[1]
    rows = pd.read_csv(here / "1.csv")
    assert set(rows["algorithm"]) == {"surest", "rebase"}


def test_a_page_names_it(installed: Path) -> None:
    bank, page = write_bank(installed / "bank.parquet"), installed / "page.html"
    command = f"search {bank} --algorithm surest,surest_searches:Narrow,rebase --width 4"
    assert main([*command.split(), "--report", str(page)]) == 0
    text = page.read_text()
    assert "narrow" in text
    assert "surest at width 4 " in text or "surest comes back" in text


@pytest.mark.parametrize("command", ["search --help", "search {bank} --algorithm rebase"])
def test_nothing_is_imported_unasked(command: str, installed: Path) -> None:
    """An installed module that ends the process when it is imported does no harm."""
    (installed / "surest_searches.py").write_text("import os\nos._exit(7)\n")
    bank = write_bank(installed / "bank.parquet")
    code = f"from arborsim.cli.app import main; main({command.format(bank=bank).split()!r})"
    path = {"PYTHONPATH": ":".join(sys.path)}
    run = subprocess.run([sys.executable, "-c", code], env=path, capture_output=True, check=False)
    assert run.returncode == 0, run.stderr
