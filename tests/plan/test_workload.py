"""Workload files: what they mean, and one clear line for everything that can be wrong."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.core.documents import to_toml
from arborsim.core.errors import UsageError
from arborsim.core.records import located
from arborsim.machine.machine import Machine, ServingOptions
from arborsim.policies import registry
from arborsim.products.calibrate.documents import read_calibration
from arborsim.products.generate.arrivals import ClientLoop, Poisson, Recorded
from arborsim.products.generate.lengths import Uniform, fixed, generate_search
from arborsim.products.plan import workload as module
from arborsim.products.plan.workload import Generated, Workload
from arborsim.products.plan.workload_file import (
    example_workload,
    parse_workload,
    read_workload,
    workload_of,
)
from arborsim.products.replay import answers
from arborsim.products.replay.run import Replay
from arborsim.products.traces.describe import describe
from arborsim.trace.reader import TraceReader

TRACES = Path(__file__).parents[2] / "traces"
MIX = """
[[mix]]
[mix.generated]
prompt_tokens = 30
thought_tokens = "uniform:low=2,high=6"
depth = 3
branching = 2
pruned = [0.5]
searches = 4
"""
TABLES = {
    "": "",
    "model": '[model]\nname = "llama-3.1-8b"\n',
    "mix": MIX,
    "arrivals": '[arrivals]\nkind = "poisson"\n',
    "candidates": '[candidates]\ngpus = ["h100"]\n',
    "target": '[target]\npercentile = 95\nsearch = "60 s"\n',
}


def text_with(**changed: str) -> str:
    """The smallest workload with tables replaced, or added."""
    top = changed.pop("top", "")
    return top + "\n" + "\n".join({**TABLES, **changed}.values())


def parsed(base: Path = TRACES, **changed: str) -> Workload:
    return parse_workload(text_with(**changed), base)


def test_the_smallest_workload_and_its_defaults() -> None:
    found = parsed()
    assert (found.searches, found.warm_up, found.runs, found.seed) == (1000, 100, 3, 0)
    (entry,) = found.mix
    assert (entry.name, entry.weight) == ("generated 1", 1.0)
    assert isinstance(entry.source, Generated)
    spec = entry.source.spec
    assert (spec.thought_tokens, spec.depth, spec.branching) == (Uniform(2, 6), fixed(3), fixed(2))
    assert (spec.first, spec.pruned, spec.finished, spec.solved) == (None, (0.5,), (0.0,), None)
    assert found.arrivals == Poisson(None)
    (candidate,) = found.candidates()
    assert candidate.policy.name == "full"
    assert candidate.budget is None  # full retention ignores budgets
    assert candidate.recall == "stage"
    assert candidate.hardware.price_per_hour is not None
    assert (found.target.percentile, found.target.search_s, found.target.token_s) == (95, 60, None)


def test_the_example_is_valid_and_shows_every_key(tmp_path: Path) -> None:
    text = example_workload()
    (tmp_path / "plan.toml").write_text(text)
    found = read_workload(tmp_path / "plan.toml")
    assert found.name == "reasoning service"
    assert [entry.shared_prompt_tokens for entry in found.mix] == [200, 0]
    assert [candidate.policy.name for candidate in found.candidates()] == 2 * [
        "full", *2 * ["64 sinks"]
    ]  # fmt: skip
    tables = [each for name, each in vars(module).items() if name.endswith("Table")]
    keys = [each.name for table in tables for each in fields(table)]
    keys += [*module.SERVING, "poisson", "recorded", "closed-loop"]
    assert len(keys) > 60
    assert [key for key in keys if key not in text] == []


def test_every_policy_of_the_example_runs_on_its_searches(tmp_path: Path) -> None:
    text = example_workload().replace("searches = 50 ", "searches = 1 ").replace("= 50\n", "= 1\n")
    found = parse_workload(text, tmp_path)
    assert found.episodes() == [1, 1]
    machine = Machine(found.hardware[0].profile, found.geometry)
    policies = [choice.policy for choice in (found.policies[0], found.policies[1])]
    for path in found.write_traces(tmp_path):
        job = Replay([path], policies, found.budgets[-1:], machine, quality=False)
        assert len(job.run().episodes) == 2


_OTHERS = ("kind", "format", "scale", "clients", "think_s")


def test_what_the_example_comments_out_is_its_default_or_works() -> None:
    """Uncomment each ``# key = value`` of the example alone: the file stays valid."""
    lines = example_workload().splitlines()
    tried = 0
    for number, line in enumerate(lines):
        head, equals, _ = line.removeprefix("# ").partition(" = ")
        if not line.startswith("# ") or not equals or not head.isidentifier():
            continue
        if head in (*_OTHERS, "trace", "log", "file", "calibrations"):
            continue  # other ways to say what stands above, or files of the user's
        parse_workload("\n".join([*lines[:number], line[2:], *lines[number + 1 :]]), Path())
        tried += 1
    assert tried == 25


