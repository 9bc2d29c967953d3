"""Formats of 8, 4 and 2 bits: the same numbers and bytes in NumPy, codec and pools."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.core.errors import PlanError, UsageError
from arborsim.core.formats import Format
from arborsim.core.geometry import Geometry
from arborsim.core.tiers import RECALLS, Tier, by_tier
from arborsim.core.tree import ThoughtTree
from arborsim.machine.executor import SimulatedExecutor
from arborsim.machine.lookup import load_profile
from arborsim.machine.machine import Machine
from arborsim.memory.moves import Moves, in_whole_groups
from arborsim.policies.methods.kivi import KIVI
from arborsim.policies.registry import build
from arborsim.products.validate.compare import DualExecutor
from arborsim.searches import make_search
from arborsim_torch.batches import run_batched
from arborsim_torch.cache.layout import GROUPINGS, Layout, Place
from arborsim_torch.cache.mover import Mover
from arborsim_torch.cache.pairs import GroupTokenPairs
from arborsim_torch.cache.pool import StoredTokens
from arborsim_torch.cache.spans import make_pool
from arborsim_torch.cache.tiered import TieredCache
from arborsim_torch.decoder import TreeDecoder
from arborsim_torch.live.executor import LiveExecutor
from arborsim_torch.live.policy_search import PolicySearch
from arborsim_torch.live.setup import CacheOptions, SearchSetup
from arborsim_torch.live.validate import held
from arborsim_torch.models import geometry, load_model
from arborsim_torch.sources import TaskSource
from arborsim_torch.tiers.codec import Packed, codec_of
from arborsim_torch.tiers.link import HostLink
from tests.live.tiny import KV_HEADS, LAYERS, VOCAB, plain_copy, tiny_model, torch

WIDTHS = st.sampled_from([(2, 2), (2, 0), (1, 0)])
FORMATS = st.builds(
    lambda bits, group, axis, widths, outliers: Format(bits, group, axis, *widths, outliers),
    st.sampled_from([8, 4, 2]), st.sampled_from([8, 16, 32]),
    st.sampled_from(["token", "channel"]), WIDTHS, st.sampled_from([0.0, 0.01, 0.1]),
)  # fmt: skip


def vectors(seed: int, *shape: int) -> np.ndarray:
    """Float32 of very different sizes, with ties and zeros among them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * 10.0 ** rng.integers(-3, 4, shape[-1])
    x[rng.random(shape) < 0.1] = 0.5
    x[..., 0, :] = 0
    return x.astype(np.float32)


def whole_bytes(each: Format, size: int) -> bool:
    return each.scale_tokens == 1 or size * each.span_bytes % each.group == 0


def rounded(each: Format, x: np.ndarray) -> np.ndarray:
    """Keys and values ``[..., 2, heads, tokens, size]`` as NumPy rounds them."""
    keys, values = np.moveaxis(x, -4, 0)
    return np.stack([each.rounded(keys, True), each.rounded(values, False)], axis=-4)


