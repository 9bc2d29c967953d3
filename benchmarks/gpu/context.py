"""The longest context that fits a device, found by bisection with cheap probes.

A probe does not compute the whole prompt: it takes the cache's slots for it, whose contents stay
zero, and computes what needs most memory, the last block of the prompt, and one decode iteration.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from arborsim_torch.cache.forward import AttentionMetadata
from arborsim_torch.cache.layout import Layout, Place
from arborsim_torch.cache.tiered import TieredCache
from arborsim_torch.context import PassContext
from arborsim_torch.decoder import Pass, TreeDecoder, run_together
from arborsim_torch.hardware.memory import usable_bytes
from arborsim_torch.models import LoadedModel, geometry
from benchmarks.gpu.journal import Facts, out_of_memory, peaks, release, reset_peak, synchronize

#: What attention leaves behind, and how the prompt is computed.
KINDS = {
    "n x n rows": "attention rows of the whole prompt at once, as eager attention makes them",
    "rows by block": "attention rows of one block of the prompt at a time",
    "fused": "no attention rows",
}
_CLOSE = 0.02  # the bisection ends when it knows the length to this


class Rows:
    """An observer that takes attention rows to the host, as a capture does, and drops them."""

    wants_attention, wants_hidden = True, False

    def context(self, metadata: AttentionMetadata) -> PassContext:
        return PassContext(metadata, first_row=0)

    def forward(
        self, decoder: TreeDecoder, state: PassContext, hidden: list[Tensor], last: Tensor
    ) -> None:
        state.attention().cpu()


@dataclass(frozen=True)
class Prober:
    """Probes contexts of one model.

    Attributes
    ----------
    loaded : LoadedModel
    kind : str
        One of `KINDS`.
    block_tokens : int
        Prompt tokens per forward pass; all of them for "n x n rows".
    """

    loaded: LoadedModel
    kind: str
    block_tokens: int

    def ceiling(self) -> int:
        """A length that cannot fit: its cache, or one matrix in 16 bits, takes all free memory."""
        room, shape = usable_bytes(self.loaded.model.device), geometry(self.loaded)
        longest = room // shape.kv_bytes_per_token
        if self.kind == "n x n rows":
            longest = min(longest, math.isqrt(room // (2 * shape.heads)))
        return longest

    def fits(self, tokens: int) -> bool:
        """Whether a prompt of `tokens` tokens and one more can be computed."""
        try:
            self.probe(tokens)
            return True
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
        return False

    @torch.inference_mode()
    def probe(self, tokens: int) -> None:
        """Take memory as a prompt of `tokens` tokens does."""
        model = self.loaded.model
        block = tokens if self.kind == "n x n rows" else min(tokens, self.block_tokens)
        cache = TieredCache(Layout.of(model))
        cache.pools[Place.HBM].reserve(tokens + 1)
        rows = None if self.kind == "fused" else Rows()
        decoder = TreeDecoder(model, rows, block, cache)
        cache.open(0, -1)
        cache.activate([0])
        ids = np.ones((1, tokens), dtype=np.int64)
        if tokens > block:
            cache.begin(ids[:, block:])
        last = ids[:, :block]
        run_together([Pass(decoder, last, cache.begin(last), 1, rows is not None)])
        decoder.open(1, 0)
        decoder.activate([1])
        decoder.step([1])
        synchronize(model.device)


def longest_context(
    prober: Prober, step: int, most: int, left_s: Callable[[], float], tell: Callable[[Facts], None]
) -> Facts:
    """Bisect to the longest multiple of `step` tokens that fits, up to `most`.

    Parameters
    ----------
    prober : Prober
    step, most : int
        Tokens.
    left_s : callable
        Seconds that are left; the bisection ends early when no probe fits in.
    tell : callable
        Gets the facts of every probe.

    Returns
    -------
    dict
        ``fits_tokens`` did fit, ``fails_tokens`` did not (or was never tried, if that is what
        ended the search: see ``ended``).
    """
    device = prober.loaded.model.device
    spent_s = 0.0

    def fits(steps: int) -> bool:
        nonlocal spent_s
        before = left_s()
        reset_peak(device)
        found = prober.fits(steps * step)
        facts = {"tokens": steps * step, "fits": found, **peaks(device)}
        release(device)
        spent_s = max(spent_s, before - left_s())
        tell(facts)
        return found

    ceiling = prober.ceiling() // step + 1
    top = min(ceiling, most // step)
    low, high = 0, top
    if top < ceiling and fits(top):
        return {"fits_tokens": top * step, "fails_tokens": None, "ended": "longest asked for"}
    while high - low > max(1, _CLOSE * low):
        if left_s() < 2 * spent_s:
            return {"fits_tokens": low * step, "fails_tokens": high * step, "ended": "time"}
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return {"fits_tokens": low * step, "fails_tokens": high * step, "ended": "memory"}
