"""The slots at the start of a pool that everybody reads: a kernel for contiguous caches can too.

A pool fills from its start, and a slot that is given up is the next to be taken.  So what all
sequences of a batch read, a prompt or all there is, mostly has no gaps.  `SharedPrefix` knows how
far that goes, and lists what else is read: what single branches have decoded.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from arborsim_torch.kernels.piece import Piece, Prefix
from arborsim_torch.tiers.copies import to_device

_LEAST = 256  # tokens; fewer are not worth a call of their own
_LEAST_SHARE = 0.5  # of the slots that are looked at
_LEAST_ROOM = 64


class SharedPrefix:
    """The reads of a pool whose tokens have the same slot in all layers and heads.

    Slots below `length` are read by every sequence, with a kernel of the `package`, one of
    `arborsim_torch.kernels.packages.DECODERS`.
    """

    def __init__(self, device: torch.device, package: str = "flash-attn") -> None:
        self._device, self._package = device, package
        self._seqs = 0
        self._read = np.zeros((1, 0), dtype=np.bool_)  # [rows, slots]
        self._high = 0  # slots below this are looked at
        self.length = 0
        self._rest = np.empty(0, dtype=np.int64)  # slots beyond, of any sequence
        self._stale = True
        # By rows and room: int32 [2 + rows, room] (the length, slots, who reads them) and a mask
        self._tensors: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def reset(self, slot: np.ndarray, on_path: np.ndarray, seqs: int) -> None:
        """These slots are read, by the rows of `on_path`, bool ``[rows, m]``, and no others.

        Rows from `seqs` on are padding: it does not matter what they read.
        """
        self._seqs, self.length = seqs, 0
        self._read = np.zeros((len(on_path), 0), dtype=np.bool_)
        self._high = 0
        self.change(np.empty(0, dtype=np.int64), slot, on_path)

    def change(self, left: np.ndarray, slot: np.ndarray, on_path: np.ndarray) -> None:
        """Slots `left` are not read any more; then `slot` are."""
        self._high = max(self._high, int(slot.max(initial=-1)) + 1)
        more = self._high - self._read.shape[1]
        if more > 0:
            self._read = np.pad(self._read, ((0, 0), (0, max(more, self._read.shape[1]))))
        self._read[:, left] = False
        self._read[:, slot] = on_path
        first = min(self.length, int(left.min(initial=self._high)))
        by_all = np.logical_and.reduce(self._read[: self._seqs, first : self._high], axis=0)
        gap = int(np.argmin(by_all)) if len(by_all) and not by_all.all() else len(by_all)
        self.length = first + gap
        beyond = np.logical_or.reduce(self._read[: self._seqs, self.length : self._high], axis=0)
        self._rest = self.length + np.flatnonzero(beyond)
        self._stale = True

    @property
    def useful(self) -> bool:
        """Whether it is long enough to be read apart from the rest."""
        return self.length >= max(_LEAST, _LEAST_SHARE * self._high)

    def key(self) -> Hashable:
        """Changes if a piece has other shapes or memory; brings the tensors up to date."""
        self._bring_up_to_date()
        return len(self._read), self._room

    def of(self, piece: Piece) -> Piece:
        """A piece of the pool, over all of its entries, with what is known of its start."""
        table, mask = self._bring_up_to_date()
        room, rest = self._room, None
        if room:
            rest = replace(piece, index=table[1], room=room, mask=mask)
        return replace(piece, prefix=Prefix(table[0, :1], rest, self._package))

    @property
    def _room(self) -> int:
        """Entries of the rest, rounded up to a power of two; 0 if there are none."""
        rest = len(self._rest)
        return max(_LEAST_ROOM, 1 << (rest - 1).bit_length()) if rest else 0

    def _bring_up_to_date(self) -> tuple[Tensor, Tensor]:
        """Write length and rest to the device, where a captured step finds them again."""
        rows, room = wanted = len(self._read), self._room
        if not self._stale:
            return self._tensors[wanted]
        width = max(1, room)
        table = np.zeros((2 + rows, width), dtype=np.int32)
        table[0, 0], table[1] = self.length, -1
        table[1, : len(self._rest)] = self._rest
        table[2:, : len(self._rest)] = self._read[:, self._rest]
        known = self._tensors.get(wanted)
        if known is None:
            known = self._tensors[wanted] = (
                torch.empty(table.shape, dtype=torch.int32, device=self._device),
                torch.empty((rows, 1, width), dtype=torch.bool, device=self._device),
            )
        known[0].copy_(to_device(table, self._device))
        if room:
            known[1].copy_(known[0][2:, None])
        self._stale = False
        return known
