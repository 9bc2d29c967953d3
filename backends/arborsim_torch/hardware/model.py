"""The model whose passes are timed: as much of it as fits, and its first layers alone."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from arborsim.core.errors import UsageError
from arborsim.machine.lookup import config_of, load_geometry
from arborsim.products.calibrate.backend import HardwareRequest
from arborsim_torch.checkpoint import CONFIG
from arborsim_torch.hardware.memory import usable_bytes
from arborsim_torch.models import LoadedModel, check_device, load_model

_GIB = 1 << 30
_SHARE = 0.5  # of the free memory: the other half is for caches and buffers
_ON_CPU = 4 * _GIB  # random weights are drawn at some 0.1 GB/s there
_LEAST_VOCABULARY = 64
_LEAST_LAYERS = 2  # one depth alone does not tell layers from the rest
# What a pass of these costs is not what the fit takes it for: every weight and token once.
_UNTIMED = {
    "mixtral": "reads only some of its experts",
    "qwen3_moe": "reads only some of its experts",
    "gemma3_text": "reads only a window in most layers",
}


def load_for_timing(request: HardwareRequest) -> tuple[LoadedModel, tuple[str, ...]]:
    """The model, and notes on what was left off.

    Raises `UsageError`: there is no such device or model, not even two layers of it fit, or its
    passes do not read all weights and tokens.
    """
    device = torch.device(check_device(request.device))
    if not request.model.startswith(CONFIG):
        loaded = load_model(request.model, "", request.device)
        return _deep_enough(loaded), ()
    _refuse_untimed(request.model, config_of(request.model.removeprefix(CONFIG)).get("model_type"))
    room = int(usable_bytes(device) * _SHARE)
    if device.type == "cpu":
        room = min(room, _ON_CPU)
    name = request.model.removeprefix(CONFIG)
    whole = load_geometry(name)
    fitting = _layers_within(room, name)
    if fitting >= whole.layers:
        return _deep_enough(load_model(request.model, "", request.device)), ()
    if fitting < _LEAST_LAYERS:
        raise UsageError(
            f"--model {request.model}: not even {_LEAST_LAYERS} layers fit into the "
            f"{room / 1e9:.1f} GB that measuring may take on {request.device}: choose a smaller one"
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name / "config.json" if "/" not in name else Path(folder) / "m.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(_shorter(config_of(name), fitting)))
        loaded = load_model(f"{CONFIG}{path}", "", request.device)
    note = f"{fitting} of the model's {whole.layers} layers were run, and as much of its vocabulary"
    return LoadedModel(request.model, loaded.model, random_weights=True), (note,)


def _refuse_untimed(name: str, kind: Any) -> None:
    if kind in _UNTIMED:
        raise UsageError(
            f"--model {name}: a pass of {kind} {_UNTIMED[kind]}, so it does not tell the machine's "
            "numbers: choose a dense model with full attention, such as config:llama-3.1-8b"
        )


def _deep_enough(loaded: LoadedModel) -> LoadedModel:
    _refuse_untimed(loaded.name, loaded.model.config.model_type)
    if loaded.model.config.num_hidden_layers < _LEAST_LAYERS:
        raise UsageError(f"--model {loaded.name} has one layer: its cost per layer cannot be told")
    return loaded


def _layers_within(room_bytes: int, name: str) -> int:
    """How many layers of a geometry fit into `room_bytes`, with their share of the rest."""
    whole = load_geometry(name)
    weight_bytes = whole.parameters * whole.weight_bytes_per_element  # none is quantised here
    return min(whole.layers, room_bytes * whole.layers // weight_bytes)


def _shorter(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The first layers, and as large a share of the vocabulary: a small model of the same kind."""
    kinds = config.get("layer_types")
    vocabulary = config["vocab_size"] * layers // config["num_hidden_layers"]
    return {
        **config,
        "num_hidden_layers": layers,
        "vocab_size": max(_LEAST_VOCABULARY, vocabulary),
        **({"layer_types": kinds[:layers]} if kinds else {}),
    }


@dataclass(frozen=True)
class Counted:
    """Parameters that count as read in a decode iteration, and in a prefill.

    The cost model counts every parameter in every pass.  But of an input embedding only single
    rows are read, and a prefill multiplies only its last token with the output's.  In a model cut
    to few layers these two are large, so that it would seem to do more than its share.  What is
    multiplied counts for as much more as makes the numbers of the whole model right.
    """

    decode: int
    prefill: int


@contextmanager
def first_layers(model: Any, layers: int) -> Iterator[Counted]:
    """The model cut to its first layers; yields what they count for."""
    whole, depth = model.model.layers, model.config.num_hidden_layers
    all_of_it, before = count_parameters(model), _multiplied(model)
    model.model.layers, model.config.num_hidden_layers = whole[:layers], layers
    try:
        now = _multiplied(model)
        yield Counted(*(round(all_of_it * n / of) for n, of in zip(now, before, strict=True)))
    finally:
        model.model.layers, model.config.num_hidden_layers = whole, depth


def count_parameters(model: Any) -> int:
    """All parameters; shared ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _multiplied(model: Any) -> tuple[int, int]:
    """Parameters that tokens meet: each one that is decoded, and each one of a prompt."""
    layers = sum(parameter.numel() for parameter in model.model.layers.parameters())
    return layers + int(model.get_output_embeddings().weight.numel()), layers
