"""Load what is to be recorded: a reference model, or a model of a family that is supported."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.shape import CacheShape, Rope
from arborsim.machine.lookup import config_of
from arborsim.trace.schema import Geometry
from arborsim_torch.cache.layout import Layout
from arborsim_torch.checkpoint import (
    CONFIG,
    cached_named,
    check_checkpoint,
    check_family,
    instead,
)
from arborsim_torch.gguf_header import check_gguf, is_gguf
from arborsim_torch.gguf_models import NAMED, load_gguf, made_folder
from arborsim_torch.hardware.memory import free_bytes
from arborsim_torch.reference import MODELS
from arborsim_torch.reference.tasks import Task

_RANDOM_STD = 0.02
_ROOM = 0.8  # share of the free memory that weights may take
_DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16")}


@dataclass(frozen=True)
class LoadedModel:
    """A model, and the task or tokeniser that goes with it."""

    name: str
    model: Any  #: in evaluation mode, on its device
    task: Task | None = None  #: of a reference model
    tokenizer: Any = None  #: of transformers; None for a reference model
    random_weights: bool = False  #: True memory and time, meaningless text

    @property
    def max_positions(self) -> int:
        """Longest path: where LongRoPE would turn all keys anew, cached ones included, it ends."""
        config = self.model.config
        most = int(getattr(config, "max_position_embeddings", 1 << 30))
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":
            most = min(most, int(rope["original_max_position_embeddings"]))
        return most


def check_device(device: str) -> str:
    """The device's name, if it exists here."""
    kind = device.split(":")[0]
    if kind not in ("cpu", "cuda"):
        raise UsageError(f"--device {device}: use cpu or cuda")
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise UsageError(f"--device {device}: PyTorch {torch.__version__} finds no CUDA here")
        index = device.partition(":")[2]
        if index and not (index.isdigit() and int(index) < torch.cuda.device_count()):
            raise UsageError(f"--device {device}: there are {torch.cuda.device_count()} GPUs")
    return device


def device_name(device: torch.device) -> str:
    """The GPU's name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def load_model(
    name: str,
    task: str = "",
    device: str = "cpu",
    dtype: str = "auto",
    task_options: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a model by name, folder, file or id.

    Its name may be that of a reference model or "smollm2", of a folder with safetensors (of a
    `task`'s own, if one is named), of a GGUF file, which is dequantised, an id, or "config:" and
    the name of a known geometry or a config.json: random weights.  `dtype` "auto" is as stored,
    and float32 for what was dequantised.  Raises `UsageError`.
    """
    check_device(device)
    # transformers' own bars and warnings would run into ours.
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if dtype != "auto" and dtype not in _DTYPES:
        raise UnknownName("dtype", dtype, ["auto", *_DTYPES])
    tasks = sorted(set(MODELS.values()))
    if task and task not in tasks:
        raise UnknownName("task", task, tasks)
    if name in MODELS and task not in ("", MODELS[name]):
        raise UsageError(f"--model {name} cannot do --task {task}: their vocabularies differ")
    if name.startswith(CONFIG):
        if task:
            raise UsageError(f"--model {name} has random weights: it can do no --task {task}")
        return _random_model(name.removeprefix(CONFIG), device, dtype)
    if name in MODELS or task:
        return _load_reference(name, task, device, dtype, task_options or {})
    return _load_pretrained(name, device, dtype, trust_remote_code)


def _load_reference(
    name: str, task: str, device: str, dtype: str, options: Mapping[str, Any]
) -> LoadedModel:
    from arborsim_torch import reference

    folder = None if name in MODELS else Path(name)
    if folder is not None and not folder.is_dir():
        raise UsageError(f"--model {name}: no such folder")
    try:
        model, built = reference.load(
            name if folder is None else task,
            device,
            _DTYPES.get(dtype),
            folder=folder,
            **dict(options),
        )
    except TypeError as error:
        what = task or MODELS[name]
        raise UsageError(f"task {what} has no option --{', --'.join(options)}") from error
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(f"--model {name}: {error}") from error
    return LoadedModel(f"arborsim-{name}" if folder is None else folder.name, model, built)


def _load_pretrained(name: str, device: str, dtype: str, trust: bool) -> LoadedModel:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    check_checkpoint(name)
    title = Path(name).name
    if name in NAMED:
        dtype = "float32" if dtype == "auto" else dtype
        where = cached_named(name)
        title = NAMED[name].title + ("" if where else " (Q4_1, dequantised)")
        name = str(where or made_folder(NAMED[name]))
    elif is_gguf(name) and not Path(name).is_dir():
        return _load_gguf(name, device, "float32" if dtype == "auto" else dtype)
    options = {"trust_remote_code": trust}
    try:
        check_family(f"--model {name}", AutoConfig.from_pretrained(name, **options).to_dict())
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=_DTYPES.get(dtype, "auto"), use_safetensors=True, **options
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        what = " ".join(str(error).split())[:300]
        raise UsageError(f"--model {name}: cannot be loaded: {what}{instead(name)}") from error
    model = language_model(model)
    check_vocabulary(f"--model {name}", tokenizer, model)
    model = model.to(device).eval()
    return LoadedModel(title, model, None, tokenizer)


def _load_gguf(name: str, device: str, dtype: str) -> LoadedModel:
    option, path = f"--model {name}", Path(name)
    header = check_gguf(option, path)
    width = torch.empty(0, dtype=_DTYPES[dtype]).element_size()
    needed = sum(math.prod(shape) for shape in header.tensors.values()) * width
    check_room(option, needed, device, "--dtype bfloat16 takes half of float32")
    model, tokenizer = load_gguf(option, path, header, dtype)
    return LoadedModel(f"{path.stem} (dequantised)", model.to(device).eval(), None, tokenizer)


