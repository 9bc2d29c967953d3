"""Searches that a program runs itself become traces: the loops of docs/recording.md, and failures.

Signals are compared in `test_forced`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import arborsim
from arborsim.cli.app import main
from arborsim.core.errors import UsageError
from arborsim.core.observations import Signal
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import Kind
from tests.live.tiny import VOCAB, save_tiny, tiny_model

PAGE = (Path(__file__).parents[2] / "docs" / "recording.md").read_text()


def example(name: str) -> str:
    found = re.search(rf"<!-- example: {name} -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    assert found
    return found.group(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chat = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return save_tiny(tmp_path_factory.mktemp("model"), chat_template=chat)


@dataclass
class CompletionOutput:
    """As vLLM's, as far as loops read it."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None
    finish_reason: str | None = "stop"


@dataclass
class RequestOutput:
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


class LLM:
    """Stands in for vLLM's: draws thoughts of different lengths from nothing."""

    def __init__(self, model: str) -> None:
        self._rng = np.random.default_rng(0)

    def generate(self, prompts: list[Any], sampling: Any) -> list[RequestOutput]:
        return [RequestOutput(self._prompt(each), self._thoughts(sampling.n)) for each in prompts]

    def _prompt(self, prompt: Any) -> list[int]:
        return [3, 4, 5] if isinstance(prompt, str) else list(prompt["prompt_token_ids"])

    def _thoughts(self, count: int) -> list[CompletionOutput]:
        lengths = self._rng.integers(1, 9, count).tolist()
        drawn = [tuple(self._rng.integers(2, VOCAB, length).tolist()) for length in lengths]
        return [
            CompletionOutput(i, f"thought {i}", ids, -float(len(ids)) * self._rng.random())
            for i, ids in enumerate(drawn)
        ]


@dataclass
class SamplingParams:
    n: int
    max_tokens: int
    stop: list[str]
    include_stop_str_in_output: bool


def propose(ids: list[int]) -> list[list[int]]:
    return [[(sum(ids) + i) % VOCAB, *range(2, 3 + i)] for i in range(3)]


def judge(ids: list[int]) -> float:
    return (sum(ids) % 10) / 10


