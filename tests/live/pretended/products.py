"""Matrix products and attention under the names that they have on CUDA, computed on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .device import FUNCTIONS, OPERATORS, adopt, again, inner, on_device, run, touch, where_to
from .rules import check_bias, check_flash, check_rows, check_together

aten = torch.ops.aten


def bmm(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
    if out_dtype is None:
        with torch._C.DisableTorchFunctionSubclass():
            return torch.bmm(a, b, **kwargs)
    if a.dtype != b.dtype or out_dtype not in (a.dtype, torch.float32):
        raise RuntimeError("out_dtype must be the inputs' type, or float32 for 16-bit inputs")
    check_together(aten.bmm.default, "bmm", [("self", a), ("mat2", b)], on_device)
    # Products of 16-bit numbers are exact in float32, where CUDA sums them up as well.
    return run(aten.bmm.default, a.to(out_dtype), b.to(out_dtype))  # type: ignore[no-any-return]


def attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`: the CPU's, as one operation.

    Counted under the backend that recent versions choose on sm_90.
    """
    every = [("query", q), ("key", k), ("value", v)]
    every += [("attn_mask", x) for x in (*args, kwargs.get("attn_mask")) if isinstance(x, Tensor)]
    check_together(aten.bmm.default, "attention", every, on_device)
    if not q.dtype == k.dtype == v.dtype:
        raise RuntimeError("Expected query, key, and value to have the same dtype")
    plain = {key: inner(value) for key, value in kwargs.items()}
    given = inner((q, k, v, *args))

    def compute() -> list[Tensor]:
        return [F.scaled_dot_product_attention(*given, **plain)]

    return _made(_backend(q, len(every) > 3), [x for _, x in every], compute)[0]


def _backend(q: Tensor, masked: bool) -> str:
    half, allowed = q.dtype in (torch.float16, torch.bfloat16), torch.backends.cuda
    if half and allowed.cudnn_sdp_enabled():
        return "cudnn attention"
    if half and not masked and allowed.flash_sdp_enabled():
        return "flash attention"
    return "efficient attention" if allowed.mem_efficient_sdp_enabled() else "plain attention"


def _made(name: str, reads: list[Tensor], compute: Callable[[], Any]) -> list[Tensor]:
    results = list(compute())
    by = where_to(True, name)
    for x in reads:
        touch(by, x, False, name)
    made = [adopt(x) for x in results]
    for x in made:
        touch(by, x, True, name)
    again(compute, results)
    return cast("list[Tensor]", made)


def _fused(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, bias: Tensor | None = None
) -> Any:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        inner(q), inner(k), inner(v), 0.0, causal, attn_mask=inner(bias), scale=scale
    )
    # CUDA's kernels lay the output out as [batch, queries, heads, head_dim].
    return out.transpose(1, 2).contiguous().transpose(1, 2), lse.float().contiguous()


def flash(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    check_together(aten.bmm.default, "flash", [("q", q), ("k", k), ("v", v)], on_device)
    check_flash(q, k, v)
    there = inner((q, k, v))
    out, lse = _made("flash attention", [q, k, v], lambda: _fused(*there, is_causal, scale))
    return out, lse, None, None, q.shape[2], k.shape[2], None, None, None


def efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
) -> Any:  # fmt: skip
    given = [("q", q), ("k", k), ("v", v), *([] if bias is None else [("bias", bias)])]
    check_together(aten.bmm.default, "efficient", given, on_device)
    check_rows(q, k, v)
    if bias is not None:
        check_bias(bias, q, k)
    room = math.ceil(q.shape[2] / 32) * 32 if compute_log_sumexp else 0
    queries, there, added = q.shape[2], inner((q, k, v)), inner(bias)

    def compute() -> Any:
        out, lse = _fused(*there, is_causal, scale, added)
        return out, F.pad(lse, (0, room - queries), value=float("inf"))

    out, lse = _made("efficient attention", [x for _, x in given], compute)
    return out, lse, None, None


def fill_tables() -> None:
    """Enter them into the tables of `device`."""
    FUNCTIONS.update({torch.bmm: bmm, F.scaled_dot_product_attention: attention})
    OPERATORS.update({
        aten._scaled_dot_product_flash_attention.default: flash,
        aten._scaled_dot_product_efficient_attention.default: efficient,
    })  # fmt: skip
