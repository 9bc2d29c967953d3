"""Recorded signals equal those of a literal eager forward pass over the same tokens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from arborsim.core.observations import Signal
from arborsim.searches import make_search
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import PER_LAYER, VECTORS, Kind
from arborsim.trace.schema import Capture as Level
from arborsim.trace.writer import TraceWriter
from arborsim_torch.cache.forward import LayerView
from arborsim_torch.cache.layout import Layout
from arborsim_torch.cache.tiered import TieredCache
from arborsim_torch.capture import Capture, middle_layers
from arborsim_torch.context import PassContext
from arborsim_torch.decoder import TreeDecoder
from arborsim_torch.recorder import EpisodeRecorder
from arborsim_torch.recording import EpisodeResult
from arborsim_torch.sampling import Sampler
from arborsim_torch.token_signals import top_entries
from tests.live.tiny import (
    FAMILIES,
    LAYERS,
    FakeSource,
    plain_copy,
    plain_signals,
    tiny_info,
    tiny_model,
    torch,
)  # fmt: skip

CASES = {
    "linear": ("linear", {}, 130),
    "dpts": ("dpts", {"steps": 12}, 60),
    "tot-bfs": ("tot-bfs", {"keep": 2, "children": 3}, 40),
    "tot-dfs": ("tot-dfs", {"steps": 14, "threshold": 0.3}, 125),
}


def record(
    model: Any, search: str, options: dict[str, Any], source: Any,
    capture: Capture | None, seed: int = 0,
) -> EpisodeResult:  # fmt: skip
    return EpisodeRecorder(
        model, source, make_search(search, **options), capture, Sampler(1.0, (seed,)), seed, 200
    ).run(source.problem(seed))


def read(path: Path, columns: dict[str, Any], vectors: tuple[Signal, ...] = (), **info: Any) -> Any:
    """Through the file and its validation, as every user of a trace gets it."""
    with TraceWriter(path, tiny_info(**info)) as writer:
        writer.write_episode(columns)
    reader = TraceReader(path)
    signals = {*PER_LAYER, *vectors, Signal.ATTENTION}
    return next(iter(reader.episodes(signals, text=True)))


def ragged(generated: list[int]) -> int:
    """Thoughts of different lengths, so that a batch's paths differ in length."""
    return 4 + generated[0] % 5


@pytest.mark.parametrize("name", CASES)
def test_signals_equal_a_plain_forward_pass(name: str, tmp_path: Path) -> None:
    search, options, prompt = CASES[name]
    model = tiny_model()
    source = FakeSource(block=ragged, prompt=prompt)
    result = record(model, search, options, source, Capture())
    episode = read(tmp_path / "t.parquet", result.columns)
    twin = plain_copy(model)
    paths: dict[int, list[int]] = {}
    parents = dict(zip(episode.node.tolist(), episode.parent.tolist(), strict=True))
    tokens_of: dict[int, list[int]] = {}
    for t, row in enumerate(episode.token_rows):
        tokens_of.setdefault(int(episode.node[row]), []).append(t)
    logprob = np.asarray(result.columns["logprob"])
    for node, own in tokens_of.items():
        up = parents[node]
        paths[node] = (paths[up] if up >= 0 else []) + own
    leaves = set(tokens_of) - {parents[n] for n in tokens_of}
    checked = set()
    for leaf in leaves:
        path = paths[leaf]
        expected = plain_signals(twin, [int(episode.token[t]) for t in path])
        for p, t in enumerate(path):
            assert episode.position[t] == p
            row = episode.attention.row(t)
            np.testing.assert_allclose(row, expected[Signal.ATTENTION][p, : p + 1], atol=1e-3)
            at = episode.token_rows[t]
            np.testing.assert_allclose(
                episode.entropy[at], expected[Signal.ENTROPY][p], rtol=1e-3, atol=1e-3
            )
            if episode.kind[at] == Kind.TOKEN:
                np.testing.assert_allclose(
                    logprob[at], expected["logp"][p - 1, episode.token[t]], rtol=1e-3, atol=1e-3
                )
            checked.add(t)
        for signal in PER_LAYER:
            np.testing.assert_allclose(
                episode.per_layer[signal][path], expected[signal], rtol=2e-3, atol=2e-3
            )
    assert checked == set(range(episode.num_tokens))
    assert np.all(episode.per_layer[Signal.HIDDEN_CHANGE][0] == 0)