@pytest.mark.parametrize("name", ["beam", "vllm", "mcts"])
def test_loops_of_the_page(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each becomes a trace that every policy plays which a live recording serves."""
    monkeypatch.chdir(tmp_path)
    vllm: Any = ModuleType("vllm")
    vllm.LLM, vllm.SamplingParams = LLM, SamplingParams
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    code = example(name)
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 30
    given = {"MODEL": str(folder), "QUESTIONS": ["w3 w4 w5 w6", "w7 w8"]}
    exec(code, given | {"PROMPTS": [[3, 4, 5, 6], [7, 8]], "propose": propose, "judge": judge})
    reader = TraceReader(tmp_path / f"{name}.parquet")
    assert reader.info.search == ("mcts" if name == "mcts" else "beam")
    assert reader.num_episodes == 2
    live = tmp_path / "live.parquet"
    problems = tmp_path / "prompts.jsonl"
    problems.write_text('{"prompt": "w3 w4 w5 w6"}\n')
    assert main(["record", "--model", str(folder), "--prompts", str(problems), "--max-tokens", "9",
                 "--out", str(live)]) == 0  # fmt: skip
    assert servable(tmp_path / f"{name}.parquet") == servable(live)
    for episode in reader.episodes((Signal.ATTENTION,)):
        tokens = episode.kind == Kind.TOKEN
        width = np.unique(episode.iteration[tokens], return_counts=True)[1].max()
        assert width >= 3
        assert (episode.kind == Kind.PRUNE).any() == (name != "mcts")
        assert episode.kind[-1] == Kind.ANSWER
    out = arborsim.replay(tmp_path / f"{name}.parquet", policies="h2o,epikv,arborkv", budgets=0.8)
    assert set(out.summary()["policy"]) >= {"h2o", "epikv", "arborkv"}


def servable(trace: Path) -> set[str]:
    """Policies whose signals a trace has."""
    return {fit.name for fit in arborsim.open_trace(trace).description.policies if not fit.missing}


def test_logs_of_the_page(folder: Path, tmp_path: Path) -> None:
    """What inspect_ai and OpenTelemetry keep of calls, through JSON lines."""
    space: dict[str, Any] = {}
    exec(example("logs"), space)
    said = [{"role": "system", "content": "w2"}, {"role": "user", "content": "w3 w4"}]
    output = {"choices": [{"message": {"content": "w5 w6"}}]}
    log = {"samples": [{"messages": said, "output": output, "scores": {"m": {"value": "C"}}}]}
    asked, *answered = (
        [{"role": role, "parts": [{"type": "text", "content": text}]}]
        for role, text in (("user", "w7"), ("assistant", "w8 w9"), ("assistant", "w6"))
    )
    span = {"gen_ai.input.messages": json.dumps(asked)}
    span["gen_ai.output.messages"] = json.dumps([*answered[0], *answered[1]])
    lines = [*space["of_inspect"](log), *space["of_spans"]([span])]
    file, out = tmp_path / "log.jsonl", tmp_path / "t.parquet"
    file.write_text("\n".join(lines))
    assert main(["record", "--model", str(folder), "--teacher-forced", str(file), "--chat",
                 "--out", str(out)]) == 0  # fmt: skip
    judged, sampled = TraceReader(out).episodes()
    assert (judged.token.tolist(), judged.correct[-1]) == ([3, 4, 5, 6], 1)
    assert (sampled.token.tolist(), sampled.node.max()) == ([7, 8, 6, 9], 2)


def given(recorder: arborsim.Recorder, tokens: Any = (3, 4, 5)) -> tuple[int, int, int]:
    root = recorder.prompt(tokens)
    return root, recorder.add(root, [6, 7], reward=0.5), recorder.add(root, [8])


def test_a_body_that_raises_leaves_the_whole_searches(tmp_path: Path) -> None:
    """The module is left as it was, in its own attention and mode."""
    model, out = tiny_model("qwen3").train(), tmp_path / "t.parquet"
    attention = model.config._attn_implementation

    def interrupted() -> None:
        with arborsim.Recorder(out, model=model, capture="qkv", qkv_layers="1") as recorder:
            _, first, other = given(recorder)
            recorder.prune(other)
            recorder.answer(recorder.add(first, np.array([9, 10])), correct=True)
            given(recorder)
            given(recorder)  # ends the one before
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (model.config._attn_implementation, model.training) == (attention, True)
    reader = TraceReader(out)
    assert (reader.info.qkv_layers, reader.info.search, reader.num_episodes) == ((1,), "given", 2)
    first_one, second = reader.episodes(text=True)
    assert first_one.iteration[first_one.kind == Kind.TOKEN].tolist() == [1, 1, 2, 3, 4]
    assert (first_one.correct[-1], second.kind[-1]) == (1, Kind.BOUNDARY)
    assert set(first_one.text or ()) == {None}
    with pytest.raises(UsageError, match="exists: choose another name"):
        arborsim.Recorder(out, model=model)
    with arborsim.Recorder(out, model=model, capture="qkv", qkv_layers="1", resume=True) as more:
        given(more)
    assert TraceReader(out).num_episodes == 3


def test_what_cannot_be_is_named_and_loses_nothing(tmp_path: Path) -> None:
    out = tmp_path / "t.parquet"
    with pytest.raises(UsageError, match="model is a dict: give a causal language model"):
        arborsim.Recorder(out, model={})
    with pytest.raises(UsageError, match="tokenizer: its tokenizer has 99 tokens, the model 61"):
        arborsim.Recorder(out, model=tiny_model(), tokenizer=SimpleNamespace(vocab_size=99))
    with pytest.raises(UsageError, match="did you mean chain"):
        arborsim.Recorder(out, model="chian")
    with arborsim.Recorder(out, model=tiny_model(), attention="dense") as recorder:
        for call, message in (
            (lambda: recorder.add(0, [3]), "no search is open"),
            (lambda: recorder.prompt([]), "the prompt has no tokens"),
            (lambda: recorder.prompt("w3"), "has no tokeniser of text: give token ids"),
            (lambda: recorder.prompt([3, VOCAB]), f"the prompt has id {VOCAB}, but the model"),
            (lambda: recorder.prompt([[3]]), "expected token ids, one after the other"),
        ):
            with pytest.raises(UsageError, match=message):
                call()
        root, first, other = given(recorder)
        recorder.prune(other)
        for call, message in (
            (lambda: recorder.add(7, [3]), "node 3: there is no node 7"),
            (lambda: recorder.add(other, [3]), "node 3 follows node 2, which was given up"),
            (lambda: recorder.add(first, []), "node 3 has no tokens"),
            (lambda: recorder.add(first, [3] * 2048), "takes 2053 positions, but the model has"),
            (lambda: recorder.add(first, [3], reward=1.5), "reward 1.5 is not between 0 and 1"),
            (lambda: recorder.add(first, [3], order=0), "node 3 has order 0, not above the 0 of"),
            (lambda: recorder.prune(root), "the prompt cannot be given up"),
            (lambda: recorder.prune(other), "node 2 cannot be given up: it was given up"),
        ):
            with pytest.raises(UsageError, match=message):
                call()
        recorder.add(first, [9])
    (episode,) = TraceReader(out).episodes()
    assert episode.token.tolist() == [3, 4, 5, 6, 8, 7, 9]
