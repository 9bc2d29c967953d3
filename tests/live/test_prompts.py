"""Plain prompts: chat templates, stop strings, top-p, and problems that are recorded together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arborsim.cli.app import main
from arborsim.core.observations import Signal
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import PER_LAYER, Kind
from arborsim_torch.reference.tasks import Problem
from arborsim_torch.sampling import Sampler, nucleus
from arborsim_torch.sources import PromptSource
from tests.helpers.errors import without_size
from tests.live.tiny import save_tiny, torch

TEMPLATE = (
    "{% for m in messages %}w50 {{ m['content'] }} w51 {% endfor %}"
    "{% if add_generation_prompt %}w52{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("chatty"), chat_template=TEMPLATE)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    texts = ("w3 w4 w5", "w6 w7", "w8 w9 w10 w11", "w12", "w13 w14")
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


def record(out: Path, *options: object) -> list[Any]:
    """Episodes of a new trace."""
    assert main(["record", "--out", str(out), *map(str, options)]) == 0
    signals = () if "tree" in options else {*PER_LAYER, Signal.ATTENTION}
    return list(TraceReader(out).episodes(signals))


def prompt_of(episode: Any) -> list[int]:
    return episode.token[: (episode.kind == Kind.PREFILL).sum()].tolist()  # type: ignore[no-any-return]


def test_a_chat_template_surrounds_each_prompt(
    chatty: Path, folder: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--prompts", prompts, "--max-tokens", 4, "--capture", "tree"]
    plain, chat = (
        record(tmp_path / f"{name}.parquet", "--model", chatty, *options, *more)
        for name, more in (("plain", []), ("chat", ["--chat"]))
    )
    assert prompt_of(plain[0]) == [3, 4, 5]
    assert prompt_of(chat[0]) == [50, 3, 4, 5, 51, 52]
    assert TraceReader(tmp_path / "chat.parquet").info.search_parameters["chat"] is True
    assert "chat" not in TraceReader(tmp_path / "plain.parquet").info.search_parameters
    refused = ["record", "--model", folder, *options, "--chat", "--out", tmp_path / "no.parquet"]
    assert main(list(map(str, refused))) == 2
    error = capsys.readouterr().err
    assert f"--chat: the tokeniser of {folder} has no chat template" in error
    assert len(without_size(error)) == 1


def test_live_runs_take_the_same_options(
    chatty: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--prompts", prompts, "--model", chatty, "--chat", "--top-p", 0.5, "--stop", "w4 w5",
               "--temperature", 1, "--max-tokens", 8, "--episodes", 1, "--policy", "h2o",
               "--budget", 0.8]  # fmt: skip
    assert main(["live", *map(str, options)]) == 0
    assert "h2o" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--chat", "--stop=a"])
def test_reference_tasks_have_no_prompts(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["record", option, "--out", str(tmp_path / "no.parquet")]) == 2
    assert "for a model with a tokeniser" in capsys.readouterr().err


# -- stop strings ----------------------------------------------------------------------------------


def byte_tokenizer() -> Any:
    """Byte-level BPE, whose only merges are of line ends: a token is a byte, or two newlines."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)} | {"ĊĊ": len(letters)}
    made = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def thoughts(text: str, stop: tuple[str, ...], *, merged: bool = True) -> list[str]:
    tokenizer = byte_tokenizer()
    source = PromptSource(["p"], tokenizer, [], 1000, 1000, stop)
    problem = Problem("prompts", "prompts", 0, (0,), None)
    pieces = [text] if merged else list(text)
    tokens = [token for piece in pieces for token in tokenizer(piece)["input_ids"]]
    found, own = [], 0
    for t in range(len(tokens)):
        own += 1
        if source.is_thought_end(problem, tokens[: t + 1], own):
            found.append(tokenizer.decode(tokens[t + 1 - own : t + 1]))
            own = 0
    return found


@pytest.mark.parametrize("merged", [True, False])
def test_a_thought_ends_with_the_token_that_completes_a_stop_string(*, merged: bool) -> None:
    text = "one\ntwo\n\nthree é\n\n\nfour</step>five"
    assert thoughts(text, ("\n\n", "</step>"), merged=merged)[:2] == ["one\ntwo\n\n", "three é\n\n"]
    assert thoughts(text, ("\n\n", "</step>"), merged=merged)[2].endswith("four</step>")
    assert thoughts(text, ("é",), merged=merged) == ["one\ntwo\n\nthree é"]


def test_a_newline_ends_thoughts_by_default() -> None:
    assert thoughts("a\nb\n\nc", ("\n",)) == ["a\n", "b\n\n"]


