"""Reward models of transformers with random weights, as `save_pretrained` leaves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

WORDS = ["<unk>", "<pad>", "<s>", "+", "-", "ки", *"()=*/YN", *map(str, range(200))]


def word_tokenizer(chat: bool = False) -> Any:
    """One token per word of `game24` and one of its own first: its ids are not the task's."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

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
