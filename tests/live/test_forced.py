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
from arborsim.searches import make_search
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import PER_LAYER, Kind
from arborsim_torch.capture import Capture
from arborsim_torch.context import PassContext
from arborsim_torch.forced import Chain, ForcedDecoder, ForcedRecorder, ForcedSource
from arborsim_torch.recorder import EpisodeRecorder
from arborsim_torch.sampling import Sampler
from tests.live.tiny import FakeSource, save_tiny, tiny_model

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


def decoded(model: Any, taken: Capture | None, temperature: float) -> dict[str, Any]:
    source = FakeSource(block=ragged, thoughts=30, prompt=134)
    recorder = EpisodeRecorder(
        model, source, make_search("linear"), taken, Sampler(temperature, (3,)), 3, 1000
    )
    return recorder.run(source.problem(0)).columns


def chain_of(columns: dict[str, Any]) -> Chain:
    """What an engine would hand over of that run."""
    kind, token, node = np.asarray(columns["kind"]), columns["token"], columns["node"]
    own = token[kind == Kind.TOKEN]
    lengths = np.bincount(node[kind == Kind.TOKEN])[1:]
    prompt = token[kind == Kind.PREFILL]
    ends = tuple(np.cumsum(lengths).tolist())
    return Chain(tuple(prompt.tolist()), tuple(own.tolist()), ends, correct=True)


def forced(model: Any, chain: Chain, taken: Capture | None) -> dict[str, Any]:
    source = ForcedSource(FakeSource(), [chain])
    recorder = ForcedRecorder(
        model, source, make_search("linear"), taken, Sampler(0.0, (0,)), 0, len(chain.tokens)
    )
    return recorder.run(source.problem(0)).columns


def flat(column: Any) -> np.ndarray:
    """Numbers of a column, one after the other."""
    if isinstance(column, np.ndarray):
        return column.astype(np.float64).ravel()
    while hasattr(column, "flatten") and hasattr(column.type, "value_type"):
        column = column.flatten()
    return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.float64)


@pytest.mark.parametrize(
    ("family", "name", "temperature"),
    [
        *itertools.product(["llama", "qwen2-window"], CAPTURES, [0.0, 1.0]),
        *itertools.product(["gemma3", "phi3", "mixtral"], ["all"], [1.0]),
    ],
)
def test_signals_equal_those_of_decoding(
    family: str, name: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last block of the prompt has one token, and so has that of the chain.
    monkeypatch.setattr("arborsim_torch.forced.PREFILL_BLOCK", 19)
    model = tiny_model(family)
    expected = decoded(model, capture(name), temperature)
    chain = chain_of(expected)
    assert len(chain.prompt) % 19 == len(chain.tokens) % 19 == 1
    found = forced(model, chain, capture(name))
    assert found.keys() == expected.keys()
    same = ("kind", "iteration", "node", "parent", "depth", "position", "token", "end", "text")
    for column in same:
        assert list(found[column]) == list(expected[column]), column
    for column in ("logprob", "entropy"):
        np.testing.assert_allclose(found[column], expected[column], **CLOSE, err_msg=column)
    others = found.keys() - {*same, "logprob", "entropy", "time_s", "reward", "correct", "answer"}
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


def test_no_tensor_grows_with_the_square(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arborsim_torch.forced.PREFILL_BLOCK", 32)
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
    columns = forced(model, Chain((1, 2), tuple([3, 4] * 200), (400,)), Capture(top=8))
    assert len(columns["attention_rest"]) == 402
    assert {shape[3] for shape in seen} == {2, 32, 400 % 32}  # queries
    assert max(shape[4] for shape in seen) == 402


def test_blocks_are_bounded() -> None:
    """A block's attention has at most 2^28 probabilities per layer, whatever the chain's length."""
    model = tiny_model()
    for length, block in ((1000, 256), (1 << 20, 64), (1 << 30, 16)):
        chain = Chain((1,), range(length - 1), (length - 1,))  # type: ignore[arg-type]
        assert ForcedDecoder(model, None, chain).prefill_block == block


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


BAD = [
    ({"prompt": [3]}, 'expected "tokens"'),
    ({"prompt": [3], "tokens": []}, 'expected "tokens"'),
    ({"prompt": [3], "tokens": [4, True]}, 'expected "tokens"'),
    ({"prompt": [3], "tokens": [99]}, "id 99, but the model knows 0 to 60"),
    ({"prompt": [3], "tokens": [4, 5], "thoughts": [1]}, "the last one 2"),
    ({"prompt": [3], "tokens": [4, 5], "thoughts": [2, 2]}, "in order"),
    ({"prompt": [3], "tokens": "w3", "thoughts": [1]}, 'give "tokens" as ids'),
    ({"prompt": [3], "tokens": [4], "correct": 1}, "true, false or left out"),
    ({"prompt": [3], "tokens": [4] * 2048}, "take 2049 positions"),
    ([3], "expected {"),
]


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
