"""Given tokens, recorded in blocks, have the signals that decoding them has.

Float32 on the CPU: float16 columns differ by at most two units in the last place where a sum is
taken in another order, so 2e-3 of the value or of 1; tokens and structure are the same.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from arborsim.cli.app import main
from arborsim.core.observations import Signal
from arborsim.play.given import GivenTree, TreeBuilder
from arborsim.searches import make_search
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import PER_LAYER, Kind
from arborsim_torch.capture import Capture
from arborsim_torch.context import PassContext
from arborsim_torch.given import record_tree
from arborsim_torch.recorder import EpisodeRecorder
from arborsim_torch.sampling import Sampler
from arborsim_torch.tree_blocks import block_tokens
from benchmarks.record import tree_of
from tests.live.tiny import FAMILIES, HEADS, VOCAB, FakeSource, save_tiny, tiny_model

CLOSE = {"rtol": 2e-3, "atol": 2e-3}
#: What a capture is asked for: each level, dense and sparse rows, and all that may be added
CAPTURES: dict[str, Any] = {
    "tree": None,
    "dense": {},
    "sparse": {"top": 12},
    "qkv": {"vector_layers": (1, 2)},
    "all": {"top": 12, "vector_layers": (0, 3), "row_layers": (1,), "hidden_layers": (2,)},
}


def capture(name: str) -> Capture | None:
    return None if CAPTURES[name] is None else Capture(**CAPTURES[name])


def ragged(generated: Any) -> int:
    """Thoughts of 3 to 60 tokens: some are shorter than a block, some longer."""
    return (3, 60, 17, 9)[generated[0] % 4]


def decoded(
    model: Any,
    taken: Capture | None,
    temperature: float,
    search: str = "linear",
    thoughts: int = 30,
) -> dict[str, Any]:
    """A live search; with "tot-bfs" thoughts of different lengths run side by side."""
    source = FakeSource(block=ragged, thoughts=thoughts, prompt=134)
    options = {"children": 3, "keep": 2} if search == "tot-bfs" else {}
    how = (make_search(search, **options), taken, Sampler(temperature, (3,)), 3, 1000)
    recorder = EpisodeRecorder(model, source, *how, dedupe=False)
    return recorder.run(source.problem(0)).columns


def forced(model: Any, tree: GivenTree, taken: Capture | None) -> dict[str, Any]:
    return record_tree(model, tree, taken, FakeSource()).columns


def flat(column: Any) -> np.ndarray:
    """Numbers of a column, one after the other."""
    if isinstance(column, np.ndarray):
        return column.astype(np.float64).ravel()
    while hasattr(column, "flatten") and hasattr(column.type, "value_type"):
        column = column.flatten()
    return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.float64)


@pytest.mark.parametrize(
    ("family", "name", "temperature", "search"),
    [
        *itertools.product(["llama", "qwen2-window"], CAPTURES, [0.0], ["linear"]),
        *itertools.product(["llama"], CAPTURES, [1.0], ["tot-bfs"]),
        *itertools.product([f for f in FAMILIES if f != "llama"], ["all"], [1.0], ["tot-bfs"]),
    ],
)
def test_signals_equal_those_of_decoding(
    family: str, name: str, temperature: float, search: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Blocks of the tree begin and end within thoughts, and some hold several; the last one of the
    # prompt and of the chain has one token.
    monkeypatch.setattr("arborsim_torch.tree_blocks.PREFILL_BLOCK", 19)
    model = tiny_model(family)
    thoughts = 30 if search == "linear" else 6
    expected = decoded(model, capture(name), temperature, search, thoughts)
    tree = tree_of(expected, VOCAB)
    assert len(tree.nodes) > 8
    assert (max(map(len, tree.steps)) > 1) == any(tree.given_up) == (search == "tot-bfs")
    found = forced(model, tree, capture(name))
    assert found.keys() == expected.keys()
    same = ("kind", "iteration", "node", "parent", "depth", "position", "token", "end", "text",
            "correct", "answer")  # fmt: skip
    for column in same:
        assert list(found[column]) == list(expected[column]), column
    for column in ("logprob", "entropy"):  # without signals, a live search has none of its prompt
        known = ~np.isnan(expected[column])
        np.testing.assert_allclose(
            found[column][known], expected[column][known], **CLOSE, err_msg=column
        )
    np.testing.assert_array_equal(found["reward"], expected["reward"])
    others = found.keys() - {*same, "logprob", "entropy", "time_s", "reward"}
    if name != "tree":
        assert {"hidden_change", "key_variance", "lag_value", "embedding"} <= others
    for column in others - {"embedding", "attention_index", "attention_value"}:
        np.testing.assert_allclose(
            flat(found[column]), flat(expected[column]), **CLOSE, err_msg=column
        )
    if "embedding" in others:
        for a, b in zip(found["embedding"], expected["embedding"], strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                np.testing.assert_allclose(a, b, **CLOSE)
    if "attention_index" in others:
        _same_sparse_rows(found, expected)


def _same_sparse_rows(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Entries that are in one list only are ties: as small as the smallest of the other."""
    for index, value, other_index, other_value in zip(
        *(part[f"attention_{name}"].to_pylist()
          for part in (found, expected) for name in ("index", "value")), strict=True,
    ):  # fmt: skip
        one = dict(zip(index, value, strict=True))
        two = dict(zip(other_index, other_value, strict=True))
        assert len(one) == len(two)
        for position in one.keys() | two.keys():
            near = one.get(position, min(value)), two.get(position, min(other_value))
            assert near[0] == pytest.approx(near[1], rel=2e-3, abs=1e-3)


