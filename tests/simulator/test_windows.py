"""Models with sliding windows or latent attention: bytes held and read, counted layer by layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arborsim.core.formats import FP8
from arborsim.core.geometry import UNBOUNDED, Geometry
from arborsim.core.tiers import Tier
from arborsim.machine.cost import CostModel
from arborsim.machine.lookup import load_geometry
from tests.simulator.bench import GEOMETRY, PROFILE, Bench

#: Of three layers the first two see the newest 5 tokens only; 64 bytes per layer and token.
WINDOWED = replace(GEOMETRY, layers=3, window=5, window_layers=2)
LAYERS = (True, True, False)
LAYER_BYTES = 64


def paths_of(bench: Bench, leaves: list[int]) -> list[list[int]]:
    """Token ids from the root to each leaf, by walking up."""
    paths = []
    for leaf in leaves:
        path: list[int] = []
        node = leaf
        while node >= 0:
            path = [*bench.tree.tokens(node).tolist(), *path]
            node = bench.tree.nodes[node].parent
        paths.append(path)
    return paths


def layer_by_layer(paths: list[list[int]], shared: bool = True) -> int:
    """Bytes of all layers' tokens on these paths, each layer with its own rule."""
    total = 0
    for windowed in LAYERS:
        seen = [path[-5:] if windowed else path for path in paths]
        tokens = [token for path in seen for token in path]
        total += LAYER_BYTES * len(set(tokens) if shared else tokens)
    return total


def childless(bench: Bench) -> list[int]:
    parents = {node.parent for node in bench.tree.nodes}
    return [node for node in range(len(bench.tree)) if node not in parents]


turns = st.lists(
    st.tuples(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 9)), min_size=1, max_size=8
)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), turns, st.booleans(), st.booleans())
def test_bytes_on_trees_are_those_of_each_layer(
    prompt: int, schedule: list[tuple[int, int, int]], shared: bool, one_by_one: bool
) -> None:
    bench = Bench(
        geometry=WINDOWED, tree_attention=shared, event_by_event=one_by_one, page_tokens=1
    )
    bench.prefill(prompt)
    peak = layer_by_layer(paths_of(bench, [0]))
    read_us = 0
    for pick, width, steps in schedule:
        parent = childless(bench)[pick % len(childless(bench))]
        first = len(bench.tree)
        bench.turn(*range(first, first + width), parent=parent)
        for _ in range(steps):
            bench.decode(1)
            everything = list(range(bench.tree.num_tokens))
            held = layer_by_layer(paths_of(bench, childless(bench)))
            on_paths = {t for path in paths_of(bench, childless(bench)) for t in path}
            assert on_paths == set(everything)  # every token is on the path to some leaf
            peak = max(peak, held)
            leaves = list(bench.leaves)
            read_us += layer_by_layer(paths_of(bench, leaves), shared)
    measured = bench.executor.measurements()
    assert measured.peak_hbm_kv_bytes == peak
    weights_us = measured.iterations * WINDOWED.weight_bytes
    assert bench.us("decode_s") == pytest.approx(weights_us + read_us, rel=1e-9)
    assert measured.time.rehydration_s == 0


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), turns)
def test_runs_and_single_iterations_agree(
    prompt: int, schedule: list[tuple[int, int, int]]
) -> None:
    def play(event_by_event: bool) -> tuple[int, float, list[int]]:
        bench = Bench(geometry=WINDOWED, event_by_event=event_by_event)
        bench.prefill(prompt)
        for pick, width, steps in schedule:
            first = len(bench.tree)
            bench.turn(*range(first, first + width), parent=pick % first)
            bench.decode(steps)
        measured = bench.executor.measurements()
        return measured.peak_hbm_kv_bytes, measured.time.total_s, measured.series.hbm_kv_bytes[-1:]

    together, alone = play(False), play(True)
    assert together[0] == alone[0]
    assert together[1] == pytest.approx(alone[1], rel=1e-9)
    assert together[2] == alone[2]


def test_a_second_child_finds_its_window_gone() -> None:
    bench = Bench(geometry=WINDOWED)
    bench.prefill(10)
    bench.turn(1)
    bench.decode(4)
    assert bench.us("rehydration_s") == 0
    bench.turn(2, parent=0)  # the prompt's last 5 tokens: 1 of them is in the first child's window
    seconds = CostModel(PROFILE, WINDOWED).prefill_s(4, 10 - 4)
    assert bench.us("rehydration_s") == pytest.approx(seconds * 1e6)
    assert bench.executor.measurements().rehydrations == 1


def test_what_is_given_up_leaves_the_windows() -> None:
    bench = Bench(geometry=WINDOWED)
    bench.prefill(4)
    bench.turn(1, 2)
    bench.decode(9)
    bench.tree.nodes[1].pruned = True
    bench.turn(2)
    bench.decode(1)
    held = bench.executor.measurements().series.hbm_kv_bytes[-1]
    assert held == LAYER_BYTES * (4 + 2 * 9 + 1) + 2 * LAYER_BYTES * 5