def test_candidates_are_all_combinations_with_prices_for_all_gpus() -> None:
    found = parsed(
        candidates="""[candidates]
        gpus = ["h100", "rtx4090"]
        hosts = ["ddr5-2tb", "desktop-64gb"]
        tensor_parallel = [1, 4]
        policies = ["full", {use = "streaming-llm", name = "four", set = {sinks = 4}}]
        budgets = [0.5, 2048]
        recalls = ["stage", "near"]
        """,
        prices='[prices]\ncurrency = "EUR"\n[prices.per_hour]\nh100 = [2, 3.5]\nrtx4090 = 0.3\n',
    )
    assert [hardware.name for hardware in found.hardware] == [
        "h100+ddr5-2tb", "4x h100+ddr5-2tb", "h100+desktop-64gb", "4x h100+desktop-64gb",
        "rtx4090+ddr5-2tb", "4x rtx4090+ddr5-2tb", "rtx4090+desktop-64gb",
        "4x rtx4090+desktop-64gb",
    ]  # fmt: skip
    prices = [hardware.price_per_hour for hardware in found.hardware[:2]]
    assert prices == [(2.0, 3.5), (8.0, 14.0)]
    assert found.hardware[-1].price_per_hour == (1.2, 1.2)
    assert found.prices.currency == "EUR"
    candidates = found.candidates()
    assert len(candidates) == 8 * (1 + 2) * 2
    assert len(set(map(repr, candidates))) == len(candidates)
    names = {(c.policy.name, c.budget and c.budget.text) for c in candidates}
    assert names == {("full", None), ("four", "0.5"), ("four", "2048")}


def test_serving_options() -> None:
    found = parsed(
        x='[serving]\nmax_searches = 8\npreemption = "recompute"\nprefix_sharing = false\n'
        "prefix_block_tokens = 32\nprefix_host_bytes = 64_000_000_000\nprefix_load_tokens = 1\n"
        "watermark = 0.05\nnvme_bytes = 1000000000000\npage_size = 16\ntree_attention = false\n"
    )
    assert found.serving == ServingOptions(
        max_searches=8, preemption="recompute", prefix_sharing=False, watermark=0.05,
        prefix_block_tokens=32, prefix_host_bytes=64 * 10**9, prefix_load_tokens=1,
        nvme_bytes=10**12,
    )  # fmt: skip
    assert (found.page_tokens, found.tree_attention) == (16, False)
    assert (parsed().serving, parsed().page_tokens) == (ServingOptions(), 1)


def test_a_narrower_cache_is_another_geometry() -> None:
    both = parsed(model='[model]\nname = "llama-3.1-8b"\nkv_dtype = "fp8"\nweights = "int4"\n')
    assert both.geometry.name == "llama-3.1-8b, int4 weights, fp8 KV"
    assert both.geometry.weight_bytes < parsed().geometry.weight_bytes / 2
    found = parsed(model='[model]\nname = "llama-3.1-8b"\nkv_dtype = "fp8"\n')
    assert found.geometry.kv_bytes_per_token == 65_536
    assert found.geometry.weight_bytes == parsed().geometry.weight_bytes


