"""The attention function that the live backend registers with transformers.

The model's keyword argument ``context`` (`arborsim_torch.context.ForwardContext`) says what each
pass reads of its cache and collects what a recording or a policy needs; transformers hands it
through to this function, so nothing here is global.  The sequences of a batch are the leaves of one
tree: they share one set of keys and values, read once for all of them, and a mask says which
entries lie on which path.

When nothing is collected, PyTorch's fused attention runs.  When rows are collected, probabilities
are computed once, used for the output, and handed to the pass, of a block of a prompt a few queries
at a time, added up as they come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from arborsim_torch.cache.forward import HostShare, LayerView, PlacedElsewhere, PlacedPiece
from arborsim_torch.context import ForwardContext, PassContext
from arborsim_torch.kernels.dense import attend, merge, pack, wide_product
from arborsim_torch.kernels.flash import attend_prefill
from arborsim_torch.kernels.fused import sdpa
from arborsim_torch.kernels.piece import MeanRows, in_triton
from arborsim_torch.kernels.pieces import attend_pieces
from arborsim_torch.kernels.rows import adds_rows, attend_rows, count_paid

if TYPE_CHECKING:
    from arborsim_torch.masked.table import Table

NAME = "arborsim_tree"


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    context: ForwardContext | None = None,
    table: Table | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention over what the caches hold; the signature is that of transformers' interface.

    `key` and `value` are the new tokens' alone, which the caches have stored already, and a `table`
    stores here.
    """
    # To type checkers, what a module holds is a tensor or a module.
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if table is not None:
        return table.attend(layer, query, key, value, scaling, sliding_window), None
    if context is None:
        raise ValueError(f"{NAME} attention runs only through arborsim's decoder")
    if len(context.passes) == 1:
        return _attend(context.passes[0], layer, query, scaling, sliding_window), None
    outs, first = [], 0
    for part in context.passes:
        rows = query[first : first + part.metadata.num_seqs]
        outs.append(_attend(part, layer, rows, scaling, sliding_window))
        first += part.metadata.num_seqs
    return torch.cat(outs), None


def _attend(
    state: PassContext, layer: int, query: Tensor, scaling: float, window: int | None
) -> Tensor:
    """One pass's attention, ``[seqs, queries, heads, head_dim]``.

    The query heads of a group, and the sequences, become rows of one matrix: nothing is repeated.
    """
    if layer in state.query_layers:
        state.query_vectors[layer] = query
    metadata, host_attention = state.metadata, state.metadata.host_attention
    if metadata.plain is not None and not state.collect and metadata.limits(window) is None:
        return _attend_plain(
            query, metadata.plain[2 * layer], metadata.plain[2 * layer + 1], scaling
        )
    whole = state.wants_rows and (
        layer in state.row_layers or not adds_rows(query.device, query.dtype)
    )
    block = None if whole or host_attention else metadata.block(layer, window)
    if block is not None:
        return _attend_block(state, query, *block, scaling)
    if metadata.pieces is not None:
        return _attend_pieces(state, layer, query, scaling, window)
    view = metadata.view(layer, window)
    seqs, heads, queries, dim = query.shape
    kv_heads, n, _ = view.keys.shape
    group = heads // kv_heads
    if seqs == queries == 1 and view.mask is None and not state.collect and host_attention is None:
        return _attend_plain(query, view.keys[None], view.values[None], scaling)
    elsewhere = (
        None if host_attention is None else host_attention.start(layer, query, scaling, window)
    )
    if elsewhere is not None:
        return _attend_both(state, layer, query, scaling, window, view, elsewhere)
    split = query.view(seqs, kv_heads, group, queries, dim).transpose(0, 1)
    packed = split.reshape(kv_heads, seqs * group * queries, dim)
    mask = None if view.mask is None else view.mask.transpose(0, 1)[:, :, None]
    if state.collect:
        logits = torch.matmul(packed, view.keys.transpose(1, 2)).mul_(scaling)
        spread = logits.view(kv_heads, seqs, group, queries, n)
        if mask is not None:
            spread.masked_fill_(~mask, float("-inf"))
        mass = torch.softmax(spread, dim=-1, dtype=torch.float32)
        state.add(layer, (view, mass))
        out = torch.matmul(mass.to(query.dtype).view(kv_heads, -1, n), view.values)
    else:
        if mask is not None:
            wanted = (mask.shape[0], seqs, group, queries, n)
            mask = mask.expand(wanted).reshape(mask.shape[0], -1, n)[None]
        out = sdpa(packed[None], view.keys[None], view.values[None], scaling, mask)[0]
    out = out.reshape(kv_heads, seqs, group, queries, dim).permute(1, 3, 0, 2, 4)
    return out.reshape(seqs, queries, heads, dim)


