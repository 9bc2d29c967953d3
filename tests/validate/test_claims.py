"""Files of claims: numbers with intervals, and one line for whatever is wrong in a file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.core.documents import to_toml
from arborsim.core.errors import UsageError
from arborsim.core.statistics import clopper_pearson
from benchmarks.register.__main__ import main
from benchmarks.register.claims import COLUMNS, read_papers, to_frame
from benchmarks.register.numbers import Measured, Number, Sources, evaluate
from benchmarks.register.verdicts import FAIR, Judged, Lowered, Verdict, judge, kindest, lower

N = 40


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with raw results of two arms on the same problems."""
    rng = np.random.default_rng(1)
    base = rng.integers(50, 150, N)
    rows = pd.concat(
        [
            pd.DataFrame({
                "arm": arm, "budget": 0.5, "width": 16, "episode": np.arange(N),
                "tokens": base * times, "seconds": base * 0.01,
                "correct": pd.Series(rng.random(N) < share, dtype=object),
            })
            for arm, times, share in (("full", 2, 0.9), ("h2o", 1, 0.5))
        ],
        ignore_index=True,
    )  # fmt: skip
    rows.loc[rows["arm"].eq("h2o") & rows["episode"].lt(5), "correct"] = None  # could not run
    rows.to_parquet(tmp_path / "raw.parquet")
    rows.to_csv(tmp_path / "raw.csv", index=False)
    return tmp_path


def number(root: Path, **given: Any) -> Number:
    given = {"label": "ours", "source": "raw.parquet", "column": "tokens", **given}
    return evaluate(Measured(**given), Sources(root))


def rows_of(root: Path, arm: str) -> pd.DataFrame:
    frame = pd.read_parquet(root / "raw.parquet")
    return frame[frame["arm"] == arm].set_index("episode")


def test_a_share_is_of_those_that_were_judged(root: Path) -> None:
    found = number(root, statistic="share", column="correct", where={"arm": "h2o"})
    judged = rows_of(root, "h2o")["correct"].dropna().astype(bool)
    assert (found.n, found.ours) == (N - 5, judged.mean())
    assert (found.low, found.high) == clopper_pearson(int(judged.sum()), N - 5)


def test_a_ratio_is_of_means_over_pairs(root: Path) -> None:
    found = number(root, statistic="ratio", where={"arm": "full"}, against={"arm": "h2o"})
    assert found.ours == found.low == found.high == 2.0  # of every pair, so of every resample
    assert found.n == N
    columns = number(root, statistic="ratio", where={"arm": "h2o"}, over="seconds")
    assert columns.ours == pytest.approx(100)


def test_a_difference_of_answers_counts_pairs_of_which_both_were_judged(root: Path) -> None:
    found = number(root, statistic="difference", column="correct", where={"arm": "h2o"},
                   against={"arm": "full"})  # fmt: skip
    mine, theirs = (rows_of(root, arm)["correct"][5:].astype(bool) for arm in ("h2o", "full"))
    assert found.n == N - 5
    assert found.ours == pytest.approx(mine.mean() - theirs.mean())
    gained, lost = (
        clopper_pearson(int((a & ~b).sum()), N - 5, 0.975)
        for a, b in ((mine, theirs), (theirs, mine))
    )
    assert (found.low, found.high) == (gained[0] - lost[1], gained[1] - lost[0])


def test_equal_answers_still_have_an_interval(root: Path) -> None:
    found = number(root, statistic="difference", column="correct", where={"arm": "full"},
                   against={"budget": 0.5})  # fmt: skip
    assert found.ours == 0
    assert found.low < 0 < found.high


@pytest.mark.parametrize(
    ("statistic", "by_hand"),
    [("mean", np.mean), ("median", np.median), ("sum", np.sum), ("min", np.min), ("max", np.max)],
)
def test_statistics_of_one_column(root: Path, statistic: str, by_hand: Any) -> None:
    found = number(root, statistic=statistic, where={"arm": "h2o"})
    assert found.ours == by_hand(rows_of(root, "h2o")["tokens"])
    drawn = statistic in ("mean", "median")
    assert (not math.isnan(found.low)) == drawn
    assert found.interval == ("bootstrap" if drawn else "none")
    if drawn:
        assert found.low < found.ours < found.high