def test_a_gpu_without_a_price_is_a_candidate_without_costs() -> None:
    found = parsed(candidates='[candidates]\ngpus = ["a6000"]\n')
    assert found.hardware[0].price_per_hour is None


def test_files_are_found_next_to_the_workload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "plans"
    folder.mkdir()
    (folder / "lengths.txt").write_text("3\n5\n")
    (folder / "mine.toml").write_text('name = "mine"\n[score]\nuse = "position"\n')
    (folder / "gpu.toml").write_text('base = "h100"\nname = "big"\nhbm_bytes = 200000000000\n')
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({
        "model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 100,
    }))  # fmt: skip
    (folder / "plan.toml").write_text(text_with(
        model='[model]\nname = "./model"\n',
        mix=MIX.replace("= 30", '= "file:lengths.txt"'),
        candidates='[candidates]\ngpus = ["gpu.toml"]\n'
        'policies = [{use = "mine.toml", set = {protect.recent = 8}}]\n',
        prices="[prices.per_hour]\nbig = 9.5\n",
    ))  # fmt: skip
    monkeypatch.chdir(tmp_path)
    found = read_workload("plans/plan.toml")
    assert found.name == "plan"
    assert found.geometry.layers == 2
    assert found.hardware[0].name == "big"
    assert found.hardware[0].price_per_hour == (9.5, 9.5)
    assert found.policies[0].name == "mine"
    assert found.policies[0].policy.protect.recent == 8  # type: ignore[attr-defined]


def test_arrivals_of_each_kind(tmp_path: Path) -> None:
    log = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.0,30,4\n" \
          "2023-11-16 18:15:48.0,30,4\n"  # fmt: skip
    (tmp_path / "log.csv").write_text(log)

    def arrivals(table: str) -> Any:
        return parsed(tmp_path, arrivals=f"[arrivals]\n{table}\n").arrivals

    assert arrivals('kind = "poisson"\nrate_per_s = 2') == Poisson(2.0)
    recorded = arrivals('kind = "recorded"\nfile = "log.csv"\nscale = 4')
    assert recorded == Recorded((0.0, 2.0), 4.0)
    assert recorded.stated == 2.0
    assert arrivals('kind = "closed-loop"\nclients = 7') == ClientLoop(7, 0.0)
    assert arrivals('kind = "closed-loop"\nthink_s = 1.5') == ClientLoop(None, 1.5)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("50 ms", 0.05), ("1.5s", 1.5), ("2 min", 120.0), ("1e-1 h", 360.0)],
)
def test_times_have_units(given: str, seconds: float) -> None:
    found = parsed(target=f'[target]\npercentile = 50\ntoken = "{given}"\n')
    assert found.target.token_s == pytest.approx(seconds)


def test_the_mix_becomes_traces_and_draws_that_every_candidate_shares(tmp_path: Path) -> None:
    mix = MIX + f'[[mix]]\nweight = 3\ntrace = "{TRACES / "chain-tree.parquet"}"\n'
    found = parsed(top="searches = 50\nwarm_up = 5\nseed = 3\n", mix=mix)
    generated, recorded = found.write_traces(tmp_path)
    assert recorded == TRACES / "chain-tree.parquet"
    facts = describe(TraceReader(generated))
    assert found.episodes() == [4, TraceReader(recorded).num_episodes]
    source = found.mix[0].source
    assert isinstance(source, Generated)
    tokens = [generate_search(source.spec, 3, number).num_tokens for number in range(4)]
    assert [e.prompt_tokens + e.generated_tokens for e in facts.episodes] == tokens
    again = generated.read_bytes()
    assert found.write_traces(tmp_path)[0].read_bytes() == again
    draws = found.draws(found.seeds()[1])
    assert found.seeds() == [3, 4, 5]
    assert len(draws) == 50
    assert 0 < (draws[:, 0] == 0).sum() < 25
    np.testing.assert_array_equal(draws[:, 0], found.draws(4)[:, 0])
    longer = found.with_run_length(80, 0, 1)
    np.testing.assert_array_equal(longer.draws(4)[:50, 1], draws[:, 1])