def check_vocabulary(option: str, tokenizer: Any, model: Any) -> None:
    """Refuse a tokeniser that makes ids which the model does not know."""
    known, made = model.config.vocab_size, getattr(tokenizer, "vocab_size", 0)
    if made > known:
        raise UsageError(
            f"{option}: its tokenizer has {made} tokens, the model {known}: they do not fit; copy "
            "the tokenizer of the model that it was made from"
        )


def language_model(model: Any) -> Any:
    """The model, or of one that sees images what computes text."""
    inner = getattr(model.model, "language_model", None)
    if inner is None:
        return model
    config = model.config.get_text_config()
    kind: Any = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    with torch.device("meta"):
        text = kind(config)
    text.model, text.lm_head = inner, model.lm_head
    text.generation_config = model.generation_config
    return text


def _random_model(name: str, device: str, dtype: str) -> LoadedModel:
    """Random weights at a known geometry, made on the device they are for."""
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = config_of(name)
    raw.pop("quantization_config", None)  # random weights are not quantised
    check_family(f"--model {CONFIG}{name}", raw)
    kind = str(raw.pop("model_type"))
    stored = [raw.pop(key) for key in ("dtype", "torch_dtype") if raw.get(key) is not None]
    given = dtype if dtype != "auto" else str((*stored, "bfloat16")[0]).removeprefix("torch.")
    if given not in _DTYPES:
        raise UsageError(
            f"--model {CONFIG}{name}: cannot compute in {given}; give --dtype {', '.join(_DTYPES)}"
        )
    chosen = _DTYPES[given]
    # Positions cost no memory: let any length through.
    config = AutoConfig.for_model(kind, **{"max_position_embeddings": 1 << 20, **raw})
    with torch.device("meta"):
        model = language_model(AutoModelForCausalLM.from_config(config, dtype=chosen))
    check_room(
        f"--model {CONFIG}{name}",
        sum(p.numel() * p.element_size() for p in model.parameters()),
        device,
        "use a smaller geometry, --dtype bfloat16, or another device",
    )
    model = model.to_empty(device=device)
    for module in model.modules():  # buffers are computed, not drawn
        if next(module.buffers(recurse=False), None) is not None:
            model._init_weights(module)
    generator = torch.Generator(device=model.device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=_RANDOM_STD, generator=generator)
    model.tie_weights()
    return LoadedModel(f"{name} (random weights)", model.eval(), random_weights=True)


def check_room(option: str, needed_bytes: int, device: str, advice: str) -> None:
    """Refuse weights that the device has no memory for, before anything is allocated.

    Raises `UsageError`: what is needed, what is free, and the advice.
    """
    free = free_bytes(device)
    if free is not None and needed_bytes > _ROOM * free:
        raise UsageError(
            f"{option}: its weights take {needed_bytes / 1e9:.1f} GB, but {free / 1e9:.1f} GB are "
            f"free on {device}: {advice}"
        )


def cache_shape(model: Any) -> CacheShape:
    """The layers and heads that the groups of a live model's cache stand for."""
    shape = Layout.of(model)
    layers = tuple(range(shape.layers))
    return CacheShape(layers, shape.kv_heads, shape.head_dim, rope_of(model))


def rope_of(model: Any) -> Rope | None:
    """How the model rotates keys and queries; None if layers differ, or it changes with length."""
    embedding = getattr(model.base_model, "rotary_emb", None)
    kind = getattr(embedding, "rope_type", "")
    if embedding is None or isinstance(kind, dict) or kind == "longrope" or "dynamic" in kind:
        return None
    fresh = type(embedding)(embedding.config)  # on the host: reading a GPU's buffer waits for it
    return Rope(tuple(fresh.inv_freq.tolist()), float(fresh.attention_scaling))


def eos_ids(loaded: LoadedModel) -> list[int]:
    """Every token that ends a text, after the model's generation settings and its tokeniser."""
    known = getattr(loaded.model.generation_config, "eos_token_id", None)
    ids = [] if known is None else [known] if isinstance(known, int) else list(known)
    extra = getattr(loaded.tokenizer, "eos_token_id", None)
    return sorted({*ids, *([] if extra is None else [extra])})


def geometry(loaded: LoadedModel) -> Geometry:
    """The shape of the model's cache and weights.

    Layers with a sliding window count as full ones: the live cache keeps all tokens in them, too.
    """
    config, model = loaded.model.config, loaded.model
    heads = config.num_attention_heads
    width = torch.empty(0, dtype=model.dtype).element_size()
    plain = Geometry(
        name=loaded.name,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        parameters=sum(p.numel() for p in model.parameters()),
        kv_bytes_per_element=width,
        weight_bytes_per_element=width,
    )
    return _with_experts(plain, model)


def _with_experts(plain: Geometry, model: Any) -> Geometry:
    """The same geometry, and its experts if the model is a mixture of them."""
    config, weights, layers = model.config, 0, set()
    for name, parameter in model.named_parameters():
        before, found, _ = name.partition(".experts.")
        if found:
            weights += parameter.numel()
            layers.add(before)
    if not layers:
        return plain
    return replace(
        plain,
        experts=getattr(config, "num_local_experts", 0) or config.num_experts,
        experts_per_token=config.num_experts_per_tok,
        expert_parameters=weights,
        expert_dim=getattr(config, "moe_intermediate_size", 0) or config.intermediate_size,
        expert_layers=len(layers),
    )
