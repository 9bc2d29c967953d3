"""The types that weights are served in: chosen by name, or read from a model's configuration.

Only whole kinds of matrices are followed: all of the layers, or those of the routed experts alone.
Where a configuration leaves single layers or projections unquantised, they are counted as the rest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from arborsim.core.errors import UsageError
from arborsim.core.geometry import WEIGHT_BITS, Geometry
from arborsim.machine.names import type_name

_WIDTHS = {"bf16": 2, "fp16": 2, "fp32": 4}
#: What ``--weights`` takes, and the bits of one weight with its share of scales.
WEIGHTS = {**WEIGHT_BITS, **{name: 8.0 * width for name, width in _WIDTHS.items()}}
_MODELOPT = {"FP8": "fp8", "FP8_PB_WO": "fp8_block", "NVFP4": "nvfp4"}
_PACKED = {"nvfp4-pack-quantized": "nvfp4", "mxfp4-pack-quantized": "mxfp4"}
_LEFT_OUT = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")
#: Numbers that share a scale, where the configuration says so.
_GROUPS = {"int4": 128, "nvfp4": 16, "mxfp4": 32}


def with_weights(geometry: Geometry, dtype: str) -> Geometry:
    """The model with all matrices of its layers in one of `WEIGHTS`.

    A model whose weights are that way already is returned as it is.
    """
    dtype = type_name("weights", WEIGHTS, dtype)
    if not dtype:
        return geometry
    width = _WIDTHS.get(dtype, geometry.weight_bytes_per_element)
    kind = "" if dtype in _WIDTHS else dtype
    now = (geometry.weights, geometry.expert_weights, geometry.weight_bytes_per_element)
    if now == (kind, "", width):
        return geometry
    name = f"{geometry.name}, {dtype} weights"
    return replace(
        geometry, name=name, weights=kind, expert_weights="", weight_bytes_per_element=width
    )


def weights_type(geometry: Geometry) -> str:
    """In words: ``16-bit``, ``fp8_block``, or ``16-bit, experts mxfp4``."""
    plain = f"{8 * geometry.weight_bytes_per_element}-bit"
    experts = geometry.expert_type if geometry.expert_type != geometry.weights else ""
    return (geometry.weights or plain) + (f", experts {experts}" if experts else "")


def quantised_weights(described: object, layers: int, experts: bool, origin: str) -> dict[str, str]:
    """The fields `weights` and `expert_weights` of what ``quantization_config`` is.

    `layers` is the model's, `experts` whether it has routed experts.  Raises `UsageError`, naming
    what was found, if the weights would be counted wrongly.
    """
    if not described:
        return {}
    if not isinstance(described, dict):
        raise _refused(origin, "an object is expected", described)
    kind = _kind(described, origin)
    if not _spares_attention(described, layers, origin):
        return {"weights": kind}
    if not experts:
        raise _refused(origin, "its attention is left out, and there are no experts", kind)
    return {"expert_weights": kind}


def _kind(config: Mapping[str, Any], origin: str) -> str:
    method = str(config.get("quant_method") or "").lower()
    if method.startswith("modelopt") or (not method and "quant_algo" in config):
        algorithm = str(config.get("quant_algo") or "").upper()
        if algorithm not in _MODELOPT:
            raise _refused(origin, f"quant_algo is none of {', '.join(_MODELOPT)}", algorithm)
        return _MODELOPT[algorithm]
    if method == "fp8":
        return _fp8(config.get("weight_block_size"), origin)
    if method == "mxfp4":
        return "mxfp4"
    if method in ("gptq", "gptq_marlin", "awq", "awq_marlin"):
        bits = config.get("bits", config.get("w_bit"))
        if bits != 4:
            raise _refused(origin, f"{method} is supported in 4 bits only", f"{bits} bits")
        return _grouped("int4", config.get("group_size", config.get("q_group_size")), origin)
    if method == "compressed-tensors":
        return _compressed(config, origin)
    raise _refused(origin, "quant_method is not supported", config.get("quant_method"))


def _compressed(config: Mapping[str, Any], origin: str) -> str:
    """The one kind that all groups of compressed-tensors have."""
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _refused(origin, "compressed-tensors without config_groups", groups)
    found = set()
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise _refused(origin, "compressed-tensors without a type of weights", group)
        packed = group.get("format") or config.get("format")
        found.add(_compressed_group(weights, _PACKED.get(str(packed), ""), origin))
    if len(found) > 1:
        raise _refused(origin, "several types in one model", " and ".join(sorted(found)))
    return found.pop()


def _compressed_group(weights: Mapping[str, Any], packed: str, origin: str) -> str:
    bits, form = weights.get("num_bits"), weights.get("type")
    if (bits, form) == (8, "float"):
        return _fp8(weights.get("block_structure"), origin)
    if (bits, form) == (4, "int"):
        return _grouped("int4", weights.get("group_size"), origin)
    if (bits, form) == (4, "float") and packed:
        return _grouped(packed, weights.get("group_size"), origin)
    raise _refused(origin, "compressed-tensors of this type are not supported", f"{bits} {form}")


def _fp8(block: object, origin: str) -> str:
    if block is None:
        return "fp8"
    if block not in ([128, 128], "128x128"):
        raise _refused(origin, "blocks of fp8 have 128 x 128 weights", block)
    return "fp8_block"


def _grouped(kind: str, size: object, origin: str) -> str:
    if (kind, size) == ("int4", 32):
        return "int4_32"
    if size not in (None, _GROUPS[kind]):
        raise _refused(origin, f"groups of {kind} have {_GROUPS[kind]} weights", size)
    return kind


def _spares_attention(config: Mapping[str, Any], layers: int, origin: str) -> bool:
    """Whether the attention of all layers is left unquantised."""
    named: list[object] = []
    for key in _LEFT_OUT:
        given = config.get(key) or []
        if not isinstance(given, list):
            raise _refused(origin, f"{key} must be a list", given)
        named += given
    whole = [each for each in map(str, named) if re.search(r"self_attn\W*$", each)]
    return any(not re.search(r"\d", each) for each in whole) or len(whole) >= layers


def _refused(origin: str, why: str, found: object) -> UsageError:
    return UsageError(
        f"{origin} describes quantised weights that are not supported (quantization_config): "
        f"{why}, found {found!r:.60}; leave it out and give --weights"
    )
