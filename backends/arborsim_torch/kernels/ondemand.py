"""Which pages of keys a query needs, by an upper bound on its inner products.

Quest (Tang et al. 2024, arXiv:2406.10774): per page and channel the smallest and the largest key
are kept; ``sum_d max(q_d low_d, q_d high_d)`` is at least ``q . k`` for every key k of the page.
Pages with the largest bounds are read, the others stay where they are.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from arborsim_torch.kernels.dense import pack, unpack
from arborsim_torch.kernels.piece import in_triton


class PageBounds:
    """Channel-wise bounds ``[kv_heads, pages, head_dim]`` of the keys of each `filled` page.

    Bounds widen with every key; a key that is evicted leaves them valid but wide, until `clear`.
    Keys are as attention reads them, hence decoded ones, on the device of the bounds.
    """

    def __init__(
        self,
        pages: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        shape = (kv_heads, pages, head_dim)
        # Finite, so that the bound of an empty page is -inf or just low, but never 0 x inf = NaN.
        self._extreme = torch.finfo(dtype).max
        self.low = torch.full(shape, self._extreme, dtype=dtype, device=device)
        self.high = torch.full(shape, -self._extreme, dtype=dtype, device=device)
        self.filled = torch.zeros(shape[:2], dtype=torch.bool, device=device)

    @property
    def nbytes(self) -> int:
        return self.low.nbytes + self.high.nbytes + self.filled.nbytes

    def heads(self, which: slice) -> PageBounds:
        """The bounds of some KV heads: views, so that an update of either is one of both."""
        part = copy.copy(self)
        part.low, part.high, part.filled = (x[which] for x in (self.low, self.high, self.filled))
        return part

    def grow(self, pages: int) -> None:
        """Have at least `pages` pages; the new ones are empty."""
        more = pages - self.filled.shape[1]
        if more > 0:
            pad = torch.nn.functional.pad
            self.low = pad(self.low, (0, 0, 0, more), value=self._extreme)
            self.high = pad(self.high, (0, 0, 0, more), value=-self._extreme)
            self.filled = pad(self.filled, (0, more), value=False)

    def joined(self, others: Sequence[PageBounds]) -> PageBounds:
        """These pages, then those of others, for the same heads: a copy if there are others."""
        if not others:
            return self
        every, whole = (self, *others), copy.copy(self)
        whole.low = torch.cat([each.low for each in every], dim=1)
        whole.high = torch.cat([each.high for each in every], dim=1)
        whole.filled = torch.cat([each.filled for each in every], dim=1)
        return whole

    def update(self, page: int | Tensor, keys: Tensor) -> None:
        """Take keys ``[kv_heads, tokens, head_dim]`` into the bounds of their pages.

        `page` is that of all keys, or int64 ``[tokens]`` or ``[kv_heads, tokens]``.
        """
        at = page if isinstance(page, Tensor) else torch.tensor(page, device=keys.device)
        at = at.expand(keys.shape[:2])
        spots = at[..., None].expand_as(keys)
        self.low.scatter_reduce_(1, spots, keys, "amin")
        self.high.scatter_reduce_(1, spots, keys, "amax")
        self.filled.scatter_(1, at, True)

    def clear(self, page: int | Tensor) -> None:
        """Forget the keys of a page, or of several (int64 ``[pages]``)."""
        self.low[:, page] = self._extreme
        self.high[:, page] = -self._extreme
        self.filled[:, page] = False

    def bound(self, q: Tensor) -> Tensor:
        """An upper bound of inner products with the keys of each page.

        ``[seqs, heads, pages]``, but for rounding to float32; -inf for pages without keys.
        """
        wide = torch.promote_types(q.dtype, torch.float32)
        rows = pack(q[:, :, None].to(wide), len(self.low))
        most = torch.bmm(rows.clamp(min=0), self.high.to(wide).transpose(1, 2))
        most += torch.bmm(rows.clamp(max=0), self.low.to(wide).transpose(1, 2))
        most.masked_fill_(~self.filled[:, None], float("-inf"))
        return unpack(most, len(q), 1)[:, :, 0]

    def select(
        self, q: Tensor, pages_top: int, *, shared: bool = False, readable: Tensor | None = None
    ) -> Tensor:
        """The pages with the largest bounds over the query heads of each KV head.

        Of all that have keys, or of those `readable`, ``[kv_heads or 1, pages]``.  Returns int64
        ``[seqs, kv_heads, pages_top]``, without the sequences if `shared`, chosen by the largest
        bound over them: largest bound first, of equal bounds the lower page, -1 where there are no
        more pages.
        """
        kv_heads, pages = self.filled.shape
        most = self.bound(q).view(len(q), kv_heads, -1, pages).amax(2)
        filled = self.filled
        if readable is not None:
            filled = filled & readable
            most.masked_fill_(~filled, float("-inf"))
        if shared:
            most = most.amax(0)
        best, chosen = most.sort(dim=-1, descending=True, stable=True)
        chosen, best = chosen[..., :pages_top], best[..., :pages_top]
        # A bound may be -inf by overflow as well: what counts is whether the page may be read.
        return torch.where(filled.expand(most.shape).gather(-1, chosen), chosen, -1)


def choose_pages(
    bounds: Sequence[PageBounds], q: Tensor, pages_top: int, readable: Tensor
) -> Tensor:
    """Pages of several sets for the same heads, numbered one set after the other.

    As `PageBounds.select` chooses them for queries ``[seqs, heads, head_dim]``, once for all
    sequences; in Triton on CUDA (`arborsim_torch.kernels.ondemand_triton`).  Returns int64
    ``[kv_heads, pages_top]``, or as many columns as there are pages.
    """
    pages_top = min(pages_top, sum(each.filled.shape[1] for each in bounds))
    if in_triton(q.device, q.dtype):
        from arborsim_torch.kernels import ondemand_triton

        sets = [(each.low, each.high, each.filled) for each in bounds]
        return ondemand_triton.choose(sets, q, pages_top, readable)
    first, *others = bounds
    return first.joined(others).select(q, pages_top, shared=True, readable=readable)