def test_eviction_leaves_windows_alone() -> None:
    bench = Bench(geometry=WINDOWED)
    bench.prefill(8)
    bench.turn(1)
    bench.decode(1)
    bench.move(range(9), Tier.EVICTED)
    assert bench.executor.ledger.hbm_bytes == 0
    assert bench.executor.measurements().series.hbm_kv_bytes[-1] == 2 * LAYER_BYTES * 5


def test_only_layers_that_keep_tokens_send_them() -> None:
    bench = Bench(geometry=WINDOWED)
    bench.prefill(8)
    bench.turn(1)
    bench.decode(1)
    bench.move([0, 1, 2], Tier.DDR)
    bench.executor.finish()
    assert bench.executor.measurements().to_ddr_bytes == 3 * LAYER_BYTES


def test_a_model_that_forgets_in_every_layer() -> None:
    bench = Bench(geometry=replace(GEOMETRY, window=5, window_layers=2))
    bench.prefill(3)
    bench.turn(1)
    bench.decode(20)
    measured = bench.executor.measurements()
    assert measured.peak_hbm_kv_bytes == 2 * LAYER_BYTES * 5
    read = sum(min(3 + t, 5) for t in range(1, 21))
    assert bench.us("decode_s") == pytest.approx(20 * 2000 + read * 2 * LAYER_BYTES)


@pytest.mark.parametrize("name", ["gemma-3-1b", "gemma-3-12b", "mistral-7b-v0.1", "llama-3.1-8b"])
@pytest.mark.parametrize("tokens", [1, 511, 512, 513, 4096, 40_000])
def test_sequences_of_real_models(name: str, tokens: int) -> None:
    g = load_geometry(name)
    per_layer = 2 * g.kv_heads * g.head_dim * 2
    pattern = {"gemma-3-1b": 6, "gemma-3-12b": 6, "mistral-7b-v0.1": 0, "llama-3.1-8b": 1}[name]
    full = [pattern > 0 and (layer + 1) % pattern == 0 for layer in range(g.layers)]
    kept = sum(tokens if whole else min(tokens, g.window) for whole in full)
    assert g.path_bytes(tokens) == per_layer * kept
    if name == "mistral-7b-v0.1" and tokens >= g.window:
        assert g.tokens_in(g.path_bytes(tokens)) == UNBOUNDED
    else:
        assert g.tokens_in(g.path_bytes(tokens)) == tokens
    if g.path_bytes(tokens - 1) < g.path_bytes(tokens):
        assert g.tokens_in(g.path_bytes(tokens) - 1) == tokens - 1


def latent(rank: int, rope: int) -> Geometry:
    return replace(
        GEOMETRY, latent_dim=rank, rope_dim=rope, value_dim=16, head_dim=16 + rope, kv_heads=2
    )


def test_a_latent_token_is_read_once_for_all_heads() -> None:
    geometry = latent(24, 8)
    bench = Bench(geometry=geometry)
    bench.prefill(10)
    bench.turn(1, 2)
    bench.decode(3)
    token = 2 * (24 + 8) * 2  # layers, numbers, bytes
    measured = bench.executor.measurements()
    assert measured.peak_hbm_kv_bytes == 16 * token
    assert bench.us("decode_s") == pytest.approx(3 * 2000 + (12 + 14 + 16) * token)


def test_latent_tokens_in_8_bits_have_one_scale_per_layer() -> None:
    bench = Bench(geometry=latent(24, 8))
    bench.prefill(10)
    bench.move(range(10), Tier.HBM_QUANTISED)
    assert bench.executor.ledger.hbm_bytes == 10 * 2 * (24 + 8 + 4)


def test_attention_of_latent_models() -> None:
    g = load_geometry("deepseek-v2-lite")
    assert g.score_flops(absorbed=False) == 16 * (2 * 192 + 2 * 128)
    assert g.score_flops(absorbed=True) == 16 * (2 * 576 + 2 * 512)
    cost = CostModel(PROFILE, g)
    assert FP8.token_bytes(g) == 27 * (576 + 4)
    queries, partials = cost.near_message_bytes(1)
    assert queries == 16 * 576 * 2
    assert partials == 16 * (512 * 4 + 4)


def test_experts_that_a_batch_reads() -> None:
    g = load_geometry("deepseek-v2-lite")
    one = 26 * 64 * 3 * 2048 * 1408  # weights of all experts
    assert g.expert_parameters == one
    assert g.active_parameters == pytest.approx(g.parameters - one * 58 / 64)
    assert g.weight_bytes_read(1) == 2 * g.active_parameters
    assert g.weight_bytes_read(10_000) == pytest.approx(g.weight_bytes)
    steps = np.diff([g.weight_bytes_read(n) for n in range(1, 50)])
    assert (steps > 0).all()
    assert (np.diff(steps) < 0).all()
