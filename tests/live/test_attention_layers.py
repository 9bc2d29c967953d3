"""Recorded rows of single layers equal transformers' own eager attentions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from arborsim.cli.app import main
from arborsim.core.errors import MissingSignal, TraceError, UsageError
from arborsim.core.observations import Signal
from arborsim.searches import make_search
from arborsim.trace.episode import Episode
from arborsim.trace.reader import TraceReader
from arborsim.trace.writer import TraceWriter
from arborsim_torch.capture import Capture
from arborsim_torch.recorder import EpisodeRecorder
from arborsim_torch.sampling import Sampler
from tests.live.tiny import LAYERS, FakeSource, plain_copy, tiny_info, tiny_model, torch

CHOSEN = (0, 2, 3)
SEARCHES = {
    "linear": ("linear", {}, 300),  # more than one block of the prompt
    "dpts": ("dpts", {"steps": 12}, 60),
    "tot-dfs": ("tot-dfs", {"steps": 14, "threshold": 0.3}, 50),
}


def ragged(generated: list[int]) -> int:
    """Thoughts of different lengths, so that a batch's paths differ in length."""
    return 4 + generated[0] % 5


def columns_of(
    model: Any, search: str, options: dict[str, Any], prompt: int, capture: Capture
) -> dict[str, Any]:
    source = FakeSource(block=ragged, prompt=prompt)
    run = EpisodeRecorder(
        model, source, make_search(search, **options), capture, Sampler(1.0, (0,)), 0, 200
    )
    return run.run(source.problem(0)).columns


def write(path: Path, columns: dict[str, Any], layers: tuple[int, ...], **info: Any) -> TraceReader:
    with TraceWriter(path, tiny_info(attention_layer_ids=layers, **info)) as writer:
        writer.write_episode(columns)
    return TraceReader(path)


def read(path: Path, columns: dict[str, Any], layers: tuple[int, ...], **info: Any) -> Episode:
    reader = write(path, columns, layers, **info)
    return next(iter(reader.episodes({Signal.ATTENTION, Signal.LAYER_ATTENTION})))


def paths_of(episode: Episode) -> list[list[int]]:
    """The tokens (their numbers) of every path from the root to a leaf."""
    own: dict[int, list[int]] = {}
    for t, row in enumerate(episode.token_rows):
        own.setdefault(int(episode.node[row]), []).append(t)
    parent = dict(zip(episode.node.tolist(), episode.parent.tolist(), strict=True))
    paths: dict[int, list[int]] = {}
    for node in sorted(own):
        paths[node] = [*paths.get(parent[node], []), *own[node]]
    inner = {parent[node] for node in own}
    return [path for node, path in paths.items() if node not in inner]


@pytest.mark.parametrize("name", SEARCHES)
def test_rows_equal_eager_attentions(name: str, tmp_path: Path) -> None:
    search, options, prompt = SEARCHES[name]
    model = tiny_model()
    columns = columns_of(model, search, options, prompt, Capture(row_layers=CHOSEN))
    episode = read(tmp_path / "t.parquet", columns, CHOSEN)
    found = episode.layer_attention
    assert found is not None
    assert found.layers == CHOSEN
    assert len(found) == episode.num_tokens
    twin, checked = plain_copy(model), set()
    for path in paths_of(episode):
        ids = [int(episode.token[t]) for t in path]
        with torch.no_grad():
            result = twin(torch.tensor([ids]), output_attentions=True)
        heads = torch.stack(result.attentions)[list(CHOSEN), 0].double().numpy()
        expected = np.stack([heads.mean(1), heads.var(1)], axis=1)  # [layers, 2, n, n]
        for p, t in enumerate(path):
            rows = found.of(t)
            assert (rows.shape, rows.dtype) == ((len(CHOSEN), 2, p + 1), np.float16)
            np.testing.assert_allclose(rows, expected[:, :, p, : p + 1], rtol=2e-3, atol=2e-4)
            checked.add(t)
    assert checked == set(range(episode.num_tokens))
    assert max(found.of(t)[:, 1].max() for t in checked) > 0.01  # the heads do differ