def _attend_plain(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """One query over all of ``[1, kv_heads, n, head_dim]``."""
    _, heads, _, dim = query.shape
    kv_heads = keys.shape[1]
    rows = query.view(1, kv_heads, heads // kv_heads, dim)
    out = sdpa(rows, keys, values, scaling)
    return out.reshape(1, 1, heads, dim)  # flash attention on CUDA lays out queries first


def _attend_block(
    state: PassContext, query: Tensor, keys: Tensor, values: Tensor, scaling: float
) -> Tensor:
    """A block of a prompt: fused attention over what came before, and causal over itself.

    Where rows count, attention that adds them up as it goes.
    """
    if state.part is not None:
        last = query[0, :, state.first_counted :]
        state.count(count_paid(last, keys, scaling, state.part)[:, None])
    if state.wants_rows:
        kept = state.block_rows(query.device)
        out = attend_rows(query[0], keys, values, scaling, kept)[None]
        state.add_block(kept)
    else:
        own = keys.shape[1] - query.shape[2]
        history = (keys[:, :own], values[:, :own])
        out, _ = attend_prefill(query, keys[:, own:], values[:, own:], scaling, history)
    return out.transpose(1, 2)


def _attend_pieces(
    state: PassContext, layer: int, query: Tensor, scaling: float, window: int | None
) -> Tensor:
    """One query per sequence over slots that are read in place, and over what the host reads."""
    metadata, host_attention = state.metadata, state.metadata.host_attention
    host_share = None
    if host_attention is not None:
        host_share = host_attention.host_share(layer, query, scaling, window, state.collect)
    parts = metadata.parts(layer, window, host_share)
    far = None if host_share is None else host_share.elsewhere
    seqs, heads, _, dim = query.shape
    kv_heads = len(parts[0].piece.keys)
    # Masses are means over the heads of a group, unless each head of it is taken for a sequence.
    apart = state.collect and (layer in state.row_layers or state.part is not None)
    members = heads // kv_heads if apart else 1
    rows = query.view(seqs, kv_heads, members, -1, dim).transpose(1, 2)
    pieces = [part.of_each(members) if apart else part.piece for part in parts]
    means = _mean_rows(state, query, parts, host_share)
    elsewhere = None if far is None else far.elsewhere
    rows, weighs = rows.reshape(seqs * members, -1, dim), state.collect and means is None
    out, _, mass = attend_pieces(
        rows, pieces, scaling, mass=weighs, means=means, elsewhere=elsewhere
    )
    out = out.view(seqs, members, kv_heads, -1, dim).transpose(1, 2)
    if mass is not None:
        by_head = mass.view(seqs, members, kv_heads, -1)
        piece, position = parts[0].piece, None
        if state.wants_rows:  # large entries are counted wherever they stand
            position = metadata.placed([*parts, far] if far is not None else parts)
        view = LayerView(piece.keys, piece.values, None, position, metadata.positions)
        state.add(layer, (view, by_head.permute(2, 0, 1, 3)[:, :, :, None]))
    return out.reshape(seqs, 1, heads, dim)


def _mean_rows(
    state: PassContext, query: Tensor, parts: list[PlacedPiece], host_share: HostShare | None
) -> MeanRows | None:
    """Where a layer's kernel adds its row; None where rows are put in their places apart."""
    if not state.wants_means or not in_triton(query.device, query.dtype):
        return None
    further, near = None, list[PlacedPiece | PlacedElsewhere](parts)
    if host_share is not None and host_share.position is not None:
        further, near = host_share.position, near[: -len(host_share.pieces)]
    elif host_share is not None and host_share.elsewhere is not None:
        near.append(host_share.elsewhere)
    position = state.metadata.placed(near)
    if len(position) > 1:  # each head holds tokens of its own
        return None
    return state.mean_rows(position[0], None if further is None else further[0])


def _attend_both(
    state: PassContext,
    layer: int,
    query: Tensor,
    scaling: float,
    window: int | None,
    view: LayerView,
    elsewhere: Callable[[], tuple[Tensor, Tensor]],
) -> Tensor:
    """The device's part, merged with that of the tokens which stay on the host."""
    seqs, heads, queries, _ = query.shape
    kv_heads, n, _ = view.keys.shape
    out, lse = attend(query, view.keys, view.values, scaling, view.mask)
    far, far_lse = elsewhere()
    whole, total = merge([out, far.to(out.dtype)], [lse, far_lse])
    if state.collect:
        packed = pack(query, kv_heads)
        logits = wide_product(packed, view.keys.transpose(1, 2)).mul_(scaling)
        spread = logits.view(kv_heads, seqs, -1, queries, n)
        if view.mask is not None:
            spread.masked_fill_(~view.mask.transpose(0, 1)[:, :, None], float("-inf"))
        level = total.view(seqs, kv_heads, -1, queries).transpose(0, 1)[..., None]
        host_attention = state.metadata.host_attention
        assert host_attention is not None
        mass, there = host_attention.rows(layer, query, scaling, window, total)
        state.add(layer, (_placed(view), (spread - level).exp_()), (there, mass))
    return whole.transpose(1, 2).reshape(seqs, queries, heads, -1)


def _placed(view: LayerView) -> LayerView:
    """The same view with its positions spelled out."""
    if view.position is not None:
        return view
    spots = torch.arange(view.keys.shape[1], device=view.keys.device)[None]
    return replace(view, position=spots)


def register() -> None:
    """Make `NAME` known to transformers; calling it again does no harm."""
    AttentionInterface.register(NAME, tree_attention)
    # Masks are made from positions and paths: transformers need not build any.
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