def test_counts_values_and_ranks(root: Path) -> None:
    assert number(root, statistic="count", column="", where={"arm": ["full", "h2o"]}).ours == 2 * N
    right = number(root, statistic="count", column="correct", where={"arm": "h2o"})
    assert (right.ours, right.n) == (rows_of(root, "h2o")["correct"].dropna().sum(), N - 5)
    one = number(root, statistic="value", where={"arm": "h2o", "episode": 3})
    assert one.ours == rows_of(root, "h2o")["tokens"][3]
    ranks = number(root, statistic="spearman", over="seconds", where={"arm": "h2o"})
    assert (ranks.ours, ranks.low, ranks.high) == (1.0, 1.0, 1.0)


def test_csv_and_parquet_say_the_same(root: Path) -> None:
    for statistic, column in (("share", "correct"), ("mean", "tokens")):
        asked = {"statistic": statistic, "column": column, "where": {"arm": "h2o"}}
        first, second = (number(root, source=f"raw.{end}", **asked) for end in ("csv", "parquet"))
        assert (first.ours, first.low, first.high) == (second.ours, second.low, second.high)


def test_rows_of_a_unit_are_drawn_together(tmp_path: Path) -> None:
    """Ten copies of a row say no more than one."""
    values = np.random.default_rng(2).normal(10, 2, 30)
    few = pd.DataFrame({"episode": range(30), "x": values})
    few.to_parquet(tmp_path / "few.parquet")
    pd.concat([few] * 10).to_parquet(tmp_path / "many.parquet")
    found = [number(tmp_path, source=f"{name}.parquet", statistic="mean", column="x")
             for name in ("few", "many")]  # fmt: skip
    assert found[0].low == pytest.approx(found[1].low)
    assert found[0].high == pytest.approx(found[1].high)
    assert (found[0].n, found[1].n) == (30, 300)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=40))
