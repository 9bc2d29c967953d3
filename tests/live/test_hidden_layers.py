"""Hidden vectors of chosen layers: recorded, stored, read, and given to live policies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from arborsim.cli.app import main
from arborsim.core.errors import MissingSignal, TraceError, UsageError
from arborsim.core.observations import HiddenRows, Signal
from arborsim.core.tree import ThoughtTree
from arborsim.searches import make_search
from arborsim.trace.episode import Episode
from arborsim.trace.reader import TraceReader
from arborsim.trace.writer import TraceWriter
from arborsim_torch.capture import Capture
from arborsim_torch.captured import Captured
from arborsim_torch.live import policy_search
from arborsim_torch.recorder import EpisodeRecorder
from arborsim_torch.sampling import Sampler
from tests.live.pretended.test_policies import compare, run
from tests.live.tiny import HIDDEN, FakeSource, plain_copy, plain_signals, tiny_info, tiny_model


def columns_of(model: Any, search: str, capture: Capture) -> dict[str, Any]:
    source = FakeSource(block=lambda generated: 3 + len(generated) % 5, prompt=20)
    options = {"steps": 10} if search == "dpts" else {}
    recorder = EpisodeRecorder(
        model, source, make_search(search, **options), capture, Sampler(1.0, (0, 0)), 0, 60
    )
    return dict(recorder.run(source.problem(0)).columns)


def read(path: Path, columns: dict[str, Any], layers: tuple[int, ...]) -> Episode:
    with TraceWriter(path, tiny_info(hidden_layers=layers), overwrite=True) as writer:
        writer.write_episode(columns)
    return next(iter(TraceReader(path).episodes([Signal.HIDDEN])))


@pytest.mark.parametrize("search", ["linear", "dpts"])
def test_they_are_the_outputs_of_the_blocks(search: str, tmp_path: Path) -> None:
    model, layers = tiny_model(), (0, 3)
    columns = columns_of(model, search, Capture(hidden_layers=layers))
    episode = read(tmp_path / "t.parquet", columns, layers)
    assert episode.hidden is not None
    assert episode.hidden.layers == layers
    assert episode.hidden.values.shape == (episode.num_tokens, 2, HIDDEN)
    assert episode.hidden.values.dtype == np.float16
    tree = ThoughtTree()
    nodes = episode.node[episode.token_rows]
    for node in range(int(episode.node.max()) + 1):
        tree.open(node, int(episode.parent[np.argmax(episode.node == node)]))
    for node in nodes.tolist():
        tree.append((node,), 1)
    twin = plain_copy(model)
    for leaf in range(len(tree.nodes)):
        path = tree.path(leaf)
        outputs = plain_signals(twin, episode.token[path].tolist())["outputs"]
        expected = outputs[list(layers)].swapaxes(0, 1)
        np.testing.assert_allclose(episode.hidden.values[path], expected, rtol=4e-3, atol=4e-3)


def test_the_other_columns_stay_as_they_are() -> None:
    with_, without = (
        columns_of(tiny_model(), "dpts", capture)
        for capture in (Capture(hidden_layers=(1,)), Capture())
    )
    assert set(with_) - set(without) == {"hidden"}
    np.testing.assert_array_equal(with_["hidden_change"], without["hidden_change"])
    alone = Capture(hidden_layers=(1,), signals=frozenset(), embeddings=False)
    few = columns_of(tiny_model(), "dpts", alone)
    # Without attention rows another kernel computes them.
    np.testing.assert_allclose(few["hidden"], with_["hidden"], rtol=4e-3, atol=4e-3)
    assert "hidden_change" not in few


def test_record_and_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "t.parquet"
    options = "--lines 6 --episodes 1 --hidden-layers 4,1"
    assert main(["record", *options.split(), "--out", str(out)]) == 0
    reader = TraceReader(out)
    assert reader.info.hidden_layers == (1, 4)
    assert reader.has(Signal.HIDDEN)
    capsys.readouterr()
    assert main(["inspect", str(out), "--all"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["hidden", "layers", "1,", "4"] for line in shown)
    assert any(line.split()[:1] == ["hidden"] and "kB" in line for line in shown)  # its size
    arguments = ["--policy", "hs-cosine", "--budget", "0.7", "--set", "recent=8"]
    assert main(["replay", str(out), *arguments]) == 0


def test_bad_input_is_one_line(refused: Callable[..., str]) -> None:
    known = "arborsim-chain has layers 0 to 5"
    assert f"--hidden-layers 9: {known}" in refused("--hidden-layers", "2,9")
    assert "expected numbers" in refused("--hidden-layers", "a")
    assert "--hidden-layers needs --capture signals" in refused(
        "--hidden-layers", "1", "--capture", "tree"
    )


@pytest.fixture(scope="module")
def good() -> dict[str, Any]:
    return columns_of(tiny_model(), "linear", Capture(hidden_layers=(2,)))


def test_damaged_columns_are_refused(tmp_path: Path, good: dict[str, Any]) -> None:
    path = tmp_path / "t.parquet"

    def refused(values: Any, *words: str) -> None:
        with pytest.raises(TraceError) as caught:
            read(path, good | {"hidden": values}, (2,))
        assert all(word in str(caught.value) for word in words), caught.value

    broken = good["hidden"].copy()
    broken[7, 3] = np.nan
    refused(broken, "row 7: hidden holds nan, which is not finite")
    refused(good["hidden"][:, :-1], f"hidden has {HIDDEN - 1} values, expected {HIDDEN}")
    short: list[Any] = list(good["hidden"])
    short[5] = None
    refused(short, "row 5: hidden has 0 values")
    where = next(i for i, kind in enumerate(good["kind"]) if kind > 1)
    column: list[Any] = [None] * len(good["kind"])
    for row, vector in zip(
        [i for i, kind in enumerate(good["kind"]) if kind <= 1], good["hidden"], strict=True
    ):
        column[row] = vector
    column[where] = column[0]
    refused(
        pa.array(column, pa.list_(pa.float16())), f"row {where}: a row without a token holds hidden"
    )


def test_traces_with_and_without(tmp_path: Path, good: dict[str, Any]) -> None:
    without = {name: values for name, values in good.items() if name != "hidden"}
    path = tmp_path / "t.parquet"
    with (
        pytest.raises(UsageError, match="column hidden is not part of"),
        TraceWriter(path, tiny_info()) as writer,
    ):
        writer.write_episode(good)
    with TraceWriter(path, tiny_info()) as writer:
        writer.write_episode(without)
    reader = TraceReader(path)
    assert not reader.has(Signal.HIDDEN)
    with pytest.raises(
        MissingSignal, match=r"reads hidden vectors, .*: record it with --hidden-layers all"
    ):
        reader.require([Signal.HIDDEN], "policy hs-cosine")


def test_the_nearest_layer() -> None:
    values = np.arange(6, dtype=np.float16).reshape(1, 3, 2)
    rows = HiddenRows((1, 3, 9), values)
    assert [rows.nearest(layer)[0, 0] for layer in (0, 1, 2, 3, 6, 7, 31)] == [0, 0, 0, 2, 2, 4, 4]
    assert len(rows[:0]) == 0


def test_a_live_policy_is_given_the_one_layer_that_it_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And decides as if it had been given all."""
    given, hidden = set(), Captured.hidden

    def watched(fresh: Captured, layers: tuple[int, ...]) -> HiddenRows:
        found = hidden(fresh, layers)
        given.add(found.values.shape[1])
        return found

    monkeypatch.setattr(Captured, "hidden", watched)
    one = run(["hs-cosine"], "cpu", 40, most=20)
    assert given == {1}
    monkeypatch.setattr(policy_search, "hidden_layers", lambda _, layers: frozenset(range(layers)))
    assert compare(one, run(["hs-cosine"], "cpu", 40, most=20)) == {"hs-cosine"}
    assert given == {1, 6}