@pytest.mark.parametrize("family", ["qwen3", "mistral-window"])
def test_other_families(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    columns = columns_of(model, "linear", {}, 40, Capture(row_layers=(1,)))
    episode = read(tmp_path / "t.parquet", columns, (1,))
    with torch.no_grad():
        result = plain_copy(model)(torch.from_numpy(episode.token[None]).long(),
                                   output_attentions=True)  # fmt: skip
    heads = result.attentions[1][0].double().numpy()
    assert episode.layer_attention is not None
    for t in range(episode.num_tokens):
        mean, variance = episode.layer_attention.of(t)[0]
        np.testing.assert_allclose(mean, heads[:, t, : t + 1].mean(0), atol=1e-3)
        np.testing.assert_allclose(variance, heads[:, t, : t + 1].var(0), atol=1e-3)


def test_nothing_else_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All other columns are the same bits, however often the pending tokens are drained."""
    model = tiny_model()
    arguments = ("dpts", {"steps": 8}, 40)
    without = columns_of(model, *arguments, Capture(top=6))
    columns = columns_of(model, *arguments, Capture(top=6, row_layers=CHOSEN))
    assert set(columns) - set(without) == {"attention_layers"}
    sparse = {"attention": "sparse", "attention_top": 6}
    table = write(tmp_path / "a.parquet", columns, CHOSEN, **sparse).table(0)
    plain = write(tmp_path / "b.parquet", without, (), **sparse).table(0)
    for column in set(plain.column_names) - {"time_s"}:
        assert table[column].equals(plain[column]), column
    monkeypatch.setattr("arborsim_torch.capture.MAX_PENDING_BYTES", 1)
    often = columns_of(model, *arguments, Capture(top=6, row_layers=CHOSEN))
    assert often["attention_layers"].equals(columns["attention_layers"])


def test_layers_average_to_the_attention_column(tmp_path: Path) -> None:
    layers = tuple(range(LAYERS))
    columns = columns_of(tiny_model(), "tot-bfs", {"keep": 2, "children": 3}, 40,
                         Capture(row_layers=layers))  # fmt: skip
    episode = read(tmp_path / "t.parquet", columns, layers)
    assert episode.attention is not None
    assert episode.layer_attention is not None
    for t in range(episode.num_tokens):
        mean = episode.layer_attention.of(t)[:, 0].astype(np.float32).mean(0)
        np.testing.assert_allclose(mean, episode.attention.row(t), atol=1e-3)


def test_record_and_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "t.parquet"
    options = "--lines 6 --episodes 1 --search dpts --set steps=4 --attention-layers 4,1"
    assert main(["record", *options.split(), "--out", str(out)]) == 0
    reader = TraceReader(out)
    assert reader.info.attention_layer_ids == (1, 4)
    episode = next(iter(reader.episodes([Signal.LAYER_ATTENTION])))
    assert episode.layer_attention is not None
    assert episode.layer_attention.of(3).shape == (2, 2, 4)
    assert next(iter(reader.episodes())).layer_attention is None
    capsys.readouterr()
    assert main(["inspect", str(out), "--all"]) == 0
    shown = capsys.readouterr().out
    assert "1, 4 (mean and variance over heads)" in shown
    assert "attention_layers" in shown  # among the sizes per column


def test_bad_input_is_one_line(refused: Callable[..., str]) -> None:
    known = "arborsim-chain has layers 0 to 5"
    assert f"--attention-layers 9: {known}" in refused("--attention-layers", "2,9")
    assert f"--attention-layers -1: {known}" in refused("--attention-layers=-1")
    for text in ("a", ",", "1,,2", "1.5", " "):
        assert "expected numbers" in refused("--attention-layers", text)
    assert "needs --capture signals" in refused("--attention-layers", "1", "--capture", "tree")


def test_long_paths_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arborsim_torch.recording_plan.DENSE_UP_TO", 64)
    out = tmp_path / "t.parquet"
    arguments = ["record", "--out", str(out), "--lines", "6", "--episodes", "1"]
    assert main([*arguments, "--attention-layers", "1"]) == 2
    error = capsys.readouterr().err
    assert "stores whole rows, of paths up to 64 tokens" in error
    assert error.count("\n") == 1
    assert not out.exists()
    assert main(arguments) == 0  # without them such paths are stored sparsely
    assert TraceReader(out).info.attention == "sparse"


@pytest.fixture(scope="module")
def good() -> dict[str, Any]:
    return columns_of(tiny_model(), "linear", {}, 5, Capture(row_layers=(1,)))


def spoilt(good: dict[str, Any], change: Any) -> dict[str, Any]:
    rows = good["attention_layers"].to_pylist()
    change(rows)
    return good | {"attention_layers": pa.array(rows, good["attention_layers"].type)}


DAMAGE = {
    "has 1 lists, expected 2": lambda rows: rows[3].pop(),
    "has 0 lists, expected 2": lambda rows: rows.__setitem__(3, None),
    "a list of 2 values, expected 4": lambda rows: rows[3].__setitem__(1, rows[1][1]),
    "a list of 0 values, expected 4": lambda rows: rows[3].__setitem__(1, None),
    "holds -0.5, not a prob": lambda rows: rows[3][1].__setitem__(2, np.float16(-0.5)),
    "holds nan, not a prob": lambda rows: rows[3][0].__setitem__(2, np.float16("nan")),
    "holds inf, not a prob": lambda rows: rows[3][0].__setitem__(2, np.float16("inf")),
    "sums to 0 instead of 1": lambda rows: rows[3].__setitem__(0, [np.float16(0)] * 4),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damaged_rows_are_found(message: str, good: dict[str, Any], tmp_path: Path) -> None:
    columns = spoilt(good, DAMAGE[message])
    with pytest.raises(TraceError, match=message) as caught:
        write(tmp_path / "t.parquet", columns, (1,))
    assert "episode 0, row 3: " in str(caught.value)
    path = tmp_path / "u.parquet"
    with TraceWriter(path, tiny_info(attention_layer_ids=(1,)), check=False) as writer:
        writer.write_episode(columns)
    reader = TraceReader(path)
    with pytest.raises(TraceError, match=message):
        list(reader.episodes([Signal.LAYER_ATTENTION]))
    assert len(list(reader.episodes())) == 1  # who does not read them does not mind


def test_nan_is_kept(good: dict[str, Any], tmp_path: Path) -> None:
    """A layer whose softmax overflowed has no rows to show: that is no damage."""
    nan = [np.float16("nan")] * 4
    columns = spoilt(good, lambda rows: rows.__setitem__(3, [nan, nan]))
    episode = read(tmp_path / "t.parquet", columns, (1,))
    assert episode.layer_attention is not None
    assert np.isnan(episode.layer_attention.of(3)).all()
    assert not np.isnan(episode.layer_attention.of(4)).any()


def test_missing_columns(good: dict[str, Any], tmp_path: Path) -> None:
    without = {name: values for name, values in good.items() if name != "attention_layers"}
    reader = write(tmp_path / "t.parquet", without, ())
    with pytest.raises(MissingSignal, match="record it with --attention-layers"):
        next(reader.episodes([Signal.LAYER_ATTENTION]))
    with pytest.raises(TraceError, match="has 0 lists, expected 2"):
        write(tmp_path / "u.parquet", without, (1,))
    with pytest.raises(UsageError, match="attention_layers is not part of"):
        write(tmp_path / "v.parquet", good, ())