def chain(prompt: Any, tokens: Any) -> GivenTree:
    builder = TreeBuilder(VOCAB, 1 << 31)
    builder.prompt(prompt)
    builder.add(0, tokens)
    return builder.tree()


def test_no_tensor_grows_with_the_square(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arborsim_torch.tree_blocks.PREFILL_BLOCK", 32)
    model, seen = tiny_model("qwen2-window"), []
    add, block_rows = PassContext.add, PassContext.block_rows

    def watched_block(self: PassContext, device: torch.device) -> Any:
        seen.append(torch.Size((1, 1, 1, self.queries, self.metadata.positions)))
        return block_rows(self, device)

    def watched(self: PassContext, layer: int, *parts: Any) -> None:
        seen.extend(mass.shape for _, mass in parts)
        add(self, layer, *parts)

    monkeypatch.setattr(PassContext, "add", watched)
    monkeypatch.setattr(PassContext, "block_rows", watched_block)
    columns = forced(model, chain((1, 2), [3, 4] * 200), Capture(top=8))
    assert len(columns["attention_rest"]) == 402
    assert {shape[3] for shape in seen} == {32, 402 % 32}  # queries
    assert max(shape[4] for shape in seen) == 402


def test_blocks_are_bounded() -> None:
    """A block's attention has at most 2^28 probabilities per layer, whatever the chain's length."""
    for length, block in ((1000, 256), (1 << 20, 64), (1 << 30, 16)):
        assert block_tokens(HEADS, length) == block


# -- the command -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


def write(path: Path, *entries: Any) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def record(folder: Path, tokens: Path, out: Path, *options: str) -> int:
    return main(["record", "--model", str(folder), "--teacher-forced", str(tokens),
                 "--out", str(out), *options])  # fmt: skip


def test_a_file_of_tokens_becomes_a_trace(folder: Path, tmp_path: Path) -> None:
    tokens = write(
        tmp_path / "tokens.jsonl",
        {"prompt": [3, 4, 5], "tokens": [6, 7, 8, 9, 10], "thoughts": [2, 5], "correct": True},
        {"prompt": "w3 w4", "tokens": "w5 w6 w7", "engine": "any"},
    )
    out = tmp_path / "t.parquet"
    assert record(folder, tokens, out, "--thought-tokens", "2", "--capture", "qkv") == 0
    reader = TraceReader(out)
    assert reader.info.search == "linear"
    assert reader.info.search_parameters == {"tokens": "given", "first": 0}
    assert reader.info.timing["decode_tokens_per_s"] == 0
    assert reader.info.timing["prefill_tokens_per_s"] > 0
    first, second = reader.episodes({*PER_LAYER, Signal.ATTENTION}, text=True)
    assert first.token[first.token >= 0].tolist() == [3, 4, 5, 6, 7, 8, 9, 10]
    assert first.node[first.kind == Kind.TOKEN].tolist() == [1, 1, 2, 2, 2]
    assert first.correct[-1] == 1
    assert second.token[second.token >= 0].tolist() == [3, 4, 5, 6, 7]
    assert second.node[second.kind == Kind.TOKEN].tolist() == [1, 1, 2]
    assert second.correct[-1] == -1
    assert main(["replay", str(out), "--policy", "thinkv", "--budget", "0.5"]) == 0


def test_a_tree_by_nodes_or_by_children(folder: Path, tmp_path: Path) -> None:
    """Every form of one tree makes one episode; text becomes ids, ids need no tokeniser."""
    nodes = [
        {"id": "a", "tokens": [6, 7], "reward": 0.5, "text": "first"},
        {"id": "b", "text": "w8 w9 w6", "pruned": True},
        {"id": "c", "parent": "a", "tokens": [6], "answer": "6", "correct": True},
        {"id": "d", "parent": "a", "tokens": [5, 5], "answer": "10", "correct": False},
    ]
    prompt = {"id": 0, "tokens": [3, 4, 5]}
    tokens = write(
        tmp_path / "trees.jsonl",
        {"prompt": "w3 w4 w5", "nodes": nodes, "chosen": "c"},
        {"tokens": [3, 4, 5], "children": [nodes[0] | {"children": nodes[2:]}, nodes[1]],
         "chosen": "c"},
        {"nodes": [prompt, *({"parent": 0} | node for node in nodes)], "chosen": "c"},
    )  # fmt: skip
    out = tmp_path / "t.parquet"
    assert record(folder, tokens, out) == 0
    reader = TraceReader(out)
    assert (reader.info.search, reader.info.knows_times) == ("given", False)
    first, *others = reader.episodes({*PER_LAYER, Signal.ATTENTION}, text=True)
    assert first.node[first.kind == Kind.TOKEN].tolist() == [1, 2, 1, 2, 2, 3, 4, 4]
    assert first.token.tolist() == [3, 4, 5, 6, 8, 7, 9, 6, 6, 5, 5]
    assert first.node[first.kind == Kind.PRUNE].tolist() == [2]
    boundary = first.kind == Kind.BOUNDARY
    assert first.text is not None
    assert first.answer is not None
    assert [first.text[row] for row in np.flatnonzero(boundary)][:2] == ["first", "w8 w9 w6"]
    assert [first.answer[row] for row in np.flatnonzero(boundary)] == [None, None, "6", "10"]
    assert first.correct[boundary].tolist() == [-1, -1, 1, 0]
    assert (first.node[-1], first.correct[-1]) == (3, 1)
    for other in others:
        assert other.kind.tolist() == first.kind.tolist()
        np.testing.assert_array_equal(other.attention.values, first.attention.values)


def test_a_short_prompt_may_have_more_tokens_than_a_long_one_leaves_room_for(
    folder: Path, tmp_path: Path
) -> None:
    """The model takes 2,048 positions: each chain fits, prompt of one and tokens of the other no.

    The second is recorded whole, as many signals as tokens.
    """
    tokens = write(
        tmp_path / "tokens.jsonl",
        {"prompt": [3] * 1940, "tokens": [6, 7]},
        {"prompt": [3, 4], "tokens": [5, 6, 7, 8] * 100},
    )
    out = tmp_path / "t.parquet"
    assert record(folder, tokens, out) == 0
    long, short = TraceReader(out).episodes({Signal.HIDDEN_CHANGE})
    assert [(one.token >= 0).sum() for one in (long, short)] == [1942, 402]
    assert len(short.per_layer[Signal.HIDDEN_CHANGE]) == 402


def test_reference_models_take_ids(tmp_path: Path) -> None:
    """Thoughts end where the task says, and the trace is that of decoding the same tokens."""
    out = tmp_path / "decoded.parquet"
    assert main(["record", "--lines", "6", "--episodes", "1", "--out", str(out)]) == 0
    expected = next(iter(TraceReader(out).episodes({*PER_LAYER, Signal.ATTENTION})))
    prompt, token = (expected.kind == kind for kind in (Kind.PREFILL, Kind.TOKEN))
    entry = {"prompt": expected.row_token[prompt].tolist() if hasattr(expected, "row_token")
             else expected.token[: prompt.sum()].tolist(),
             "tokens": expected.token[prompt.sum() :].tolist()}  # fmt: skip
    tokens = write(tmp_path / "tokens.jsonl", entry)
    again = tmp_path / "forced.parquet"
    assert main(["record", "--lines", "6", "--teacher-forced", str(tokens),
                 "--out", str(again)]) == 0  # fmt: skip
    found = next(iter(TraceReader(again).episodes({*PER_LAYER, Signal.ATTENTION})))
    assert found.kind.tolist() == expected.kind.tolist()
    assert found.node[token].tolist() == expected.node[token].tolist()
    for signal in PER_LAYER:
        np.testing.assert_allclose(found.per_layer[signal], expected.per_layer[signal], **CLOSE)


TWO = [{"id": "a", "tokens": [4]}] * 2
LOOP = [{"id": "a", "tokens": [4]}, {"id": "b", "parent": "c", "tokens": [4]},
        {"id": "c", "parent": "b", "tokens": [4]}]  # fmt: skip
EARLY = {"id": "a", "tokens": [4], "order": 0}
LATE = {"id": "b", "parent": "a", "tokens": [5], "order": 0}
BAD = [
    ({"prompt": [3]}, 'expected "tokens"'),
    ({"prompt": [3], "tokens": []}, 'expected "tokens"'),
    ({"prompt": [3], "tokens": [4, True]}, 'expected "tokens"'),
    ({"prompt": [3], "tokens": [99]}, "id 99, but the model knows 0 to 60"),
    ({"prompt": [3], "tokens": [4, 5], "thoughts": [1]}, "the last one 2"),
    ({"prompt": [3], "tokens": [4, 5], "thoughts": [2, 2]}, "in order"),
    ({"prompt": [3], "tokens": "w3", "thoughts": [1]}, 'give "tokens" as ids'),
    ({"prompt": [3], "tokens": [4], "correct": 1}, "true, false or left out"),
    ({"prompt": [3], "tokens": [4] * 2048}, "takes 2049 positions"),
    ([3], "expected {"),
    ({"prompt": [3], "nodes": []}, "the search has no nodes"),
    ({"prompt": [3], "nodes": [{"tokens": [4]}]}, "nodes[0] is no object with an id"),
    ({"prompt": [3], "nodes": [{"id": "a"}]}, 'node a: expected "tokens"'),
    ({"prompt": [3], "nodes": [{"id": "a", "tokens": []}]}, 'node a: expected "tokens"'),
    ({"prompt": [3], "nodes": [{"id": "a", "tokens": [61]}]}, "node a has id 61, but the model"),
    ({"prompt": [3], "nodes": [{"id": "a", "tokens": [4], "reward": 7}]}, "node a: reward 7 is"),
    ({"prompt": [3], "nodes": [{"id": "a", "tokens": [4], "order": 1.5}]}, "node a: order is no"),
    ({"prompt": [3], "nodes": TWO}, "two nodes have the id a"),
    ({"nodes": [*TWO[:1], {"id": "b", "tokens": [5]}]}, "node a and node b without a parent"),
    ({"prompt": [3], "nodes": [{"id": "a", "parent": "z", "tokens": [4]}]}, "parent z, which does"),
    ({"prompt": [3], "nodes": LOOP}, "node b follows c follows b: this is no tree"),
    ({"prompt": [3], "nodes": [LATE, EARLY]}, "node b has order 0, not above the 0 of node a"),
    ({"prompt": [3], "nodes": [LATE | {"order": 2}, EARLY | {"pruned": 1}]},
     "node a is given up after order 1, but runs on until 2"),
    ({"prompt": [3], "nodes": [LATE | {"order": 2}, EARLY | {"answer": "6"}]},
     "node b follows node a, which answers"),
    ({"prompt": [3], "nodes": [LATE, EARLY | {"order": None}]}, "node a has no order, although"),
    ({"prompt": [3], "nodes": TWO[:1], "chosen": "z"}, "\"chosen\" is 'z', which is no node"),
    ({"prompt": [3], "children": [{"text": "w4", "children": [{}]}]}, "node 0.0: expected"),
    ({"prompt": [3], "children": [4]}, "node 0 is no object"),
]  # fmt: skip


@pytest.mark.parametrize(("entry", "message"), BAD)
def test_bad_lines_are_named(
    entry: Any, message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = write(tmp_path / "bad.jsonl", entry)
    assert record(folder, tokens, tmp_path / "t.parquet") == 2
    error = capsys.readouterr().err
    assert message in error
    assert "bad.jsonl" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "t.parquet").exists()


@pytest.mark.parametrize(
    "option", ["--search best-of-n", "--temperature 1", "--bank", "--max-tokens 4", "--batch 2"]
)
def test_options_about_drawing_are_refused(
    option: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = write(tmp_path / "tokens.jsonl", {"prompt": [3], "tokens": [4]})
    assert record(folder, tokens, tmp_path / "t.parquet", *option.split()) == 2
    assert f"leave out {option.split()[0]}" in capsys.readouterr().err