WRONG = {
    "no TOML": ({"top": "seed = \n"}, "this is not valid TOML"),
    "an unknown key": ({"top": "sead = 1\n"}, "unknown key or table 'sead': did you mean seed"),
    "an unknown table": ({"x": "[targets]\n"}, "'targets': did you mean target"),
    "no model": ({"model": ""}, "[model] is missing; arborsim plan"),
    "no candidates": ({"candidates": ""}, "[candidates] is missing; arborsim plan"),
    "no table": ({"model": "", "top": "model = 3\n"}, "[model] must be a table, not 3"),
    "seed": ({"top": "seed = -1\n"}, "seed must be at least 0, not -1"),
    "digits": ({"top": "seed = 1" + 5000 * "0" + "\n"}, "this is not valid TOML: "),
    "too many": ({"top": "searches = 1" + 400 * "0" + "\n"},
                 "searches must be at most 10000000, not 1000"),
    "no float": ({"target": "[target]\npercentile = 1" + 400 * "0" + '\nsearch = "1 s"'},
                 "[target] percentile must be a finite number, not 1000"),
    "searches": ({"top": "searches = 1e3\n"}, "searches must be a whole number, not 1000.0"),
    "warm-up": ({"top": "searches = 9\nwarm_up = 9\n"},
                "warm_up = 9 leaves none of the 9 searches per run"),
    "runs": ({"top": "runs = 0\n"}, "runs must be at least 1, not 0"),
    "name": ({"top": "name = ''\n"}, "name must be a text, not ''"),
    "model": ({"model": '[model]\nname = "llama-3.1-9b"'},
              "[model] name: unknown model 'llama-3.1-9b': did you mean llama-3.1-8b"),
    "cache": ({"model": '[model]\nname = "llama-3.1-8b"\nkv_dtype = "fp9"'},
              "[model] kv_dtype: unknown type of a KV cache 'fp9': did you mean fp8"),
    "weights": ({"model": '[model]\nname = "llama-3.1-8b"\nweights = "int3"'},
                "[model] weights: unknown type of weights 'int3': did you mean int4"),
    "model file": ({"model": '[model]\nname = "./none/config.json"'},
                   "none/config.json: cannot be read (No such file"),
    "model's name": ({"model": "[model]"}, "[model] name is missing"),
    "no mix": ({"mix": ""}, "[[mix]] is missing"),
    "an empty mix": ({"mix": "", "top": "mix = []\n"}, "[[mix]] is empty: name at least one"),
    "mix as a table": ({"mix": '[mix]\ntrace = "a"'}, "[[mix]] must be a list of tables, not {"),
    "both sources": ({"mix": MIX.replace("[[mix]]", '[[mix]]\ntrace = "a"')},
                     "[[mix]] 1: it needs one of trace, log and generated"),
    "no source": ({"mix": "[[mix]]\nweight = 2"},
                  "[[mix]] 1: it needs one of trace, log and generated"),
    "weight": ({"mix": MIX.replace("[[mix]]", "[[mix]]\nweight = -2")},
               "[[mix]] 1 weight must be above 0, not -2"),
    "no weight": ({"mix": MIX.replace("[[mix]]", "[[mix]]\nweight = 0")},
                  "[[mix]] 1 weight must be above 0, not 0"),
    "shared": ({"mix": MIX.replace("[[mix]]", "[[mix]]\nshared_prompt_tokens = 1.5")},
               "[[mix]] 1 shared_prompt_tokens must be a whole number, not 1.5"),
    "weight nan": ({"mix": MIX.replace("[[mix]]", "[[mix]]\nweight = nan")},
                   "[[mix]] 1 weight must be a finite number, not nan"),
    "trace": ({"mix": '[[mix]]\ntrace = "none.parquet"'},
              "none.parquet: no such file; make a trace with 'arborsim record'"),
    "not a trace": ({"mix": '[[mix]]\ntrace = "README.md"'}, "this is not a Parquet file"),
    "equal names": ({"mix": 2 * MIX.replace("[[mix]]", "[[mix]]\nname = 'a'")},
                    "[[mix]] 2: there is another entry called 'a'"),
    "generated": ({"mix": MIX.replace("depth", "dept")},
                  "unknown key of [[mix]] 1 generated 'dept': did you mean depth?"),
    "prompt": ({"mix": MIX.replace("prompt_tokens = 30", "")},
               "[[mix]] 1 generated prompt_tokens is missing"),
    "depth": ({"mix": MIX.replace("depth = 3", "depth = 0")},
              "[[mix]] 1 generated: depth must be in [1, 4096], not 0"),
    "distribution": ({"mix": MIX.replace("low=2,", "")},
                     "[[mix]] 1 generated thought_tokens: uniform low is missing"),
    "shares": ({"mix": MIX.replace("[0.5]", "[0.5, 7]")},
               "[[mix]] 1 generated: pruned must be shares in [0, 1]"),
    "no shares": ({"mix": MIX.replace("[0.5]", "'half'")},
                  "generated pruned must be a number or a list of numbers, not 'half'"),
    "rewards": ({"mix": MIX + "rewards = 'uniformly'"},
                "[[mix]] 1 generated rewards: unknown rewards 'uniformly': did you mean uniform?"),
    "signals": ({"candidates": '[candidates]\ngpus = ["h100"]\npolicies = ["raas"]'},
                "[[mix]] 1 (generated 1): policy raas reads attention, which generated searches do "
                "not have: record a trace with --capture signals and name it"),
    "signals of a trace": (
        {"mix": '[[mix]]\ntrace = "chain-tree.parquet"',
         "candidates": '[candidates]\ngpus = ["h100"]\npolicies = ["rkv"]'},
        "[[mix]] 1 (chain-tree): policy rkv reads keys and queries, which "),
    "kind": ({"arrivals": '[arrivals]\nkind = "poison"'},
             "[arrivals] kind: unknown kind 'poison': did you mean poisson?"),
    "no kind": ({"arrivals": "[arrivals]\n"}, "[arrivals] kind is missing"),
    "rate": ({"arrivals": '[arrivals]\nkind = "poisson"\nrate_per_s = -0.5'},
             "[arrivals] rate_per_s must be above 0, not -0.5"),
    "rate as a text": ({"arrivals": '[arrivals]\nkind = "poisson"\nrate_per_s = "2"'},
                       "[arrivals] rate_per_s must be a number, not '2'"),
    "other kind": ({"arrivals": '[arrivals]\nkind = "poisson"\nclients = 3'},
                   '[arrivals]: clients belongs to kind = "closed-loop", not to "poisson"'),
    "clients": ({"arrivals": '[arrivals]\nkind = "closed-loop"\nclients = 0'},
                "[arrivals] clients must be at least 1, not 0"),
    "think": ({"arrivals": '[arrivals]\nkind = "closed-loop"\nthink_s = -1'},
              "[arrivals] think_s must be at least 0, not -1"),
    "no log": ({"arrivals": '[arrivals]\nkind = "recorded"'}, "[arrivals] file is missing"),
    "log": ({"arrivals": '[arrivals]\nkind = "recorded"\nfile = "none.csv"'},
            "none.csv: cannot be read"),
    "format": ({"arrivals": '[arrivals]\nkind = "recorded"\nfile = "a"\nformat = "azur"'},
               "[arrivals] format: unknown format 'azur': did you mean azure?"),
    "scale": ({"arrivals": '[arrivals]\nkind = "recorded"\nfile = "a"\nscale = 0'},
              "[arrivals] scale must be above 0, not 0"),
    "GPU": ({"candidates": '[candidates]\ngpus = ["h10"]'},
            "[candidates] gpus: unknown GPU 'h10': did you mean"),
    "no GPU": ({"candidates": "[candidates]\ngpus = []"},
               "[candidates] gpus is empty: name at least one"),
    "GPU as a text": ({"candidates": '[candidates]\ngpus = "h100"'},
                      "[candidates] gpus must be a list of texts, not 'h100'"),
    "GPU twice": ({"candidates": '[candidates]\ngpus = ["h100", "h100-sxm"]'},
                  "[candidates] gpus: h100 is named twice"),
    "host": ({"candidates": '[candidates]\ngpus = ["h100"]\nhosts = ["ddr5-2t"]'},
             "[candidates] hosts: unknown host 'ddr5-2t': did you mean ddr5-2tb"),
    "group": ({"candidates": '[candidates]\ngpus = ["h100"]\ntensor_parallel = [3]'},
              "tensor_parallel: the 32 heads of llama-3.1-8b cannot be divided among 3 GPUs"),
    "group 0": ({"candidates": '[candidates]\ngpus = ["h100"]\ntensor_parallel = [0]'},
                "[candidates] tensor_parallel item 1 must be at least 1, not 0"),
    "policy": ({"candidates": '[candidates]\ngpus = ["h100"]\npolicies = ["h20"]'},
               "[candidates] policies: unknown policy 'h20': did you mean h2o"),
    "policy file": ({"candidates": '[candidates]\ngpus = ["h100"]\npolicies = ["none.toml"]'},
                    "none.toml: no such policy file"),
    "policy twice": ({"candidates": '[candidates]\ngpus = ["h100"]\npolicies = ["full", "full"]'},
                     "there is another one called 'full'; give it a name"),
    "setting": ({"candidates": '[candidates]\ngpus = ["h100"]\n'
                 'policies = [{use = "streaming-llm", set = {sink = 3}}]'},
                "[candidates] policies: unknown parameter of streaming-llm 'sink': did you mean"),
    "value": ({"candidates": '[candidates]\ngpus = ["h100"]\n'
               'policies = [{use = "streaming-llm", set = {sinks = -3}}]'},
              "sinks must be at least 0, not -3"),
    "number as a policy": ({"candidates": '[candidates]\ngpus = ["h100"]\npolicies = [3]'},
                           "[candidates] policies item 1 must be a text or a table, not 3"),
    "budget": ({"candidates": '[candidates]\ngpus = ["h100"]\nbudgets = [-1]'},
               "[candidates] budgets item 1: budget '-1' must be above 0"),
    "budget twice": ({"candidates": '[candidates]\ngpus = ["h100"]\nbudgets = [0.5, 0.50]'},
                     "[candidates]: budgets names 0.5 twice"),
    "recall": ({"candidates": '[candidates]\ngpus = ["h100"]\nrecalls = ["streaming"]'},
               "[candidates] recalls item 1: unknown recall mode 'streaming': did you mean stream"),
    "no unit": ({"target": "[target]\npercentile = 95\nsearch = 60"},
                '[target] search must be a time with its unit, such as "60 s" or "50 ms", not 60'),
    "unit": ({"target": '[target]\npercentile = 95\nsearch = "60 parsec"'},
             "[target] search must be a time with its unit, such as"),
    "no time": ({"target": '[target]\npercentile = 95\ntoken = "0 ms"'},
                "[target] token must be above 0"),
    "no limit": ({"target": "[target]\npercentile = 95"}, '[target]: it needs ttft = "500 ms"'),
    "percentile": ({"target": '[target]\npercentile = 100\nsearch = "1 s"'},
                   "[target] percentile must be below 100, not 100"),
    "percentile of what": ({"target": '[target]\npercentile = {serch = 9}\nsearch = "1 s"'},
                           "did you mean search"),
    "tpot twice": ({"target": '[target]\ntpot = "1 s"\ntoken = "1 s"'}, "tpot and token"),
    "serving": ({"x": "[serving]\ntensor_parallel = 2"},
                "unknown key of [serving] 'tensor_parallel': "),
    "preemption": ({"x": '[serving]\npreemption = "swop"'},
                   "unknown preemption 'swop': did you mean swap"),
    "watermark": ({"x": "[serving]\nwatermark = 2"}, "[serving] watermark must be below 1, not 2"),
    "flag": ({"x": "[serving]\nprefix_sharing = 1"},
             "[serving] prefix_sharing must be true or false, not 1"),
    "page": ({"x": "[serving]\npage_size = 0"}, "[serving] page_size must be at least 1, not 0"),
    "price": ({"x": "[prices.per_hour]\nh100 = -1"},
              "[prices.per_hour] h100 must be a price of at least 0"),
    "prices": ({"x": "[prices.per_hour]\nh100 = [3, 2]"}, "or the lowest and the highest"),
    "price of another": ({"x": "[prices.per_hour]\nh10 = 1"},
                         "unknown key of [prices.per_hour] 'h10': did you mean h100"),
    "currencies": ({"x": '[prices]\ncurrency = "EUR"'},
                   "[prices] currency is EUR, but the price of h100 is listed in USD"),
    "price list": ({"x": '[prices]\nfile = "none.toml"'}, "none.toml: cannot be read (No such"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named_in_one_line(case: str, tmp_path: Path) -> None:
    changed, message = WRONG[case]
    file = tmp_path / "plan.toml"
    text = text_with(**changed).replace('"chain-', f'"{TRACES}/chain-')
    file.write_text(text.replace('"README.md"', f'"{TRACES}/README.md"'))
    with pytest.raises(UsageError) as caught:
        read_workload(file)
    shown = str(caught.value)
    assert shown.startswith(f"{file}: ")
    assert message in shown
    assert "\n" not in shown


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.toml: cannot be read \(No such file"):
        read_workload(tmp_path / "none.toml")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(UsageError, match="it is not UTF-8 text"):
        read_workload(tmp_path / "latin.toml")


anything = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5),
    st.lists(st.one_of(st.integers(), st.text(max_size=3)), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_value_anywhere_is_a_workload_or_one_clear_line(data: st.DataObject) -> None:
    """Replace one value of the example by anything: never an error of Python's own."""
    raw = tomllib.loads(example_workload())
    table: Any = raw
    while True:
        keys = sorted(table) if isinstance(table, dict) else range(len(table))
        key = data.draw(st.sampled_from(list(keys)))
        inside = isinstance(table[key], dict | list) and table[key]
        if not (inside and data.draw(st.booleans())):
            break
        table = table[key]
    table[key] = data.draw(anything)
    try:
        with located("plan.toml"):
            workload_of(raw, TRACES, "plan")
    except UsageError as error:
        assert str(error).startswith("plan.toml: ")
        assert "\n" not in str(error)


CODE = """
from pathlib import Path
from arborsim.policies.methods.attention import Raas

Path("imported").touch()

class Mine(Raas):
    name = "mine"
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a module; whether it was imported shows in a file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "named_in_a_file.py").write_text(CODE)
    yield tmp_path / "imported"
    sys.modules.pop("named_in_a_file", None)


def test_a_workload_imports_code_only_if_that_is_allowed(code: Path) -> None:
    mix = f'[[mix]]\ntrace = "{TRACES / "chain-linear.parquet"}"\n'
    candidates = '[candidates]\ngpus = ["h100"]\npolicies = ["named_in_a_file:Mine"]\n'
    text = text_with(mix=mix, candidates=candidates)
    Path("plan.toml").write_text(text)
    with pytest.raises(UsageError, match=r"plan\.toml: .*named_in_a_file:Mine.*--allow-code"):
        read_workload("plan.toml")
    assert not code.exists()
    (choice,) = read_workload("plan.toml", allow_code=True).policies
    assert choice.name == "mine"
    assert code.exists()
    assert read_workload("plan.toml").policies == (choice,)  # nothing is left to import


def test_other_files_import_no_code(code: Path) -> None:
    head = {
        "kind": "bands", "model": "m", "layers": 6, "traces": 1, "tokens": 1, "seed": 0,
        "command": "c",
    }  # fmt: skip
    document = {"calibration": head, "policies": {"named_in_a_file:Mine": {"sinks": 2}}}
    Path("calibration.toml").write_text(to_toml(document))
    with pytest.raises(UsageError, match="code that a file names"):
        read_calibration("calibration.toml")
    policy, search = "named_in_a_file:Mine", "named_in_a_file:Search"
    assert registry.defaults_of(policy) == {}
    assert answers.Searched.of_request({"search": search}, "", "").search == search
    assert not code.exists()
