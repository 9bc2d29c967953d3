"""Reward models of transformers with random weights, as `save_pretrained` leaves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

WORDS = ["<unk>", "<pad>", "<s>", "+", "-", "ки", *"()=*/YN", *map(str, range(200))]
CORPUS = ["Step 1: add 3 and 4 to get 7. ки", "Ответ: сколько яблок? ки", "naïve café — 13 × 2"]
ALPHABET = "abt 13.:+—éя\n"


def word_tokenizer(chat: bool = False) -> Any:
    """One token per word of `game24` and one of its own first: its ids are not the task's."""
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 2)]
    )
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", unk_token="<unk>"
    )
    if chat:
        made.chat_template = (
            "{% for m in messages %}{{ m.role == 'user' and '=' or '*' }} {{ m.content }} - "
            "{% endfor %}"
        )
    return made


def save_model(
    folder: Path, kind: str, *, vocab: int, tokenizer: Any = None, seed: int = 0, **options: Any
) -> Path:
    """A tiny Llama of `kind`, e.g. "ForSequenceClassification", and its tokeniser."""
    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=0.6,
        eos_token_id=None, bos_token_id=None, **{"max_position_embeddings": 512, **options},
    )  # fmt: skip
    torch.manual_seed(seed)
    getattr(transformers, f"Llama{kind}")(config).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def subword(kind: str, corpus: list[str] = CORPUS) -> Any:
    """A tokeniser as of Llama 3 (bytes) or of Llama 2 (blanks as marks), trained on little."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=kind == "metaspace", unk_token=None))
    if kind == "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = sorted(set(ALPHABET))
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus * 4, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


BYTES, METASPACE = subword("bytes"), subword("metaspace")