def test_hidden_change_is_that_of_the_blocks() -> None:
    """HF's `hidden_states[l + 1]` is block l's output, but for the last, which it normalises."""
    found = plain_signals(plain_copy(tiny_model()), list(range(12)))
    for layer in range(LAYERS - 1):
        np.testing.assert_array_equal(found["outputs"][layer], found["hidden_states"][layer + 1])
    assert not np.allclose(found["outputs"][-1], found["hidden_states"][-1])


def test_embeddings_are_mean_last_hidden_states() -> None:
    model = tiny_model()
    source = FakeSource(block=5, thoughts=2, prompt=20)
    columns = record(model, "linear", {}, source, Capture()).columns
    kinds, nodes = np.asarray(columns["kind"]), columns["node"]
    tokens = columns["token"][columns["token"] >= 0].tolist()
    last = plain_signals(plain_copy(model), tokens)["hidden_states"][-1]
    for row in np.flatnonzero(kinds == Kind.BOUNDARY):
        own = columns["position"][(nodes == nodes[row]) & (columns["position"] >= 0)]
        np.testing.assert_allclose(columns["embedding"][row], last[own].mean(0), atol=2e-3)


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_other_families(family: str) -> None:
    """Layers with a sliding window give nothing to what they do not see; all keep all tokens."""
    model = tiny_model(family)
    columns = record(model, "linear", {}, FakeSource(thoughts=2), Capture()).columns
    tokens = columns["token"][columns["token"] >= 0].tolist()
    assert len(tokens) > 2 * 24
    expected = plain_signals(plain_copy(model), tokens)
    for signal in PER_LAYER:
        np.testing.assert_allclose(
            columns[signal.value], expected[signal], rtol=2e-3, atol=2e-3, err_msg=signal
        )
    for p, row in enumerate(columns["attention"].to_pylist()):
        plain = expected[Signal.ATTENTION][p, : p + 1]
        np.testing.assert_allclose(np.float32(row), plain, atol=1e-3)
        assert sum(row) == pytest.approx(1, abs=0.01)
    outside = np.float32(row)[:-24]
    windows = {"mistral-window": 1.0, "phi3": 1.0, "qwen2-window": 0.5, "gemma3": 0.5}
    if windows.get(family) == 1:
        assert not outside.any()
    else:  # what the full layers give, which are a share of all
        assert 0 < outside.sum() <= 1 - windows.get(family, 0.0) + 0.01


def test_vectors_are_those_of_the_cache(tmp_path: Path) -> None:
    model = tiny_model()
    layers = middle_layers(LAYERS)
    assert layers == (1, 2)
    source = FakeSource(thoughts=2, prompt=20)
    columns = record(model, "linear", {}, source, Capture(0, layers)).columns
    episode = read(tmp_path / "q.parquet", columns, VECTORS, capture=Level.QKV, qkv_layers=layers)
    tokens = columns["token"][columns["token"] >= 0].tolist()
    plain = plain_signals(plain_copy(model), tokens)
    for part in ("keys", "values"):
        expected = plain[part][list(layers)].transpose(2, 0, 1, 3).reshape(len(tokens), -1)
        np.testing.assert_allclose(columns[part], expected, rtol=2e-3, atol=2e-3)
    # The queries are right if they give back the attention of every head of their layer.
    with torch.no_grad():
        result = plain_copy(model)(torch.tensor([tokens]), output_attentions=True)
    for t in range(len(tokens)):
        row = episode.head_attention.row(t)
        for i, layer in enumerate(layers):
            expected = result.attentions[layer][0, :, t, : t + 1].numpy()
            np.testing.assert_allclose(row[i], expected, atol=5e-3)


def test_prompt_blocks_equal_one_block() -> None:
    model = tiny_model()
    prompt = list(np.random.default_rng(0).integers(0, 61, 150))
    whole, blocks = Capture(), Capture()
    for capture, size in ((whole, 1000), (blocks, 32)):
        decoder = TreeDecoder(model, capture, prefill_block=size)
        decoder.prefill(prompt)
        capture.drain(decoder)
    a, b = whole.columns(), blocks.columns()
    for name in a:
        x, y = (c[name] if isinstance(c[name], np.ndarray) else c[name].flatten().to_numpy()
                for c in (a, b))  # fmt: skip
        np.testing.assert_allclose(
            x.astype(np.float32), y.astype(np.float32), rtol=4e-3, atol=4e-3, err_msg=name
        )


