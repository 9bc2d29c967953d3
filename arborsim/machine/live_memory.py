"""The GPU memory that a live search takes at most, moment by moment.

The live backend holds weights, pools of slots and the tensors of the pass that it computes.  Pools
are reserved for a number of tokens or grow by a quarter, with the old tensor and the new one there
at once, and shrink once half of their slots are free.  What a pass needs most is one of four
things: its feed-forward part, the attention rows of a block of the prompt, the tile in which large
entries of single heads' rows are counted, or the logits of that block, whose entropies are signals.
Rows of single heads of the prompt's last queries are made once it is over.  Moves hold what is on
its way to DDR or back, and convert tokens from one format to another in portions.  The formulas are
of a Llama layer as transformers computes it; `tests/live/pretended/test_memory.py` holds them
against the tensors that are allocated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from arborsim.core.formats import Format
from arborsim.core.geometry import Geometry
from arborsim.core.row_uses import RowUse
from arborsim.memory.moves import MostMoved

GROWTH, SHRINK_BELOW = 1.25, 0.5  # of a pool, as a share of its slots
GROWTH_OF_GROUPS, SHRINK_GROUPS_BELOW = 1.125, 0.85  # the same with several cache groups
SHRINK_KEPT_BELOW = 0.95  # the same, if it is known what it needs soon
PREFILL_BLOCK = 1024  # tokens of a prompt that a pass on a GPU computes
_PORTION_BYTES = 32 << 20  # at full precision, of tokens that change their format together
_FLOAT32 = 4
_FLOAT64 = 8
#: Of weights or logits of single heads that are made together.  Half of it is as fast at 4,096 keys
#: and slower at 16,384, where products of so few queries are.
TILE_BYTES = 1 << 23
_ENTROPY_NUMBERS = 1 << 24  # logits whose entropies are computed together
CUBLAS_BYTES = 32 << 20  #: of PyTorch's matrix products on sm_90


@dataclass(frozen=True)
class Moment:
    """Bytes beyond the weights at one moment of a search."""

    name: str
    pools: int
    workspace: int

    @property
    def bytes(self) -> int:
        return self.pools + self.workspace


@dataclass(frozen=True)
class LiveSearch:
    """One search as its memory depends on it; tokens, unless named otherwise.

    `kept` are those at full precision in HBM after the first decision (the prompt's, if there is
    none), `most` the largest number from then on.  `reserved` is 0 for pools that grow.  They never
    shrink below `keeps`.  Attention rows of the prompt's queries from `rows_from` on are read
    (None: of none), by cache group if there are several `groups`.  Of those from `counted_from` on,
    large entries of all heads are counted.  `signals` are read at all, and `waiting_bytes` of them
    wait on the device.  `own_bytes` of a block's are made once its layers are computed.
    `last_rows_bytes` (see there) are needed when the prompt is over.  `apart_bytes` is what lies in
    pools of other formats and in staging buffers, `first_apart_bytes` of it when the first decision
    is carried out.  `first_moving_bytes` and `moving_bytes` are what the moves of that decision and
    of later ones need at most, see `moving_bytes`.
    """

    geometry: Geometry
    prompt: int
    most: int
    kept: int | None = None
    reserved: int = 0
    keeps: int = 0
    rows_from: int | None = None
    counted_from: int | None = None
    groups: int = 1
    signals: bool = False
    waiting_bytes: int = 0
    own_bytes: int = 0
    last_rows_bytes: int = 0
    apart_bytes: int = 0
    first_apart_bytes: int = 0
    first_moving_bytes: int = 0
    moving_bytes: int = 0
    block: int = PREFILL_BLOCK
    page: int = 16

    def moments(self) -> tuple[Moment, ...]:
        """Those that can be the largest, in the order in which they come."""
        size = self.geometry.full_bytes_per_token
        # With several groups every layer has a tensor of its own; they are made anew in turn.
        slabs = self.geometry.layers if self.groups > 1 else 1
        capacity, found = self._pages(self.reserved), list[Moment]()
        for first in range(0, self.prompt, self.block):
            read = min(first + self.block, self.prompt)
            if read > capacity:
                before, capacity = capacity, self._grown(capacity, read)
                found.append(Moment("growing", size * (before // slabs + capacity), 0))
            found.append(Moment("prompt", size * capacity, self.pass_bytes(read - first, read)))
        if self.last_rows_bytes:
            left = (self.prompt - 1) % self.block + 1  # of the last block: hidden states
            left *= self.geometry.hidden * self.geometry.weight_bytes_per_element
            needed = self.last_rows_bytes + self.waiting_bytes + left
            found.append(Moment("last rows", size * capacity, needed))
        kept = self.prompt if self.kept is None else self.kept
        first = size * capacity + self.first_apart_bytes
        found.append(Moment("moving", first, self.first_moving_bytes))
        found.append(Moment("moving", size * capacity + self.apart_bytes, self.moving_bytes))
        left = self._pages(max(kept, self.keeps))
        below = SHRINK_BELOW if self.groups == 1 else SHRINK_GROUPS_BELOW
        below = SHRINK_KEPT_BELOW if self.keeps else below
        if left + self.page < below * capacity:
            before, capacity = capacity, left
            moved = size * (before + capacity // slabs)
            found.append(Moment("shrinking", moved + self.apart_bytes, 0))
        while self.most > capacity:
            before, capacity = capacity, self._grown(capacity, capacity + 1)
            grown = size * (before // slabs + capacity)
            found.append(Moment("growing", grown + self.apart_bytes, 0))
        found.append(Moment("moving", size * capacity + self.apart_bytes, self.moving_bytes))
        step_bytes = self.pass_bytes(1, 0) + 4 * _FLOAT32 * self.geometry.vocab
        found.append(Moment("decoding", size * capacity + self.apart_bytes, step_bytes))
        return tuple(found)

    @property
    def peak(self) -> Moment:
        """The largest of them."""
        return max(self.moments(), key=lambda moment: moment.bytes)

    def device_bytes(self, weight_bytes: int) -> int:
        """The most that PyTorch's allocator gives out on CUDA."""
        return weight_bytes + CUBLAS_BYTES + self.peak.bytes

    def pass_bytes(self, tokens: int, read: int) -> int:
        """Workspace of a pass over a block of the prompt, which reads this many, its own included.

        Nothing read counts as a decode step, whose rows and logits are small.
        """
        g, width = self.geometry, self.geometry.weight_bytes_per_element
        stream = 4 * g.hidden + 2 * g.head_dim
        layer, ended = tokens * (3 * g.intermediate + stream) * width, 0
        if self.rows_from is not None and read > self.rows_from:
            added, done = row_sums_bytes(min(tokens, read - self.rows_from), self.groups)
            layer += added * read
            ended = done * read + tokens * g.hidden * width
        if self.counted_from is not None and read > self.counted_from:
            queries = min(tokens, read - self.counted_from)
            queries = min(queries, max(1, TILE_BYTES // (_FLOAT32 * g.heads * read)))
            tile = g.heads * queries * (read * (_FLOAT32 + 1) + g.head_dim * width)
            layer = max(layer, tile + tokens * (stream + 2 * g.kv_heads * g.head_dim) * width)
        if self.signals and read:
            together = min(tokens * g.vocab, max(g.vocab, _ENTROPY_NUMBERS))
            ended = max(ended, tokens * g.vocab * width + 2 * _FLOAT32 * together)
        return self.waiting_bytes + max(layer - self.own_bytes * (read > 0), ended)

    def _grown(self, capacity: int, needed: int) -> int:
        """The size that a full tensor grows to."""
        growth = GROWTH if self.groups == 1 else GROWTH_OF_GROUPS
        return self._pages(max(needed, int(growth * capacity)))

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page) * self.page


def row_sums_bytes(queries: int, groups: int) -> tuple[int, int]:
    """Bytes per key of the attention rows of a block's `queries`, as the live backend adds them up.

    While its layers are computed, and after the last one; of the model with one of `groups`.
    """
    if groups > 1:
        # Sums of groups and their newest rows, by layer, and the sum of the blocks before; then the
        # first two once more, put together.
        added = groups * (2 * _FLOAT64 + _FLOAT32)
        return added, added + groups * (_FLOAT64 + _FLOAT32)
    # Mean rows, added up over layers; then divided by the number of layers, and in float16.
    return queries * _FLOAT32, queries * (2 * _FLOAT32 + 2)


def last_rows_bytes(uses: Iterable[RowUse], geometry: Geometry, prompt: int) -> int:
    """Workspace of rows of single heads of the prompt's last queries, made after the prompt.

    Queries of all layers are there in float32, and of one KV head at a time keys and rows, whose
    statistics are made of tiles in float64: twice for moments, once and with masks for means.
    """
    kept = {use.keeps: min(use.prompt, prompt) for use in uses if use.of_heads}
    if not kept:
        return 0
    g, window, members = geometry, max(kept.values()), geometry.heads // geometry.kv_heads
    tile = 0
    for keeps, queries in kept.items():
        positions = prompt - queries if keeps == "moments" else prompt
        size = min(positions, max(1, TILE_BYTES // (_FLOAT64 * members * queries)))
        row = 2 * _FLOAT64 * queries if keeps == "moments" else (_FLOAT64 + 2) * queries + _FLOAT64
        tile = max(tile, members * size * row)
    keys, rows = prompt * g.head_dim, _FLOAT32 * members * window * prompt
    rounding = keys * (2 * g.kv_bytes_per_element + 2)  # to a trace's float16
    of_head = max(rounding, keys * _FLOAT32 + rows + max(rows + window * prompt, tile))
    means = 2 * _FLOAT64 * g.kv_heads * prompt if "spread" in kept else 0
    return int(_FLOAT32 * g.layers * g.heads * window * g.head_dim + means + of_head)


def portion_tokens(token_bytes: int, scale_tokens: int = 1) -> int:
    """Tokens of a group, `token_bytes` each at full precision, that are converted at a time.

    They are whole groups of `scale_tokens`, whose scales are made together.
    """
    return max(_PORTION_BYTES // max(1, token_bytes) // scale_tokens, 1) * scale_tokens


def moving_bytes(
    moved: MostMoved, geometry: Geometry, formats: tuple[Format, ...], groups: int, staged: bool
) -> tuple[int, int]:
    """Workspace of the moves of a search, by the first decision and by later ones: see `MostMoved`.

    Tokens that cross the link lie in buffers in the format that they have in DDR.  What is
    converted, or comes back to HBM from a `staged` copy, is copied in portions.
    """
    token_bytes = -(-geometry.full_bytes_per_token // groups)
    rungs, most = (None, formats[0], formats[-1]), [0, 0]
    for later, source, target in np.argwhere(moved.tokens).tolist():
        to = rungs[target]
        portion = portion_tokens(token_bytes, 1 if to is None else to.scale_tokens)
        tokens = min(int(moved.tokens[later, source, target]), portion)
        if staged or source != target:
            size = _converting_bytes(geometry, tokens / groups, rungs[source], to)
            most[later] = max(most[later], size)
    return moved.link_bytes + most[0], moved.link_bytes + most[1]


def _converting_bytes(
    g: Geometry, tokens: float, source: Format | None, target: Format | None
) -> int:
    """Bytes while a portion of tokens of the whole cache changes its format.

    The codecs of the live backend (`arborsim_torch.tiers.codec`), step by step: what is read, the
    numbers in float32 once or twice, and the codes before they are packed.
    """
    numbers = tokens * g.full_bytes_per_token / g.kv_bytes_per_element
    exact = numbers * g.kv_bytes_per_element
    wide = _FLOAT32 * numbers
    read = exact if source is None else tokens * source.token_bytes(g)
    if source == target:
        return int(read)
    decoded = 0.0 if source is None else wide + exact
    if target is None:
        return int(read + decoded)
    held = read + (0.0 if source is None else exact)
    if target.floating:
        scales = 2 * _FLOAT32 * numbers / g.head_dim
        return int(max(read + decoded, held + wide + numbers + scales))
    of = 0.5 if target.scale_tokens > 1 else 1.0  # keys and values are encoded one after the other
    scales = 10 * of * numbers / (target.group or g.head_dim)
    copy = wide if g.kv_bytes_per_element < _FLOAT32 else 0.0
    codes = of * (wide + numbers) + (1 - of) * numbers  # of the values, with those of the keys
    outliers = 4 * of * wide if target.outliers else 0.0
    return int(max(read + decoded, held + copy + codes + scales + outliers))
