"""The quick question: a workload from a few numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arborsim.cli.app import main
from arborsim.core.errors import UsageError
from arborsim.products.generate.lengths import generate_search
from arborsim.products.plan.ask import PlanOptions
from arborsim.products.plan.files import fingerprint
from arborsim.products.plan.log import _imported
from arborsim.products.plan.quick import QUICK, QuickOptions, parse_rate, quick_toml
from arborsim.products.plan.target import Target
from arborsim.products.plan.workload import Generated, Workload
from arborsim.products.plan.workload_file import parse_workload, read_workload, workload_of
from tests.plan.make import SMALL

ASKED: dict[str, Any] = {
    "model": "llama-3.1-8b", "gpus": "l40s, h100", "rate": "20/min", "p95": "60s",
    "tree": "depth=6,width=16,thought=80", "solved": 0.6,
}  # fmt: skip
FLAGS = [
    "plan", "--model", "llama-3.1-8b", "--gpu", "l40s,h100", "--rate", "20/min", "--p95", "60s",
    "--tree", "depth=6,width=16,thought=80", "--solved", "0.6",
]  # fmt: skip


def quick_tables(*, gpus: str, **asked: Any) -> dict[str, Any]:
    return QuickOptions(**asked).tables(gpus)


def quick_workload(**asked: Any) -> Workload:
    tables = quick_tables(**asked)
    return workload_of(tables, Path(), tables["name"])


def widths(**asked: Any) -> list[int]:
    """Thoughts on each level of the first search."""
    source = quick_workload(**{**ASKED, **asked}).mix[0].source
    assert isinstance(source, Generated)
    search = generate_search(source.spec, source.seed, 0)
    return [len(batch.thoughts) for batch in search.batches]


def test_the_workload_is_what_was_asked() -> None:
    workload = quick_workload(**ASKED)
    assert [each.name for each in workload.hardware] == ["l40s", "h100"]
    assert workload.arrivals.stated == pytest.approx(20 / 60)
    assert (workload.target.percentile, workload.target.search_s) == (95, 60)
    source = workload.mix[0].source
    assert isinstance(source, Generated)
    assert source.spec.solved == 0.6
    search = generate_search(source.spec, source.seed, 0)
    assert {thought.tokens for batch in search.batches for thought in batch.thoughts} == {80}
    assert (workload.searches, workload.runs) == (1000, 3)
    short = quick_workload(**ASKED, quick=True)
    assert {name: getattr(short, name) for name in QUICK} == QUICK


@pytest.mark.parametrize("width", [1, 2, 3, 5, 6, 7, 9, 16, 64])
def test_every_level_has_the_width(width: int) -> None:
    assert widths(tree=f"depth=5,width={width},thought=10") == [width] * 5


def test_branch_says_how_many_go_on() -> None:
    source = quick_workload(**{**ASKED, "tree": "depth=3,width=16,thought=10,branch=2"}).mix[0]
    assert isinstance(source.source, Generated)
    search = generate_search(source.source.spec, 0, 0)
    parents = {thought.parent for thought in search.batches[1].thoughts}
    assert len(parents) == 8


def test_a_chain_is_one_thought_and_ranges_are_uniform() -> None:
    asked = {
        **ASKED,
        "tree": None,
        "chain": "tokens=100..200",
        "prompt": "lognormal:median=50,sigma=1,most=99",
    }
    source = quick_workload(**asked).mix[0].source
    assert isinstance(source, Generated)
    drawn = [generate_search(source.spec, source.seed, n) for n in range(30)]
    lengths = [[t.tokens for batch in each.batches for t in batch.thoughts] for each in drawn]
    assert all(len(each) == 1 and 100 <= each[0] <= 200 for each in lengths)
    assert len({each[0] for each in lengths}) > 10
    same = [quick_workload(**{**asked, "chain": said}) for said in (8000, "8000", "tokens=8000")]
    assert same[0] == same[1] == same[2]


@pytest.mark.parametrize("more", [
    {}, {"tree": None, "chain": "tokens=8000"}, {"quick": True, "kv_dtype": "fp8", "rate": None},
    {"policies": ["full", {"use": "streaming-llm", "name": "sinks", "set": {"sinks": 8}}]},
    {"budgets": "0.5,2048", "weights": "fp8", "p95": None, "p50": 5},
])  # fmt: skip
def test_the_file_says_the_same(more: dict[str, Any]) -> None:
    asked = {**ASKED, **more}
    assert parse_workload(quick_toml(quick_tables(**asked)), Path()) == quick_workload(**asked)


def test_limits_have_percentiles_of_their_own() -> None:
    one = quick_workload(**{**ASKED, "ttft": "500ms", "tpot": 0.04}).target
    assert one == Target(95, 60, 0.04, 0.5)  # all of them together, for 95%
    assert len(one.groups) == 1
    two = quick_workload(**{**ASKED, "ttft": "500ms", "tpot": "40ms", "percentile": "tpot=99"})
    assert {each.kind: each.percentile for each in two.target.limits} == {
        "search": 95, "ttft": 95, "tpot": 99
    }  # fmt: skip
    assert [len(each) for each in two.target.groups] == [2, 1]
    alone = quick_workload(**{**ASKED, "p95": None, "tpot": "40ms", "percentile": 90})
    assert alone.target == Target(90, token_s=0.04)


def test_the_fewest_gpus_that_hold_the_model_are_taken() -> None:
    asked = {**ASKED, "model": "llama-3.1-70b", "gpus": "h100,h200"}
    assert [each.gpus for each in quick_workload(**asked).hardware] == [2, 2]
    assert [each.gpus for each in quick_workload(**asked, weights="fp8").hardware] == [1, 1]
    assert [each.gpus for each in quick_workload(**asked, tp="2,4").hardware] == [2, 4, 2, 4]


def test_options_replace_what_a_file_says(tmp_path: Path) -> None:
    (tmp_path / "w.toml").write_text(SMALL)
    path = str(tmp_path / "w.toml")
    said = PlanOptions(
        path, rate="3/s", ttft="1s", percentile="ttft=50", tp=2, dp=4, prices="h100=2.5,4090=1..2",
        policies="full", budgets="0.25", quick=True, gpus="h100", kv_dtype="fp8",
    ).asked_workload()  # fmt: skip
    assert said.arrivals.stated == 3
    assert said.target == Target(90, 20, 0.06, 1.0, {"ttft": 50})
    assert [(each.gpus, each.price_per_hour) for each in said.hardware] == [(2, (5.0, 5.0))]
    assert said.prices.of("rtx4090") == (1.0, 2.0)
    assert (said.replicas, [each.text for each in said.budgets]) == (4, ["0.25"])
    assert {name: getattr(said, name) for name in QUICK} == QUICK
    assert [each.name for each in said.policies] == ["full"]


def test_a_log_is_planned_as_it_is(tmp_path: Path) -> None:
    """Requests arrive as recorded, faster or slower by --rate; a resumed plan knows them again."""
    rows = [
        f"2023-11-16 18:17:{second:02d}.0000000,{100 + second},20" for second in range(0, 60, 2)
    ]
    log = tmp_path / "azure.csv"
    log.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    asked = {
        "model": "llama-3.1-8b", "gpus": "h100", "ttft": "1s", "log": str(log), "policies": "full",
    }  # fmt: skip
    found = quick_workload(**asked)
    assert (found.noun, found.episodes()) == ("requests", [30])
    assert found.arrivals.stated == pytest.approx(29 / 58)
    assert quick_workload(**asked, rate="3/s").arrivals.stated == pytest.approx(3)
    before = fingerprint(found)
    _imported.cache_clear()
    again = quick_workload(**asked)
    assert again.mix[0].source != found.mix[0].source
    assert fingerprint(again) == before
    assert parse_workload(quick_toml(quick_tables(**asked)), Path()).mix == again.mix


@pytest.mark.parametrize(
    ("said", "per_s"),
    [("20/min", 1 / 3), ("0.5/s", 0.5), ("1200/h", 1 / 3), ("1200 per hour", 1 / 3),
     (" 2 / sec ", 2), ("20 searches/minute", 1 / 3), ("1e3 per days", 1000 / 86400), (0.25, 0.25),
     ("4.8", 4.8)],
)  # fmt: skip
def test_rates(said: str | float, per_s: float) -> None:
    assert parse_rate(said) == pytest.approx(per_s)


@given(st.floats(0.001, 1e6), st.sampled_from([("s", 1), ("min", 60), ("h", 3600)]))
def test_rates_of_any_size(number: float, unit: tuple[str, int]) -> None:
    assert parse_rate(f"{number!r}/{unit[0]}") == pytest.approx(number / unit[1])


@pytest.mark.parametrize(
    "said", ["1 min", "1min", "60 seconds", "60sec", "1 minute", "60000 ms", 60]
)
def test_times(said: str | float) -> None:
    assert quick_workload(**{**ASKED, "p95": said}).target.search_s == 60


@pytest.mark.parametrize(("wrong", "words"), [
    ({"rate": "twenty"}, "rate must be searches per time, such as 20/min"),
    ({"tp": "2,many"}, "tp must be whole numbers by comma (1,2,4), or auto"),
    ({"tp": 3}, "the 32 heads of llama-3.1-8b cannot be divided among 3 GPUs"),
    ({"percentile": "99,x"}, "percentile must be a number such as 99, or ttft=99,tpot=90"),
    ({"percentile": "tpto=99"}, "did you mean tpot"),
    ({"ttft": "500"}, "ttft: must be a time with its unit"),
    ({"prices": "h100"}, "price: 'h100' should be name=number"),
    ({"prices": "h100=cheap"}, "price: h100 must cost a number an hour"),
    ({"prices": "h10=2"}, "did you mean h100"),
    ({"rate": "20/fortnight"}, "not '20/fortnight'"),
    ({"rate": "0/s"}, "rate must be above 0"),
    ({"rate": np.inf}, "rate must be above 0 and finite"),
    ({"p95": "60"}, 'p95: must be a time with its unit'),
    ({"p95": None}, "the latency target is missing"),
    ({"p50": "1s"}, "p50 and p95 are given: keep one"),
    ({"tree": None}, "what is searched is missing"),
    ({"chain": 8000}, "tree and chain are given: keep one"),
    ({"tree": "depth=6,width=16"}, "tree: thought must be given"),
    ({"tree": "depth=6,width=16,thougt=80"}, "did you mean thought?"),
    ({"tree": "depth=6,width=16,thought=80,width=4"}, "tree has width twice"),
    ({"tree": "6,16,80"}, "tree: '6' should be name=number"),
    ({"tree": "depth=6,width=16,thought=eighty"}, "tree: thought: it must be a whole number"),
    ({"tree": "depth=6,width=16,thought=80,branch=5"}, "branch must divide the width, 16"),
    ({"tree": "depth=6,width=4..8,thought=80"}, "width must be a whole number"),
    ({"tree": "depth=6,width=16,thought=0"}, "thought_tokens must be in [1,"),
    ({"gpus": "l40x"}, "did you mean l40s"),
    ({"gpus": "MI300X"}, "unknown GPU 'MI300X': did you mean h200? (another one is a file"),
    ({"gpus": "NVIDIA GB200"}, "did you mean b200?"),
    ({"gpus": "l4"}, "arborsim hardware import"),
    ({"model": "meta-llama/Llama-3.1-8B-Instruct"}, "did you mean llama-3.1-8b?"),
    ({"policies": "h2o"}, "policy h2o reads"),
    ({"solved": 1.5}, "solved must be a share in [0, 1]"),
    ({"trace": "a.parquet", "tree": None}, "solved belongs to a tree or chain"),
    ({"prompt": "long"}, "prompt: it must be a whole number"),
    ({"kv_dtype": "fp9"}, "fp9"),
])  # fmt: skip
def test_what_is_wrong_is_one_line(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as raised:
        quick_workload(**{**ASKED, **wrong})
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_command_writes_a_file_to_go_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep").mkdir()
    assert main([*FLAGS, "--write", "deep/asked.toml"]) == 0
    assert "arborsim plan deep/asked.toml" in capsys.readouterr().out
    assert read_workload(Path("deep/asked.toml")) == quick_workload(**ASKED)
    assert main([*FLAGS, "--write", "-"]) == 0
    assert capsys.readouterr().out == Path("deep/asked.toml").read_text()


def test_a_trace_is_found_from_the_folder_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = Path("traces/game24-tot.parquet")
    flags = [
        "plan",
        "--model",
        "qwen3-8b",
        "--gpu",
        "h100",
        "--p99",
        "2 min",
        "--policy",
        "full,raas",
    ]
    assert main([*flags, "--trace", str(trace), "--write", str(tmp_path / "asked.toml")]) == 0
    (entry,) = read_workload(tmp_path / "asked.toml").mix
    assert isinstance(entry.source, Path)
    assert entry.source.samefile(trace)


def test_the_command_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    run = ["--searches", "40", "--runs", "1", "--policy", "full"]
    assert main([*FLAGS, *run]) == 0
    said = capsys.readouterr().out
    assert "per 1,000 solved searches at 0.333/s;" in " ".join(said.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("arguments", "words"), [
    (["plan"], "--model llama-3.1-8b --gpu l40s,h100"),
    (["plan", "--tree", "depth=6,width=16,thought=80"], "--model is missing"),
    (["plan", "--model", "llama-3.1-8b", "--p95", "9s"], "--gpu is missing"),
    (["plan", "w.toml", "--chain", "9"], "--chain asks without a file: w.toml says it itself"),
    (["plan", "w.toml", "--solved", "0.5"], "--solved asks without a file"),
    ([*FLAGS, "--write", "no/such/folder.toml"], "there is no directory no/such"),
])  # fmt: skip
def test_the_command_refuses_in_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1