def test_sparse_rows_keep_the_top_of_dense_ones(tmp_path: Path) -> None:
    model = tiny_model()
    source = FakeSource()
    options = {"steps": 8}
    dense = record(model, "dpts", options, source, Capture())
    sparse = record(model, "dpts", options, source, Capture(top=10))
    assert dense.columns["token"].tolist() == sparse.columns["token"].tolist()
    a = read(tmp_path / "d.parquet", dense.columns)
    b = read(tmp_path / "s.parquet", sparse.columns, attention="sparse", attention_top=10)
    for t in range(a.num_tokens):
        x, y = a.attention.row(t), b.attention.row(t)
        assert len(x) == len(y)
        top = np.argsort(-x, kind="stable")[:9]
        np.testing.assert_allclose(x[top], y[top], atol=1e-3)
        assert y.sum() == pytest.approx(x.sum(), abs=5e-3)


@pytest.mark.parametrize("search", ["linear", "dpts"])
def test_rows_of_pieces_are_those_of_gathered_tokens(search: str) -> None:
    model, source, found = tiny_model("qwen2-window"), FakeSource(block=ragged), []
    for ordered in (False, True):
        cache = TieredCache(Layout.of(model), ordered=ordered)
        recorder = EpisodeRecorder(
            model, source, make_search(search), Capture(row_layers=(0, 3)), Sampler(1.0, (0,)), 0,
            200, cache=cache,
        )  # fmt: skip
        found.append(recorder.run(source.problem(0)).columns)
    plain, gathered = found
    assert plain["token"].tolist() == gathered["token"].tolist()
    for name in ("attention", "attention_layers"):
        one, other = (x[name].flatten().to_numpy(zero_copy_only=False) for x in found)
        one, other = (np.concatenate(list(x)) if x.dtype == object else x for x in (one, other))
        np.testing.assert_allclose(one, other, atol=2e-3)


def test_top_entries() -> None:
    index, value, rest = top_entries(np.float32([0.1, 0.5, 0.0, 0.3, 0.1]), 2)
    assert index.tolist() == [1, 3]
    assert rest == pytest.approx(0.2)
    assert value.dtype == np.float16
    index, value, rest = top_entries(np.float32([0.5, 0.5]), 2)
    assert index.tolist() == [0, 1]
    assert rest == 0.0


def test_layers_with_nan_are_left_out() -> None:
    metadata: Any = SimpleNamespace(queries=1)
    state = PassContext(metadata, first_row=0)
    view = LayerView(torch.empty(1, 2, 1), torch.empty(1, 2, 1), None, None, 2)
    for layer, row in enumerate([[0.25, 0.75], [float("nan")] * 2, [0.75, 0.25]]):
        state.add(layer, (view, torch.tensor(row).view(1, 1, 1, 1, 2)))
    assert state.attention().tolist() == [[[0.5, 0.5]]]


def test_capture_changes_no_token() -> None:
    model = tiny_model()
    runs = [
        record(model, "dpts", {"steps": 16}, FakeSource(block=ragged), capture)
        for capture in (None, Capture(), Capture(8, (1,)))
    ]
    assert len({tuple(run.columns["token"].tolist()) for run in runs}) == 1
    assert "embedding" not in runs[0].columns


def test_draining_more_often_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long thought is finished piece by piece, so that memory stays bounded."""
    model, source = tiny_model(), FakeSource(block=ragged)
    once = record(model, "dpts", {"steps": 8}, source, Capture()).columns
    monkeypatch.setattr("arborsim_torch.capture.MAX_PENDING_BYTES", 1)
    often = record(model, "dpts", {"steps": 8}, source, Capture()).columns
    for name in ("hidden_change", "key_variance", "lag_value", "key_sketch"):
        np.testing.assert_allclose(once[name], often[name], rtol=2e-3, atol=2e-3)
    assert once["attention"].equals(often["attention"])
    for a, b in zip(once["embedding"], often["embedding"], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3)
