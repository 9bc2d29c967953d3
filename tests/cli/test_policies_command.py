"""`arborsim policies`: every policy is listed and explained, at any width."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from arborsim.cli.app import main
from arborsim.policies.registry import available, parameters
from arborsim.products.catalog.policies import (
    BASELINES,
    COMPOSITIONS,
    facts_of,
    short_paper,
    tier_code,
)


@pytest.mark.parametrize("columns", [80, 120, 160])
def test_the_list_fits_and_names_every_policy_once(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["policies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= columns
    for name in available():
        assert sum(line.split(" ")[0] == name for line in lines) == 1, name
    assert sum("what it does" in line for line in lines) == 1
    assert any("decides per" in line for line in lines) is (columns >= 140)
    assert not any("…" in line for line in lines)


@pytest.mark.parametrize("name", list(available()))
@pytest.mark.parametrize("columns", [80, 160])
def test_every_policy_is_explained(
    name: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["policies", name]) == 0
    shown = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= columns
    for block in ("score", "allocate", "place", "schedule", "recover"):
        assert f"\n  {block} " in shown
    for parameter in parameters(available()[name]):
        assert parameter in shown
    assert f"--policy {name} " in shown


def test_the_committed_page_is_what_the_policies_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies", "--markdown"]) == 0
    page = Path(__file__).parents[2] / "docs" / "policies.md"
    assert capsys.readouterr().out == page.read_text(), (
        "run `arborsim policies --markdown > docs/policies.md`"
    )


def test_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert main(["policies", "--json"]) == 0
    every = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert [one["name"] for one in every] == list(available())
    assert main(["policies", "hierarchy", "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert one in every
    (ratio,) = (p for p in one["parameters"] if p["name"] == "evict_ratio")
    assert (ratio["default"], ratio["allowed"]) == (0.03, "in [0, 1]")
    assert one["tiers"] == ["HBM", "DDR", "DDR_QUANTISED", "EVICTED"]


def test_families_and_codes() -> None:
    assert facts_of("h2o")["family"] == BASELINES
    assert facts_of("arbor-epi")["family"] == COMPOSITIONS
    assert facts_of("epikv")["family"].endswith("(EpiKV)")
    assert tier_code(facts_of("hierarchy")) == "H-Ddx"
    assert tier_code(facts_of("full")) == "H----"
    assert short_paper(facts_of("h2o")) == "Zhang et al. 2023"


def test_a_policy_of_ones_own_can_be_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\nsummary = "a summary"\n')
    assert main(["policies", str(file)]) == 0
    assert "a summary" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "says"),
    [("h2o", "kept"), ("rkv", "used, but not kept"), ("lag-kv-official", "ignored")],
)
def test_whether_a_budget_is_kept(name: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies", name]) == 0
    (line,) = (s for s in capsys.readouterr().out.splitlines() if s.startswith("  budget "))
    assert line.split(maxsplit=1)[1].startswith(says)
    assert facts_of(name)["keeps_budget"] is (name == "h2o")


def test_what_a_file_says_does_not_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = Path("arborsim/policies/compositions/staircase.toml").read_text()
    said = shipped.replace("precision once lost", "\\u001b]0;title\\u0007precision once lost")
    assert said != shipped
    (tmp_path / "mix.toml").write_text(said)
    assert main(["policies", str(tmp_path / "mix.toml")]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "\\x1b]0;title\\x07precision" in printed
