"""The register of claims that ships: every number from committed results, every claim covered."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pandas as pd
import pytest
from pandas.testing import assert_frame_equal
from scipy.stats import beta

from arborsim.core.tables import read_table
from benchmarks.register.claims import Paper, read_papers, to_frame
from benchmarks.register.tables import readme, with_summary

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "reports" / "claims"
AGAIN = "run `make claims`"

#: Tables and figures of each paper, by their highest number: all up to it exist.
TABLES = {"arborkv": 8, "arkv": 7, "epikv": 11, "ets": 2, "hierarchy": 18}
FIGURES = {"arborkv": 3, "arkv": 5, "epikv": 6, "ets": 3, "hierarchy": 11}
#: Numbers of abstracts and introductions, each as a pattern of what a row says.
HEADLINES = {
    "arborkv": (r"\b4(\.0)?\s?(x|times)", r"1\.2\s?%", r"\b256\b"),
    "arkv": (r"97(\.2)?\s?%|0\.972", r"\b4\s?(x|times)", r"14\.4\s?%", r"86(\.1)?\s?%"),
    "epikv": (r"\b16\s?(x|times)", r"2\.8\s?(x|times)", r"\b224\b", r"32\D{1,6}57\s?%", r"2\.9 GB"),
    "ets": (r"1\.8\s?(x|times)?", r"1\.4\s?(x|times)", r"\b2\s?%"),
    "hierarchy": (r"56\.5\s?%", r"\b91\s?%", r"\b71\s?%", r"\b5\D{1,6}7\s?%",
                  r"\b2(\.3)?\D{1,6}48 GB", r"\b90\s?%"),
}  # fmt: skip
_NUMBER = r"(?:\d+|[IVX]+)"
_PLACE = re.compile(rf"\b(Table|Figure)s?\s({_NUMBER}(?:\s?(?:,|and|to|-|–|, and)\s?{_NUMBER})*)")
_ROMAN = {"I": 1, "II": 2, "III": 3, "IV": 4, "V": 5, "VI": 6, "VII": 7}


@pytest.fixture(scope="module")
def papers() -> tuple[Paper, ...]:
    return read_papers(FOLDER, ROOT)


def places(where: str) -> Iterator[tuple[str, int]]:
    """``"Tables 3 to 5; Figure 1"`` -> (Table, 3), (Table, 4), (Table, 5), (Figure, 1)."""
    for kind, said in _PLACE.findall(where):
        numbers = [_ROMAN[n] if n in _ROMAN else int(n) for n in re.findall(_NUMBER, said)]
        between = re.findall(r",? ?and|,|to|-|–", said)
        yield kind, numbers[0]
        for before, sign, number in zip(numbers[:-1], between, numbers[1:], strict=True):
            first = before + 1 if sign in ("to", "-", "–") else number
            yield from ((kind, k) for k in range(first, number + 1))


def test_places_are_read_as_people_write_them() -> None:
    assert list(places("Tables 3 to 5 and 7; Figure 1")) == [
        ("Table", 3), ("Table", 4), ("Table", 5), ("Table", 7), ("Figure", 1)]  # fmt: skip
    assert list(places("Table II, Figure 3(a), abstract")) == [("Table", 2), ("Figure", 3)]
    assert list(places("Figures 10, 11, and 12")) == [("Figure", k) for k in (10, 11, 12)]
    assert list(places("section 4.2, abstract")) == []


# --- what is shown is what the raw results give ---


def test_the_table_is_what_the_sources_give(papers: tuple[Paper, ...]) -> None:
    stored, about = read_table(FOLDER / "claims.parquet")
    assert about["kind"] == "claims"
    made = to_frame(papers)
    assert_frame_equal(stored, made, rtol=1e-9, check_dtype=False, obj=f"claims.parquet; {AGAIN}")


def test_the_pages_are_those_of_the_table(papers: tuple[Paper, ...]) -> None:
    assert (FOLDER / "README.md").read_text() == readme(papers), AGAIN
    summary = ROOT / "docs" / "claims.md"
    assert summary.read_text() == with_summary(summary, papers), AGAIN


# --- two rows of each paper, worked out once more without the code under test ---


@cache
def raw(name: str) -> pd.DataFrame:
    return pd.read_parquet(ROOT / "reports" / name)


def answers(experiment: str, label: str, budget: str) -> pd.Series:
    """Right or wrong by problem; problems that could not be searched are left out."""
    rows = raw("quality/results.parquet")
    rows = rows[(rows["experiment"] == experiment) & (rows["label"] == label)]
    rows = rows[(rows["budget"] == budget) & rows["correct"].notna()]
    return rows.set_index("episode")["correct"].astype(int)


def of(name: str, **settings: object) -> pd.DataFrame:
    rows = raw(name)
    for column, value in settings.items():
        rows = rows[rows[column] == value]
    return rows


def h2o_collapses() -> tuple[float, int]:
    right = answers("cliff", "h2o, shared", "0.81")
    return right.sum() / len(right), len(right)


def epikv_requests() -> tuple[float, int]:
    rows = of("claims/epikv.parquet", experiment="requests", policy="epikv", tokens=32768)
    return rows["requests"].item(), 1


def hierarchy_transfers() -> tuple[float, int]:
    rows = of("claims/hierarchy.parquet", experiment="system", recall="stream",
              label="hierarchy 50% HBM, 10% evicted")["transfer_share"]  # fmt: skip
    return sum(rows) / len(rows), len(rows)


def ets_kv() -> tuple[float, int]:
    rows = of("claims/ets.parquet", experiment="depth", depth=10, width=256)
    rebase = rows[rows["algorithm"] == "rebase"].set_index("episode")["kv_tokens"]
    ets = rows[(rows["algorithm"] == "ets") & (rows["lambda_b"] == 2)].set_index("episode")
    assert sorted(rebase.index) == sorted(ets.index)
    return sum(rebase) / sum(ets["kv_tokens"]), len(rebase)


def ets_answers() -> tuple[float, int]:
    rows = of("search/results.parquet", bank="verifier-all", width=256, policy="full", swept="")
    right = rows.groupby("algorithm")["correct"].sum()
    problems = rows.groupby("algorithm")["episode"].nunique()
    assert problems["ets"] == problems["rebase"]
    return (right["ets"] - right["rebase"]) / problems["ets"], problems["ets"]


def arborkv_peak() -> tuple[float, int]:
    rows = of("quality/results.parquet", experiment="chain-tree", label="arborkv", budget="0.25",
              infeasible=False)  # fmt: skip
    return sum(rows["full_tokens"]) / sum(rows["peak_tokens"]), len(rows)


def arborkv_game24() -> tuple[float, int]:
    mine, full = answers("game24", "arborkv", "0.5"), answers("game24", "full", "1")
    both = [each for each in mine.index if each in full.index]
    return (mine[both].sum() - full[both].sum()) / len(both), len(both)


def arkv_quantised_all() -> tuple[float, int]:
    mine, full = answers("arkv", "arkv-quant", "0.97"), answers("arkv", "full", "1")
    both = sorted(set(mine.index) & set(full.index))
    return mine[both].sum() / full[both].sum(), len(both)


def arkv_quantised_share() -> tuple[float, int]:
    rows = of("claims/arkv.parquet", experiment="precision", policy="arkv", way="equations",
              budget="0.5")["quantised"]  # fmt: skip
    return rows.sum() / rows.count(), rows.count()


#: Id of a row, how the label of its number begins, and how to work it out from the raw results.
RECOMPUTED: dict[tuple[str, str], Callable[[], tuple[float, int]]] = {
    ("arborkv-abstract-peak-reduction", "full / ArborKV at 0.25, tokens at the peak"): arborkv_peak,
    ("arborkv-table-1-game24-half", "ArborKV less full retention"): arborkv_game24,
    ("arkv-table-2-quant-collapses", "base_quant by the equations / full"): arkv_quantised_all,
    ("arkv-table-7-quantised-share", "FP8 share of the tokens held"): arkv_quantised_share,
    ("epikv-section-4-1-collapse", "H2O (shared), 81%"): h2o_collapses,
    ("epikv-figure-6-requests", "budget of 2,048 tokens"): epikv_requests,
    ("hierarchy-figure-2-cliff", "H2O (shared), 69% of the generated tokens"): h2o_collapses,
    ("hierarchy-table-10-overhead", "transfers / time, 50% HBM, stream"): hierarchy_transfers,
    ("ets-table-1-kv-width-256", "REBASE / ETS, lambda_b 2: 10 levels"): ets_kv,
    ("ets-table-1-accuracy-kept", "ETS less REBASE, lambda_b 1: Game of 24"): ets_answers,
}


@pytest.mark.parametrize(("name", "label"), RECOMPUTED)
def test_rows_are_what_their_raw_results_say(name: str, label: str) -> None:
    stored, _ = read_table(FOLDER / "claims.parquet")
    found = stored[(stored["id"] == name) & stored["label"].str.startswith(label)]
    assert len(found) == 1, f"{name}: numbers whose label begins with {label!r}"
    row = found.iloc[0]
    value, n = RECOMPUTED[name, label]()
    assert row["ours"] == pytest.approx(value, rel=1e-9, abs=1e-12)
    assert row["n"] == n
    if row["interval"] == "Clopper-Pearson":
        right = round(value * n)
        ends = beta.ppf((0.025, 0.975), (right, right + 1), (n - right + 1, n - right))
        assert (row["low"], row["high"]) == pytest.approx(tuple(ends), rel=1e-6)
    elif row["interval"] != "none":
        assert row["low"] <= value <= row["high"]


def test_two_rows_of_each_paper_are_recomputed() -> None:
    for key in TABLES:
        prefix = f"{key}-"
        assert sum(name.startswith(prefix) for name, _ in RECOMPUTED) >= 2, key


# --- nothing is left out ---


def test_every_table_and_figure_of_every_paper_has_a_row(papers: tuple[Paper, ...]) -> None:
    missing = []
    for paper in papers:
        named = {place for row in paper.rows for place in places(row.claim.where)}
        every = {("Table", k + 1) for k in range(TABLES[paper.key])}
        every |= {("Figure", k + 1) for k in range(FIGURES[paper.key])}
        missing += [f"{paper.key}: {kind} {k}" for kind, k in sorted(every - named)]
        wrong = named - every
        assert not wrong, f"{paper.key} has no {sorted(wrong)}"
    assert not missing, missing


def test_every_headline_number_has_a_row(papers: tuple[Paper, ...]) -> None:
    for paper in papers:
        said = [f"{row.claim.claim} {row.claim.theirs}" for row in paper.rows]
        for pattern in HEADLINES[paper.key]:
            assert any(re.search(pattern, text) for text in said), f"{paper.key}: {pattern}"


def test_there_are_at_least_sixty_rows_of_five_papers(papers: tuple[Paper, ...]) -> None:
    assert {paper.key for paper in papers} == set(TABLES)
    assert sum(len(paper.rows) for paper in papers) >= 60


def test_commands_can_be_run(papers: tuple[Paper, ...]) -> None:
    """Scripts, modules and experiments that rows name exist."""
    experiments = importlib.import_module("benchmarks.quality_arms").EXPERIMENTS
    for paper in papers:
        for row in paper.rows:
            for command in filter(None, map(str.strip, row.claim.command.split(";"))):
                words = [w for w in shlex.split(command) if not re.fullmatch(r"[A-Z_]+=\S*", w)]
                if words[0] == "arborsim":
                    continue
                assert words[0] == "python", f"{row.claim.id}: {command}"
                if words[1] == "-m":
                    path = ROOT / f"{words[2].replace('.', '/')}.py"
                else:
                    path = ROOT / words[1]
                assert path.is_file(), f"{row.claim.id}: {command}"
                if path.name == "quality.py":
                    named = words[2 : next((k for k, w in enumerate(words) if w[0] == "-"), None)]
                    unknown = set(named) - set(experiments)
                    assert not unknown, f"{row.claim.id}: no experiment {unknown}"
