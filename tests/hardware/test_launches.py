"""Launching kernels against the device's work: the longer of the two counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from arborsim.core.errors import UsageError
from arborsim.machine.batch import Batch, IterationTime
from arborsim.machine.cost import CostModel
from arborsim.machine.engine import EngineProfile
from arborsim.machine.lookup import load_engine, load_geometry, load_profile
from arborsim.machine.machine import ServingOptions
from arborsim.machine.price import Price
from arborsim.machine.program import PIECE_COLUMNS, DemandInfo
from benchmarks.roofline import table

MODEL = load_geometry("llama-3.1-8b")
CONTEXT = 8192


def step_s(engine: str, *infos: DemandInfo, tokens: int = CONTEXT) -> float:
    """One iteration of searches that read `tokens` tokens each."""
    price = Price(CostModel(load_profile("h200", engine=engine), MODEL))
    row = np.zeros((1, len(PIECE_COLUMNS)), dtype=np.int64)
    row[0, :2] = 1
    row[0, PIECE_COLUMNS.index("read_bytes")] = tokens * MODEL.kv_bytes_per_token
    batch = Batch()
    for key, info in enumerate(infos):
        batch.add(key, *price.pieces(info, row))
    return IterationTime(price).terms(batch.sums, 0)[0]


def search(
    fused: bool = True, parts: int = 1, recall: str = "stage", ddr_parts: int = 0
) -> DemandInfo:
    return DemandInfo("", 0, "", "", recall, "", 1, fused=fused, parts=parts, ddr_parts=ddr_parts)


def test_a_step_takes_at_least_what_launching_takes() -> None:
    engine = load_engine("live")
    each = engine.layer_launches + engine.search_launches
    wanted = (32 * each + engine.step_launches) * engine.launch_s + engine.step_s
    assert step_s("live", search()) == pytest.approx(wanted, rel=1e-12)
    assert step_s("live", search(), tokens=256) == step_s("live", search())  # nothing is saved


def test_rows_parts_and_searches_add_launches() -> None:
    engine = load_engine("live")
    alone = step_s("live", search())
    layer_s = 32 * engine.launch_s
    more = [
        (engine.rows_launches, (search(fused=False),)),
        (2 * engine.part_launches, (search(parts=3),)),
        (engine.search_launches, (search(), search())),
        (engine.part_launches, (search(parts=2, ddr_parts=1),)),
        (
            engine.part_launches + engine.recall_launches["ondemand"],
            (search(parts=2, recall="ondemand", ddr_parts=1),),
        ),
        (0, (search(recall="ondemand"),)),  # it keeps nothing in DDR
    ]
    for launches, infos in more:
        assert step_s("live", *infos) - alone == pytest.approx(layer_s * launches, rel=1e-9)


def test_a_graph_is_launched_at_once() -> None:
    eager, graphs = (step_s(name, search()) for name in ("live", "live-graphs"))
    assert graphs < eager / 2
    assert step_s("live-graphs", search(parts=3)) == graphs
    long, short = (step_s("live-graphs", search(), tokens=n) for n in (65_536, 16_384))
    assert long > 1.1 * short  # the device's work counts, and a smaller cache is a faster one


def test_launches_hide_nothing_that_takes_longer() -> None:
    engine = replace(load_engine("live"), launch_s=1e-9)
    profile = replace(load_profile("h200"), engine=engine)
    price = Price(CostModel(profile, MODEL))
    assert price.launch_s < step_s("live-graphs", search())


def test_launches_count_on_gpus_without_measured_kernels() -> None:
    profile, engine = load_profile("rtx4090"), load_engine("live")
    assert not profile.kernels
    price = Price(CostModel(replace(profile, engine=engine), MODEL))
    each = engine.layer_launches + engine.search_launches
    launches = 32 * each + engine.step_launches
    total_s = price.launch_s + price.added_launch_s(search())
    assert total_s == pytest.approx(launches * engine.launch_s + profile.per_step_s, rel=1e-12)
    assert Price(CostModel(profile, MODEL)).launch_s == 0
    assert price.prefill_s(1, 0) >= price.launch_s


def test_waiting_and_bytes_of_an_all_reduce_have_shares_of_their_own() -> None:
    """One token is nearly all waiting, a prompt nearly all bytes."""
    profile = load_profile("h100", engine="vllm")
    assert profile.engine is not None

    def reduced_s(tokens: int, waiting: float, of_bytes: float) -> float:
        engine = replace(
            profile.engine, all_reduce_share=waiting, all_reduce_bytes_share=of_bytes
        )  # fmt: skip
        cost = CostModel(replace(profile, engine=engine), MODEL)
        return Price(cost, ServingOptions(tensor_parallel=4)).all_reduce_s(tokens, tokens > 1)

    plain, waits, moves = ([reduced_s(n, *shares) for n in (1, 8192)]
                           for shares in ((1.0, 1.0), (2.0, 1.0), (1.0, 2.0)))  # fmt: skip
    for one, more, most in zip(plain, waits, moves, strict=True):
        assert more + most == pytest.approx(3 * one)
    assert waits[0] > 1.5 * plain[0]
    assert moves[1] > 1.8 * plain[1]


def test_experts_in_mxfp4_take_longer_in_prompts_alone() -> None:
    profile, model = load_profile("h100", engine="vllm"), load_geometry("gpt-oss-20b")
    assert profile.engine is not None
    plain = replace(profile, engine=replace(profile.engine, mxfp4_prompt_share=1.0))
    longer, short = (Price(CostModel(each, model)) for each in (profile, plain))
    share = profile.engine.mxfp4_prompt_share
    assert longer.experts_s(64, 64) == short.experts_s(64, 64)
    assert longer.experts_s(2048, 0) == pytest.approx(share * short.experts_s(2048, 0))


def test_negative_launches_are_refused() -> None:
    with pytest.raises(UsageError, match="layer_launches"):
        EngineProfile.from_table({"layer_launches": -1.0}, "mine.toml", load_engine("live"))


def test_the_table_in_the_documentation_is_the_programs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "hardware.md").read_text()
    assert "\n".join(table("h200", MODEL)) in text