@settings(max_examples=150, deadline=None)
@given(
    each=FORMATS, seed=st.integers(0, 2**32 - 1), size=st.sampled_from([8, 16, 24, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)  # fmt: skip
def test_codec_and_numpy_agree_to_the_bit(each: Format, seed: int, size: int, dtype: Any) -> None:
    stored = torch.from_numpy(vectors(seed, 2, 3, 64, size)).to(dtype)
    codec = Packed(each, size)
    data, spans = codec.encode(stored)
    if spans is not None:
        number = torch.arange(64, dtype=torch.int16) % each.group
        last = number[:, None].view(torch.uint8).expand(1, 3, 64, 2)
        spans = torch.cat([spans.repeat_interleave(each.group, dim=-2), last], dim=-1)
    back = codec.decode(data, spans, torch.float32).numpy()
    expected = rounded(each, stored.float().numpy())
    assert np.array_equal(back.view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize(("group", "fits"), [(48, 32), (33, 32), (100, 64)])
def test_groups_that_do_not_fit_name_one_that_does(group: int, fits: int) -> None:
    made = [Format(2, each, "channel", 2, 2) for each in (group, fits)]
    with pytest.raises(UsageError, match=f"groups of {group} tokens.*use groups of {fits}$"):
        made[0].vector_bytes(64, keys=True)
    assert made[1].vector_bytes(64, keys=True) == 64 * 2 // 8 + 64 * 4 // fits


@settings(max_examples=60, deadline=None)
@given(
    each=FORMATS, seed=st.integers(0, 2**32 - 1), size=st.sampled_from([8, 16, 24, 64]),
    grouping=st.sampled_from(GROUPINGS),
)  # fmt: skip
def test_bytes_are_those_of_the_ledger(each: Format, seed: int, size: int, grouping: str) -> None:
    """Tokens come and go in whole groups: used bytes are the tensors' and the simulator's."""
    if not whole_bytes(each, size):
        with pytest.raises(UsageError, match="whole bytes"):
            each.vector_bytes(size, keys=True)
        return
    rng = np.random.default_rng(seed)
    geometry = Geometry("g", 2, 4, 2, size, 32, 64, 100, 10_000, kv_bytes_per_element=4)
    layout = Layout(2, 2, size, torch.float32, torch.device("cpu"), grouping)
    pool = make_pool(layout, codec_of(each, size), layout.device, page_tokens=1)
    x = vectors(seed, layout.slab_layers, 2, 2, 96, size)
    pool.grow(96)
    parts = rng.permutation(96).reshape(-1, each.scale_tokens)
    if each.scale_tokens > 1:
        parts = np.arange(96).reshape(-1, each.scale_tokens)[
            rng.permutation(96 // each.scale_tokens)
        ]
    token = parts.reshape(-1)
    groups = np.arange(layout.groups)
    slots = pool.take(np.repeat(groups, 96), np.tile(token, len(groups))).reshape(-1, 96)
    for group in groups.tolist():
        heads = layout.slab_of_group(group)[1]
        block = StoredTokens(*pool.codec.encode(torch.from_numpy(x[:, :, heads][..., token, :])))
        pool.write(group, slots[group], block)
    held = each.token_bytes(geometry) * 96
    assert pool.used_bytes == pool.capacity_bytes == held
    kept = np.sort(parts[: len(parts) // 3].reshape(-1))
    gone = np.setdiff1d(np.arange(96), kept)
    pool.give_back(np.repeat(groups, len(gone)), np.tile(gone, len(groups)))
    assert pool.shrink()
    assert pool.used_bytes == each.token_bytes(geometry) * len(kept)
    for group in range(layout.groups):
        heads = layout.slab_of_group(group)[1]
        block = pool.read(group, pool.slots.of[group, kept])
        back = pool.codec.decode(block.data, block.scale, torch.float32).numpy()
        exact = x[:, :, heads][..., token, :]
        assert np.array_equal(back, rounded(each, exact)[..., np.argsort(token), :][..., kept, :])


def test_scales_stay_as_long_as_a_token_of_their_group() -> None:
    each = Format(2, 8, "channel", 2, 2)
    layout = Layout(2, 2, 16, torch.float32, torch.device("cpu"))
    pool = make_pool(layout, codec_of(each, 16), layout.device, page_tokens=1)
    pool.grow(16)
    data = torch.from_numpy(vectors(1, 2, 2, 2, 16, 16))
    block = StoredTokens(*pool.codec.encode(data))
    pool.write(0, pool.take(np.zeros(16, dtype=np.int64), np.arange(16)), block)
    whole = pool.used_bytes
    gone = np.arange(1, 8)
    pool.give_back(np.zeros(7, dtype=np.int64), gone)
    assert pool.used_bytes == whole * 9 // 16
    assert pool.spans.slots.total == 2  # token 0 needs the scales of its group
    left = pool.read(0, pool.slots.of[0, [0, 9]])
    back = pool.codec.decode(left.data, left.scale, torch.float32).numpy()
    assert np.array_equal(back, rounded(each, data.numpy())[..., [0, 9], :])
    pool.give_back(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))
    assert pool.spans.slots.total == 1


def test_there_is_no_other_format() -> None:
    for wrong in ({"bits": 3, "group": 8}, {"bits": 4}, {"group": 8}, {"bits": 4, "group": 8}):
        with pytest.raises(UsageError, match="no format has"):
            Format(**wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="as outliers"):
        Format(4, 8, "row", 2, 2)
    with pytest.raises(UsageError, match="use 2, 4 or 8"):
        KIVI(bits=3)


def test_groups_are_cut_from_each_path_in_turn() -> None:
    tree = ThoughtTree()
    tree.open(0, -1)
    tree.append((0,), 3)
    tree.open(1, 0)
    tree.open(2, 0)
    tree.append((1, 2), 4)  # 3 5 7 9 and 4 6 8 10
    together = by_tier(lambda tier: 4 if tier.rung == 1 else 1)

    def grouped(tokens: list[int], target: Tier = Tier.HBM_QUANTISED) -> list[int]:
        n = len(tokens)
        moves = Moves(
            np.zeros(n, np.int64), np.full(n, -1, np.int32), np.array(tokens),
            np.full(n, target, np.int8),
        )  # fmt: skip
        return in_whole_groups(moves, together, tree, (1, 2)).token.tolist()

    assert grouped([3, 2, 1, 0]) == [0, 1, 2, 3]
    assert grouped([0, 1, 2, 3, 4, 6, 8, 10]) == [0, 1, 2, 3, 4, 6, 8, 10]
    assert grouped([0, 5, 2], Tier.HBM_COARSE) == [0, 5, 2]
    with pytest.raises(PlanError, match="of which 3 fill no group of 4"):
        grouped([0, 1, 2, 3, 4, 6, 8])
    with pytest.raises(PlanError, match="cannot go to DDR"):
        grouped([0, 1, 2, 3], Tier.DDR_QUANTISED)


def fake_quantised(model: Any, each: Format, first_query: np.ndarray) -> Any:
    """A plain model whose queries, from ``first_query[token]`` on, see rounded keys and values."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    def attend(
        module: Any, query: Any, key: Any, value: Any, *_: Any, scaling: float, **__: Any
    ) -> Any:
        n, heads = key.shape[2], query.shape[1] // key.shape[1]
        grouped = n - n % each.group
        exact = [x[0].float().numpy() for x in (key, value)]
        small = [x.copy() for x in exact]
        for x, keys in zip(small, (True, False), strict=True):
            x[:, :grouped] = each.rounded(x[:, :grouped], keys)
        narrow = torch.from_numpy(first_query[None, :n] <= np.arange(n)[:, None])
        wide = [torch.from_numpy(x).repeat_interleave(heads, 0) for x in (*exact, *small)]
        logits = torch.where(
            narrow, query[0] @ wide[2].transpose(1, 2), query[0] @ wide[0].transpose(1, 2)
        )
        logits = (logits * scaling).masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        mass = logits.softmax(-1)
        out = (mass * narrow) @ wide[3] + (mass * ~narrow) @ wide[1]
        return out[None].transpose(1, 2), None

    AttentionInterface.register("test_rounded", attend)
    AttentionMaskInterface.register("test_rounded", lambda *a, **k: None)
    twin = plain_copy(model)
    twin.set_attn_implementation("test_rounded")
    return twin


@pytest.mark.parametrize(("bits", "outliers"), [(8, 0.0), (4, 0.0), (2, 0.0), (2, 0.01)])
def test_kivi_on_the_reference_model_is_the_fake_quantised_model(
    bits: int, outliers: float
) -> None:
    group, residual = 16, 20
    policy = KIVI(bits=bits, group=group, residual=residual, outliers=outliers)
    loaded = load_model("chain", task_options={"lines": 12})
    source = TaskSource(loaded.task)
    setup = SearchSetup(loaded.model, source, lambda: make_search("linear"), 0.0, 0, 130)
    problem = source.problem(3)
    found: list[Any] = []
    search = PolicySearch(setup, problem, policy, 1, CacheOptions())
    run_batched([search], 1, lambda one, ended: found.append(one.outcome(ended)))
    columns, measured = found[0].episode.columns, found[0].measured
    assert not measured.evicted_tokens
    path = np.asarray(columns["token"])[np.asarray(columns["token"]) >= 0]
    prompt = len(problem.prompt)
    assert path[:prompt].tolist() == list(problem.prompt)
    at = np.arange(len(path)) // group
    first_query = np.maximum(prompt, (at + 1) * group + residual)
    model = fake_quantised(loaded.model, policy.formats[0], first_query)
    with torch.no_grad():
        logits = model(torch.tensor(path[None].astype(np.int64)), use_cache=False).logits[0]
    own = torch.log_softmax(logits.float(), -1)[prompt - 1 : -1].gather(
        1, torch.tensor(path[prompt:, None].astype(np.int64))
    )
    known = np.asarray(columns["logprob"], dtype=np.float64)
    np.testing.assert_allclose(own[:, 0].numpy(), known[~np.isnan(known)][-len(own) :], atol=2e-3)
    quantised = int((first_query[: len(path) - 1] < len(path)).sum())
    quantised -= quantised % group
    assert measured.quantised_tokens == quantised > group


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_narrow_tokens_in_ddr_are_read_in_every_recall_mode(grouping: str) -> None:
    formats = (Format(4, 16, scale_bytes=1), Format(2, 8, "token", 2, 2, 0.1))
    model = tiny_model("qwen2")
    found = {}
    for recall in RECALLS:
        rng = np.random.default_rng(3)
        with HostLink("cpu") as link:
            cache = TieredCache(
                Layout.of(model, grouping), ordered=True, page_tokens=4, recall=recall, link=link,
                quantised=[codec_of(each, 16) for each in formats],
            )  # fmt: skip
            mover = Mover(cache, link, recall=recall)
            decoder = TreeDecoder(model, prefill_block=16, cache=cache)
            decoder.prefill(rng.integers(0, VOCAB, 40).tolist())
            decoder.open(1, 0)
            decoder.activate([1])
            cells = GroupTokenPairs(*np.nonzero(rng.random((cache.layout.groups, 38)) < 0.8))
            tiers = [Tier.HBM_COARSE, Tier.DDR, Tier.DDR_QUANTISED, Tier.DDR_COARSE]
            mover.move(cells, rng.choice(tiers, len(cells)).astype(np.int8))
            mover.settle(wait=True)
            per_group = 2 * LAYERS * KV_HEADS // cache.layout.groups
            for place, each in ((Place.DDR_QUANTISED, formats[0]), (Place.DDR_COARSE, formats[1])):
                pool = cache.pools[place]
                size = each.vector_bytes(16, keys=True) * per_group
                assert cache.used_bytes(place) == pool.slots.total * size > 0
            found[recall] = torch.stack([decoder.step([i])[0] for i in (5, 6, 7)])
            cache.close()
    assert torch.equal(found["stage"], found["stream"])
    for recall in ("near", "ondemand"):
        torch.testing.assert_close(found[recall], found["stage"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "settings"), [
    ("kivi", {"group": "16", "residual": "8"}),
    ("kivi", {"group": "8", "residual": "1", "bits": "4", "outliers": "0.05"}),
    ("thinkv-paper", {"segment": "12", "recent": "8", "low": "0.3", "high": "0.5"}),
])  # fmt: skip
def test_a_tree_takes_the_bytes_of_the_ledger_at_every_step(
    name: str, settings: dict[str, str]
) -> None:
    loaded = load_model("chain", task_options={"lines": 8, "lines_per_thought": 2})
    source = TaskSource(loaded.task, noise=0.1, floor=0.3)
    policy = build(name, settings)
    made: list[DualExecutor] = []

    def wrap(live: LiveExecutor, mover: Mover) -> DualExecutor:
        simulated = SimulatedExecutor(
            Machine(load_profile("h100"), page_tokens=1), geometry(loaded),
            groups=mover.cache.layout.groups, formats=policy.formats,
        )  # fmt: skip
        made.append(DualExecutor(live, simulated, lambda: held(mover)))
        return made[0]

    setup = SearchSetup(loaded.model, source, lambda: make_search("beam-4", width=4), 0.7, 0, 100)
    search = PolicySearch(setup, source.problem(1), policy, 150, CacheOptions(), wrap=wrap)
    found: list[Any] = []
    run_batched([search], 1, lambda one, ended: found.append(one.outcome(ended).measured))
    over_time = made[0].bytes_over_time()
    assert over_time.equal == len(over_time) > 20
    assert over_time.live[:, 1].max() > 0, "nothing was quantised"
    live, simulated = found[0], made[0].simulated.measurements()
    for figure in (
        "peak_hbm_kv_bytes",
        "peak_after_first_decision_bytes",
        "peak_quantised_bytes",
        "quantised_tokens",
    ):
        assert getattr(live, figure) == getattr(simulated, figure), figure
    assert 0 < live.peak_after_first_decision_bytes <= live.peak_hbm_kv_bytes
    assert 0 < live.hbm_byte_seconds < live.peak_hbm_kv_bytes * made[0].clock()