def test_stop_strings_on_the_command_line(
    folder: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", folder, "--prompts", prompts, "--episodes", 1, "--max-tokens", 40,
               "--temperature", 3, "--capture", "tree"]  # fmt: skip
    whole = record(tmp_path / "a.parquet", *options, "--thought-tokens", 100, "--stop", "none")[0]
    tokens = whole.token[whole.kind[whole.token_rows] == Kind.TOKEN].tolist()
    assert set(whole.node[whole.kind == Kind.TOKEN]) == {1}
    first, second = tokens[10:12]
    stop = f"w{first} w{second}"
    cut = record(tmp_path / "b.parquet", *options, "--thought-tokens", 100, "--stop", stop,
                 "--stop", "\\n\\n")[0]  # fmt: skip
    assert (cut.node[cut.kind == Kind.TOKEN] == 1).sum() == 12
    parameters = TraceReader(tmp_path / "b.parquet").info.search_parameters
    assert parameters["stop"] == [stop, "\n\n"]
    assert main(["record", "--out", str(tmp_path / "c.parquet"), "--stop", ""]) == 2
    assert "--stop is empty" in capsys.readouterr().err


# -- top-p -----------------------------------------------------------------------------------------


def test_nucleus_is_the_smallest_set() -> None:
    mass = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.25, 0.25, 0.25, 0.25]], dtype=torch.float64)
    assert nucleus(mass, 0.6).tolist() == [[0, 0.4, 0.3, 0], [0.25, 0.25, 0.25, 0]]
    assert nucleus(mass, 0.4).tolist() == [[0, 0.4, 0, 0], [0.25, 0.25, 0, 0]]
    assert nucleus(mass, 0.0).tolist() == [[0, 0.4, 0, 0], [0.25, 0, 0, 0]]
    assert nucleus(mass, 1.0).tolist() == mass.tolist()


def test_top_p_samples_what_is_left() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).expand(4000, 4)
    choice = Sampler(1.0, (1,), top_p=0.75).choose(logits)
    share = np.bincount(choice.token, minlength=4) / 4000
    np.testing.assert_allclose(share, [0.625, 0.375, 0, 0], atol=0.03)
    # What is reported is the model's own distribution.
    assert choice.logprob[0] == pytest.approx(np.log([0.5, 0.3][choice.token[0]]))
    assert choice.entropy[0] == pytest.approx(1.1424, abs=1e-3)
    same = Sampler(1.0, (1,), top_p=1.0).choose(logits).token
    assert same == Sampler(1.0, (1,)).choose(logits).token


# -- problems recorded together --------------------------------------------------------------------


@pytest.mark.parametrize("search", ["linear", "tot-bfs", "dpts"])
def test_the_batch_changes_nothing(
    search: str, folder: Path, prompts: Path, tmp_path: Path
) -> None:
    options = ["--model", folder, "--prompts", prompts, "--search", search, "--max-tokens", 20,
               "--thought-tokens", 6, "--temperature", 1, "--capture", "qkv",
               *(["--set", "steps=8"] if search == "dpts" else [])]  # fmt: skip
    alone = record(tmp_path / "1.parquet", *options)
    assert len(alone) == 5
    for batch in (2, 5):
        out = tmp_path / f"{batch}.parquet"
        together = record(out, *options, "--batch", batch)
        assert TraceReader(out).info.extra["batch"] == str(batch)
        for one, other in zip(alone, together, strict=True):
            for name in ("kind", "node", "parent", "token", "position", "iteration"):
                np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
            np.testing.assert_allclose(one.entropy, other.entropy, rtol=1e-4, atol=1e-4)
            for signal in PER_LAYER:
                np.testing.assert_allclose(
                    one.per_layer[signal], other.per_layer[signal], rtol=2e-3, atol=2e-3
                )
            for t in range(one.num_tokens):
                np.testing.assert_allclose(
                    one.attention.row(t), other.attention.row(t), rtol=2e-3, atol=1e-3
                )


def test_an_interrupted_batch_can_be_resumed(folder: Path, prompts: Path, tmp_path: Path) -> None:
    options = ["--model", folder, "--prompts", prompts, "--max-tokens", 9, "--capture", "tree"]
    whole = record(tmp_path / "whole.parquet", *options, "--batch", 2)
    halves = tmp_path / "halves.parquet"
    record(halves, *options, "--batch", 2, "--episodes", 3)
    rest = record(halves, *options, "--batch", 2, "--resume")
    assert [e.token.tolist() for e in whole] == [e.token.tolist() for e in rest]
