"""Random tiny models, a source that ends thoughts where it likes, and signals computed plainly."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from arborsim.core.observations import Signal  # noqa: E402
from arborsim.trace.schema import Capture as Level  # noqa: E402
from arborsim.trace.schema import Geometry, TraceInfo  # noqa: E402
from arborsim_torch.reference.tasks import Problem  # noqa: E402
from arborsim_torch.sources import Source  # noqa: E402

VOCAB, LAYERS, HEADS, KV_HEADS, DIM, HIDDEN = 61, 4, 4, 2, 16, 48
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "mistral-window", "qwen2-window", "gemma3",
            "phi3", "phi3-longrope", "mixtral", "qwen3_moe")  # fmt: skip


def tiny_model(family: str = "llama", seed: int = 0) -> Any:
    """A random model in evaluation mode."""
    kinds = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral",
             "gemma3": "Gemma3", "phi3": "Phi3", "mixtral": "Mixtral",
             "qwen3_moe": "Qwen3Moe"}  # fmt: skip
    kind = kinds[family.split("-")[0]]
    options: dict[str, Any] = {}
    if family == "gemma3":  # two layers with a window, one without, and so on
        options |= {"sliding_window": 24, "query_pre_attn_scalar": 20,
                    "layer_types": ["sliding_attention", "full_attention"] * 2}  # fmt: skip
    if family == "phi3":  # as Phi-3-mini: half of the channels are turned, all layers slide
        options |= {"sliding_window": 24, "partial_rotary_factor": 0.5}
    if family == "phi3-longrope":
        options |= {"sliding_window": None, "hidden_size": HEADS * DIM,
                    "original_max_position_embeddings": 1024,
                    "rope_parameters": {
                        "rope_type": "longrope", "rope_theta": 1e4,
                        "short_factor": [1.0 + i / 8 for i in range(DIM // 2)],
                        "long_factor": [2.0 + i for i in range(DIM // 2)],
                        "original_max_position_embeddings": 1024}}  # fmt: skip
    if family == "mixtral":
        options |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if family == "qwen3_moe":
        options |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    if family == "mistral":
        options["sliding_window"] = None
    if family == "mistral-window":
        options["sliding_window"] = 24
    if family == "qwen2-window":
        options |= {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2}
    config = getattr(transformers, f"{kind}{'Text' if kind == 'Gemma3' else ''}Config")(
        vocab_size=VOCAB, hidden_size=options.pop("hidden_size", HIDDEN), intermediate_size=64,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        max_position_embeddings=2048, eos_token_id=None, pad_token_id=None, bos_token_id=None,
        initializer_range=0.3, **options,
    )  # fmt: skip
    torch.manual_seed(seed)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def save_tiny(folder: Path, family: str = "llama", **tokenizer: Any) -> Path:
    """A tiny model with a word tokeniser, as `save_pretrained` leaves it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tiny_model(family).save_pretrained(folder)
    words = {f"w{i}": i for i in range(60)} | {"\n": 60}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, **{"eos_token": "w1", **tokenizer})
    fast.save_pretrained(folder)
    return folder


def plain_copy(model: Any) -> Any:
    """The same weights under transformers' own eager attention."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    return twin


class FakeSource(Source):
    """Thoughts of `block` tokens (or `block(path)`), finished after `thoughts` of them."""

    name = "fake"

    def __init__(self, block: Any = 7, thoughts: int = 4, prompt: int = 40, seed: int = 0) -> None:
        self.block = block if callable(block) else (lambda generated: block)
        self.thoughts, self.prompt, self.seed = thoughts, prompt, seed
        self.max_tokens = 1000

    def count(self, first: int) -> int | None:
        return None

    def problem(self, index: int) -> Problem:
        rng = np.random.default_rng([self.seed, index])
        ids = tuple(rng.integers(0, VOCAB, self.prompt).tolist())
        return Problem(self.name, "test", index, ids, None)

    def is_thought_end(self, problem: Any, generated: Any, block_tokens: int) -> bool:
        return block_tokens >= self.block(generated) or self.is_finished(problem, generated)

    def is_finished(self, problem: Any, generated: Any) -> bool:
        return len(generated) >= 7 * self.thoughts

    def reward(self, thought: Any, rng: Any) -> float:
        return float(rng.random())

    def correct(self, problem: Any, generated: Any) -> bool | None:
        return sum(generated) % 2 == 0

    def text(self, ids: Any) -> str:
        return " ".join(map(str, ids))


def tiny_info(**others: Any) -> TraceInfo:
    geometry = Geometry("tiny", LAYERS, HEADS, KV_HEADS, DIM, HIDDEN, 64, VOCAB, 1000, 4, 4)
    values: dict[str, Any] = {"capture": Level.SIGNALS, "attention": "dense"}
    return TraceInfo(geometry, "tiny", "fake", "any", **(values | others))


def plain_signals(model: Any, ids: list[int], chunk: int = 128) -> dict[Any, Any]:
    """All signals of a path by their definitions, from one eager forward pass.

    Returns per-position arrays; `model` must be a `plain_copy`.
    """
    outputs: list[Any] = []
    hooks = [
        layer.register_forward_hook(
            lambda m, a, out: outputs.append(out[0] if isinstance(out, tuple) else out)
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        result = model(
            torch.tensor([ids]), output_attentions=True, output_hidden_states=True,
            past_key_values=transformers.DynamicCache(),  # keeps what slid out of a window, too
        )  # fmt: skip
    for hook in hooks:
        hook.remove()
    hidden = torch.stack(outputs)[:, 0].double().numpy()  # [layers, n, size]
    before = np.concatenate([hidden[:, :1], hidden[:, :-1]], axis=1)
    attention = torch.stack(result.attentions)[:, 0].double().numpy()  # [layers, heads, n, n]
    found: dict[Any, Any] = {
        Signal.ATTENTION: attention.mean((0, 1)),
        Signal.HIDDEN_CHANGE: np.linalg.norm(hidden - before, axis=-1).T,
        "hidden_states": [h[0].double().numpy() for h in result.hidden_states],
        "outputs": hidden,
    }
    for name, part in (("key", "keys"), ("value", "values")):
        x = np.stack(
            [getattr(layer, part)[0].double().numpy() for layer in result.past_key_values.layers]
        )  # [layers, heads, n, dim]
        found[part] = x
        found[Signal(f"{name}_variance")] = x.var(-1).mean(1).T
        lag = np.empty((len(ids), LAYERS))
        for p in range(len(ids)):
            y = x[:, :, p]
            c = p // chunk
            if c:
                previous = x[:, :, (c - 1) * chunk : c * chunk]
                low, high = previous.min(2), previous.max(2)
                y = (y - low) / (high - low + 1e-6)
            lag[p] = y.std(-1).mean(1)
        found[Signal(f"lag_{name}")] = lag
    logp = torch.log_softmax(result.logits[0].double(), -1).numpy()
    found[Signal.KEY_NORM] = np.sqrt((found["keys"] ** 2).sum(-1)).mean(1).T
    found[Signal.VALUE_NORM] = np.abs(found["values"]).sum(-1).mean(1).T
    found["logp"] = logp
    found[Signal.ENTROPY] = -(np.exp(logp) * logp).sum(-1)
    return found