def test_intervals_hold_their_number(tmp_path_factory: Any, answers: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("raw")
    rows = [{"arm": arm, "episode": k, "correct": pair[arm]} for k, pair in enumerate(answers)
            for arm in (0, 1)]  # fmt: skip
    pd.DataFrame(rows).to_csv(folder / "raw.csv", index=False)
    asked = {"source": "raw.csv", "column": "correct", "where": {"arm": 0}}
    share = number(folder, statistic="share", **asked)
    less = number(folder, statistic="difference", against={"arm": 1}, **asked)
    for found in (share, less):
        assert found.low <= found.ours <= found.high
        assert found.n == len(answers)


# --- files ---


CLAIM = {
    "id": "paper-table-1",
    "where": "Table 1",
    "claim": "Half of the tokens are enough.",
    "theirs": "90% against 91%",
    "setting": "a large model",
    "needs": "large-model",
    "ground": "toy-model",
    "why": "Half are nearly enough.",
    "objection": "The model is small.",
    "command": "python make.py",
    "measured": [
        {"label": "H2O", "source": "raw.parquet", "where": {"arm": "h2o"}, "statistic": "share",
         "column": "correct", "unit": "%", "above": 0.1},
    ],
}  # fmt: skip


def changed(claim: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A claim with other values; None takes a key out, ``measured__key`` is of its first number."""
    made = {**claim, "measured": [dict(each) for each in claim["measured"]]}
    for key, value in changes.items():
        table, key = (
            (made["measured"][0], key[10:]) if key.startswith("measured__") else (made, key)
        )
        if value is None:
            del table[key]
        else:
            table[key] = value
    return made


def write(root: Path, *claims: dict[str, Any], name: str = "paper", head: str = "") -> Path:
    folder = root / "claims"
    folder.mkdir(exist_ok=True)
    text = head or f'name = "{name}"\ntitle = "A paper"\n'
    for each in claims:
        numbers = each.get("measured", [])
        text += "\n[[claim]]\n" + _inline({k: v for k, v in each.items() if k != "measured"})
        text += "".join("\n[[claim.measured]]\n" + _inline(number) for number in numbers)
    (folder / f"{name}.toml").write_text(text)
    return folder


def _inline(table: dict[str, Any]) -> str:
    """A table whose own tables are inline."""
    lines = []
    for key, value in table.items():
        inner = ", ".join(to_toml({k: v}).strip() for k, v in value.items()) if isinstance(
            value, dict) else ""  # fmt: skip
        lines.append(
            f"{key} = {{ {inner} }}\n" if isinstance(value, dict) else to_toml({key: value})
        )
    return "".join(lines)


def test_a_file_becomes_a_table(root: Path) -> None:
    silent = changed(CLAIM, id="b", ground=None, command=None, measured=None)
    twice = changed(CLAIM, id="c", value=[0.4, 0.6])
    twice["measured"].append({**twice["measured"][0], "label": "full", "where": {"arm": "full"}})
    papers = read_papers(write(root, CLAIM, silent, twice), root)
    assert [row.verdict for row in papers[0].rows] == [
        Verdict.IN_FORM, Verdict.NOT_TESTABLE, Verdict.IN_FORM]  # fmt: skip
    frame = to_frame(papers)
    assert tuple(frame.columns) == COLUMNS
    assert list(frame["label"]) == ["H2O", "", "H2O", "full"]
    assert list(frame["n"].isna()) == [False, True, False, False]
    assert list(frame["theirs_high"].dropna()) == [0.6, 0.6]
    assert set(frame["paper"]) == {"paper"}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a verdict of one's own": ({"verdict": "reproduced"}, "key of claim 'paper-table-1' 'verd"),
    "need": ({"needs": "large-modl"}, "needs: unknown needs 'large-modl': did you mean large-mod"),
    "why": ({"why": None}, "claim 'paper-table-1' why is missing"),
    "no measured": ({"measured": []}, "but measured is missing"),
    "no command": ({"command": None}, "claim 'paper-table-1': command is missing"),
    "no ground": ({"ground": None}, "claim 'paper-table-1': ground is missing"),
    "no bounds": ({"measured__above": None}, "above or below is missing: one number at least"),
    "bounds that leave nothing": ({"measured__below": 0.05}, "above 0.1 and below 0.05 leave noth"),
    "source": ({"measured__source": "no.parquet"}, "no.parquet: there is no such file"),
    "ending": ({"measured__source": "raw.json"}, "expected a .parquet or .csv file"),
    "filter": (
        {"measured__where": {"arm": "h20"}},
        "measured 1 ('H2O'): where.arm = 'h20' matches no row: there arm is 'full', 'h2o'"),
    "filter's column": ({"measured__where": {"amr": "h2o"}}, "unknown column of where 'amr'"),
    "column": ({"measured__column": "corect"}, "'corect': did you mean correct?"),
    "texts": ({"measured__column": "arm"}, "column arm holds texts, not numbers"),
    "share of numbers": ({"measured__column": "tokens"}, "tokens is not true or false"),
    "statistic": ({"measured__statistic": "avarage"}, "unknown statistic 'avarage'"),
    "ratio of what": ({"measured__statistic": "ratio"}, "a ratio needs against or over"),
    "value of many": ({"measured__statistic": "value"}, "where leaves 40 rows: a value is of one"),
    "pair": ({"measured__statistic": "mean", "measured__pair": ["seed"]}, "column of pair 'seed'"),
    "no pairs": (
        {"measured__statistic": "ratio", "measured__where": {"arm": "full", "episode": 1},
         "measured__against": {"arm": "h2o", "episode": 9}},
        "pair episode: the rows of where and against have none in common"),
    "raised": (
        {"lowered": {"to": "reproduced", "because": "we like it"}},
        "lowered to reproduced, but the numbers say in-form, which can be lowered to: undecided"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_one_line(
    root: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    changes, said = BAD[name]
    folder = write(root, changed(CLAIM, **changes))
    assert main([str(folder), "--root", str(root)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith(f"register: {folder / 'paper.toml'}: ")
    assert error.count("\n") == 1
    assert "Traceback" not in error


def test_ids_are_unique_among_papers(root: Path) -> None:
    write(root, CLAIM, name="first")
    with pytest.raises(
        UsageError, match=r"second\.toml: claim 'paper-table-1' id is taken .*first"
    ):
        read_papers(write(root, CLAIM, name="second"), root)


def test_a_file_without_a_head_or_claims(root: Path) -> None:
    with pytest.raises(UsageError, match=r"paper\.toml: title is missing"):
        read_papers(write(root, CLAIM, head='name = "x"\n'), root)
    with pytest.raises(UsageError, match=r"\[\[claim\]\] is missing"):
        read_papers(write(root), root)
    with pytest.raises(UsageError, match="no files of claims"):
        read_papers(root, root)


# --- verdicts ---


def test_a_number_that_is_near_is_reproduced(root: Path) -> None:
    measured = {
        "needs": "definition",
        "measured__statistic": "value",
        "measured__column": "tokens",
        "measured__unit": "",
        "measured__where": {"arm": "full", "episode": 0},
    }
    ours = float(rows_of(root, "full")["tokens"][0])
    fitting = (ours, 0.96 * ours, [0.5 * ours, 0.96 * ours])
    for value in (*fitting, 0.9 * ours, [1.1 * ours, 2 * ours]):
        (paper,) = read_papers(write(root, changed(CLAIM, value=value, **measured)), root)
        expected = Verdict.REPRODUCED if value in fitting else Verdict.IN_FORM
        assert paper.rows[0].verdict is expected


#: Ends of our interval, where the claim holds, the paper's number, need, ground, what differs; and
#: what follows.  Each was, in some form, a verdict that authors could not have accepted.
PLANTED: dict[str, tuple[tuple[Any, ...], Verdict]] = {
    "an interval of -4 to 12 points reproduces 1 to 3": (
        (-0.043, 0.117, 0.0, None, (0.009, 0.028), "language", "real-model", ""),
        Verdict.UNDECIDED),
    "a toy contradicts a claim about large models": (
        (-0.3, -0.1, 0.0, None, None, "large-model", "toy-model", ""), Verdict.NOT_TESTABLE),
    "a toy reproduces a claim about large models": (
        (0.96, 0.99, 0.9, None, (0.97, 0.97), "large-model", "toy-model", ""), Verdict.IN_FORM),
    "a contradiction with settings of our own": (
        (-0.3, -0.1, 0.0, None, None, "model", "toy-model", "the prompt is kept"),
        Verdict.NOT_TESTABLE),
    "a fair contradiction": (
        (1.0, 1.0, 2.0, None, (4.0, 4.0), "machine", "priced", ""), Verdict.CONTRADICTED),
    "the right direction at another size": (
        (1.28, 1.30, 1.0, None, (1.4, 1.4), "machine", "priced", ""), Verdict.IN_FORM),
    "the paper's number": (
        (1.35, 1.45, 1.0, None, (1.4, 1.4), "machine", "priced", ""), Verdict.REPRODUCED),
    "trees that were drawn say nothing of answers": (
        (-0.29, -0.08, 0.0, None, None, "large-model", "drawn-trees", ""), Verdict.NOT_TESTABLE),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_planted_verdicts(name: str) -> None:
    (low, high, above, below, value, need, ground, differs), expected = PLANTED[name]
    number = Judged((low + high) / 2, low, high, above, below, value or (math.nan, math.nan))
    assert judge([number], need, ground, differs) is expected


ends = st.floats(-2, 2, allow_nan=False)


@settings(max_examples=200, deadline=None)
@given(ends, ends, ends, st.sampled_from(sorted(FAIR)), st.sampled_from(sorted(FAIR["definition"])))
def test_verdicts_follow_the_interval(
    a: float, b: float, above: float, need: Any, ground: Any
) -> None:
    low, high = sorted((a, b))
    number = Judged((low + high) / 2, low, high, above, None)
    found, fair = judge([number], need, ground, ""), ground in FAIR[need]
    assert (found is Verdict.CONTRADICTED) == (fair and high < above)
    assert (found is Verdict.REPRODUCED) == (fair and low >= above)
    assert (found is Verdict.UNDECIDED) == (low < above <= high)
    wider = Judged(number.ours, low - 1, high + 1, above, None)
    if found is Verdict.UNDECIDED:
        assert judge([wider], need, ground, "") is Verdict.UNDECIDED
    own = judge([number], need, ground, "a setting of ours")
    assert own is not Verdict.CONTRADICTED


def test_the_kindest_reading_counts() -> None:
    assert kindest([Verdict.CONTRADICTED, Verdict.REPRODUCED]) is Verdict.REPRODUCED
    assert kindest([Verdict.CONTRADICTED, Verdict.NOT_TESTABLE]) is Verdict.NOT_TESTABLE
    assert kindest([Verdict.CONTRADICTED, Verdict.CONTRADICTED]) is Verdict.CONTRADICTED


@pytest.mark.parametrize("found", Verdict)
def test_a_person_may_only_lower(found: Verdict) -> None:
    """Neither to more agreement nor to more disagreement."""
    assert lower(found, None) is found
    for to in Verdict:
        if found is Verdict.CONTRADICTED:
            allowed = to in (Verdict.UNDECIDED, Verdict.NOT_TESTABLE)
        else:
            order = [each for each in Verdict if each is not Verdict.CONTRADICTED]
            allowed = to in order[order.index(found) + 1 :]
        if allowed:
            assert lower(found, Lowered(to, "a reason")) is to
        else:
            with pytest.raises(UsageError, match="but the numbers say"):
                lower(found, Lowered(to, "a reason"))
