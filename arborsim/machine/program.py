"""The demand of one search on a machine, whatever else is served: phases in order, as numbers.

A program holds bytes and tokens.  Its phases are *ops*; its decode iterations are cut into *pieces*
in which every quantity grows by the same amount from one iteration to the next.  Its transfers are
*chains* of legs that follow one another.  A program that is kept is a `SearchDemand`.  One whose
phases know their seconds, by `arborsim.machine.price`, is a `PricedProgram`.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import simpy

from arborsim.core.errors import UsageError
from arborsim.core.outputs import whole
from arborsim.core.row_uses import ALL_QUERIES
from arborsim.core.tiers import DDR
from arborsim.machine.integration import Longer

#: Columns of pieces; a name that ends in "_growth" is the increment per iteration.
_READ = ("read_bytes", "quantised_bytes", "attended", "rows", "examined")
LINEAR = (*_READ, "hbm_bytes", "prefix_bytes")
FIXED = ("sequences", "decided", "streamed_bytes", "remote_bytes", "window_bytes")
PIECE_COLUMNS = ("iterations", *FIXED, *LINEAR, *(f"{name}_growth" for name in LINEAR))
#: `route` is ``2 * (memory - DDR) + up``.
LEG_COLUMNS = ("chain", "route", "bytes", "hold_before", "hold_after")
#: `attended` and `rows` count these parts of a token, so that means over layers stay whole numbers.
ATTENDED_UNITS = 1 << 16
_FORMAT = 1
#: `window_bytes` is not in files: demands in which it matters are not kept.
_WINDOW = PIECE_COLUMNS.index("window_bytes")
_WIDTHS = {"ops": 4, "pieces": len(PIECE_COLUMNS) - 1, "legs": len(LEG_COLUMNS)}
_BROKEN_ARCHIVE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError)
_DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, *_BROKEN_ARCHIVE)


class Op(IntEnum):
    """Kinds of phases, and what their numbers, at most three, are."""

    PREFILL = 0  # tokens of the prompt
    DECODE = 1  # row of `SearchDemand.pieces`
    DECIDE = 2  # tokens that the policy examines in a decision outside a run of iterations
    COPY = 3  # bytes of HBM that device code reads and writes, and what for (`Copied`)
    RECOMPUTE = 4  # evicted tokens to prefill again, tokens present
    SEND = 5  # chain of transfers that starts now, in the background
    WAIT = 6  # chain that must have ended before the search goes on; -1 for all
    BEGUN = 7  # chain whose last transfer must have begun before the search goes on
    #: Bytes of HBM taken (or given up, if negative) apart from the pages; 1 for buffers of recalled
    #: tokens, 0 for pages in flight.
    HOLD = 8
    #: Bytes of HBM in pages and streaming buffers from now on, the part of them that holds the
    #: shared prefix, bytes of DDR.
    LEVEL = 9
    TURN = 10  # sequences that the search turns to
    MOVE = 11  # transfers that the host works on, cache groups in them (added up), and bytes
    STORE = 12  # a memory below DDR (`Tier.memory`), and bytes in it from now on


class Copied(IntEnum):
    """The purpose of an `Op.COPY`."""

    ROUNDED = 0  # tokens are quantised
    PAGES = 1  # half-empty pages are merged
    BOUNDS = 2  # bounds of keys are read, to choose the pages that attention reads


@dataclass(frozen=True, slots=True)
class Leg:
    """One transfer: its direction and size, and bytes of HBM taken when it begins and ends."""

    up: bool
    bytes: int
    hold_before: int
    hold_after: int
    memory: int = DDR  # to whose link it belongs

    @property
    def row(self) -> tuple[int, int, int, int]:
        """Its row in `SearchDemand.legs`, the chain aside."""
        route = 2 * (self.memory - DDR) + self.up
        return route, self.bytes, self.hold_before, self.hold_after


@dataclass(frozen=True)
class DemandInfo:
    """Where a demand comes from, and what its numbers must be priced with."""

    trace: str
    episode: int
    policy: str
    budget: str
    recall: str
    geometry: str  # name of the model whose bytes are counted
    kv_bytes_per_token: int
    groups: int = 1  # cache groups; `attended` and `rows` are summed over them and over the layers
    fused: bool = True  # False if the policy reads attention rows
    #: Searches with the same key share the first `prefix_tokens` of their prompts; "" for none.
    prefix: str = ""
    prefix_tokens: int = 0
    solved: int = -1  # 1 or 0 as the search's answer was judged; -1 if it was not
    #: Where only some of them are the same: ids of the blocks that these tokens are made of, in
    #: order; searches with the same key share those up to the first one that differs.
    prefix_blocks: tuple[int, ...] = ()
    prefix_block_tokens: int = 0
    parts: int = 1  # in which attention reads the cache: by format, and tokens in DDR apart
    #: Unless it is fused: of how many of the prompt's last tokens it reads the attention rows, and
    #: whether it reads those of generated tokens
    row_queries: int = ALL_QUERIES
    decode_rows: bool = True
    ddr_parts: int = 0  # of `parts`, those in DDR

    @property
    def eager(self) -> bool:
        """Whether decode iterations write attention rows out."""
        return self.decode_rows and not self.fused


@dataclass(frozen=True)
class SearchDemand:
    """One search under one policy."""

    info: DemandInfo
    ops: np.ndarray  # kind (`Op`) and its numbers, in order; int64 ``[phases, 4]``
    #: Runs of decode iterations (`PIECE_COLUMNS`), int64 ``[pieces, columns]``.  Iteration ``i`` of
    #: a piece has ``quantity + i * quantity_growth``: bytes of keys and values read, what the
    #: quantised ones of them would take in 8 bits, tokens attended to (in `ATTENDED_UNITS`, summed
    #: over sequences, groups and layers), those of them whose probabilities are written out (0 if
    #: fused), tokens examined by a decision, bytes of HBM held, the part of those in the shared
    #: prefix.  Sequences, whether the policy decides, bytes fetched over PCIe, bytes read by the
    #: CPU and bytes read in layers with a sliding window (where the CPU works during the other
    #: layers) stay the same.
    pieces: np.ndarray
    #: Transfers (`LEG_COLUMNS`) in the order of their chains, int64 ``[transfers, 5]``; each begins
    #: when the one before it in its chain has ended.  The holds are bytes of HBM taken when it
    #: begins and when it ends.
    legs: np.ndarray

    def column(self, name: str) -> np.ndarray:
        """A column of `pieces`; int64 ``[pieces]``."""
        return np.asarray(self.pieces[:, PIECE_COLUMNS.index(name)])

    @cached_property
    def prompt_tokens(self) -> int:
        return int(self.ops[self.ops[:, 0] == Op.PREFILL, 1].sum())

    @cached_property
    def iterations(self) -> int:
        return int(self.column("iterations").sum())

    @cached_property
    def generated_tokens(self) -> int:
        return int(self.column("iterations") @ self.column("sequences"))

    @cached_property
    def peak_ddr_bytes(self) -> int:
        levels = self.ops[self.ops[:, 0] == Op.LEVEL, 3]
        return int(levels.max()) if len(levels) else 0

    @cached_property
    def peak_stored_bytes(self) -> dict[int, int]:
        """The most bytes in each memory below DDR; those in which it has any."""
        stores = self.ops[self.ops[:, 0] == Op.STORE, 1:3]
        found = np.unique(stores[:, 0]).tolist()
        return {memory: int(stores[stores[:, 0] == memory, 1].max()) for memory in found}

    def chains(self) -> list[list[Leg]]:
        """Its transfers, by chain."""
        found: list[list[Leg]] = [[] for _ in range(int((self.ops[:, 0] == Op.SEND).sum()))]
        for chain, route, size, before, after in self.legs.tolist():
            found[chain].append(Leg(bool(route % 2), size, before, after, DDR + route // 2))
        return found

    @property
    def nbytes(self) -> int:
        """Size of its arrays."""
        return int(self.ops.nbytes + self.pieces.nbytes + self.legs.nbytes)

    @cached_property
    def without_turns(self) -> SearchDemand:
        """The same where turning costs nothing: iterations before and after a turn are one run."""
        if not (self.ops[:, 0] == Op.TURN).any():
            return self
        ops: list[list[int]] = []
        pieces: list[np.ndarray] = []
        kept = [op for op in self.ops.tolist() if op[0] != Op.TURN]
        for decodes, phases in groupby(kept, lambda op: bool(op[0] == Op.DECODE)):
            if not decodes:
                ops += phases
                continue
            run = joined(self.pieces[[op[1] for op in phases]])
            ops += [[int(Op.DECODE), len(pieces) + row, 0, 0] for row in range(len(run))]
            pieces += list(run)
        table = np.array(pieces, dtype=np.int64).reshape(-1, len(PIECE_COLUMNS))
        return replace(self, ops=np.array(ops, dtype=np.int64).reshape(-1, 4), pieces=table)

    def save(self, path: Path) -> None:
        """Write to a compressed ``.npz`` file, without pickles."""
        header = json.dumps({"format": _FORMAT, **asdict(self.info)}, sort_keys=True)
        with whole(path) as part, part.open("wb") as file:
            pieces = np.delete(self.pieces, _WINDOW, axis=1)
            np.savez_compressed(
                file, header=np.array(header), ops=self.ops, pieces=pieces, legs=self.legs
            )

    @classmethod
    def load(cls, path: Path) -> SearchDemand:
        """Read what `save` wrote; a `UsageError` if it is no demand of this format."""
        try:
            with np.load(path, allow_pickle=False) as stored:
                header = json.loads(str(stored["header"]))
                if header.pop("format", None) != _FORMAT:
                    raise UsageError(f"{path}: a demand of another format: record it again")
                ops, pieces, legs = (_table(stored[n], width) for n, width in _WIDTHS.items())
                pieces = np.insert(pieces, _WINDOW, 0, axis=1)
                header["prefix_blocks"] = tuple(header.get("prefix_blocks", ()))
                return cls(DemandInfo(**header), ops, pieces, legs)
        except _DAMAGE as error:
            raise UsageError(f"{path} is not a recorded demand: {error}") from None


def _table(stored: np.ndarray, width: int) -> np.ndarray:
    """A table of a file; int64 ``[rows, width]``."""
    if stored.dtype != np.int64 or stored.ndim != 2 or stored.shape[1] != width:
        raise ValueError(f"a table of shape {stored.shape} and type {stored.dtype}")
    return stored


def cut(fixed: np.ndarray, linear: np.ndarray) -> np.ndarray:
    """The fewest linear pieces that reproduce every iteration exactly, first come, longest first.

    Within a piece, `fixed` (`FIXED`, int64 ``[iterations, f]``) must not change, and `linear`
    (`LINEAR`, int64 ``[iterations, g]``) may grow by a constant amount.  Returns `PIECE_COLUMNS`:
    iterations, `fixed`, `linear` and its growth, int64 ``[pieces, 1 + f + 2 g]``.
    """
    count = len(fixed)
    growth = np.diff(linear, axis=0)
    joined = (np.diff(fixed, axis=0) == 0).all(axis=1)
    same = (growth[1:] == growth[:-1]).all(axis=1)
    # Iterations at which a piece has to end if it holds the two before: taken greedily.
    bent = np.flatnonzero(~(same & joined[1:] & joined[:-1])) + 2
    starts = _starts(count, joined, bent)
    stops = np.append(starts[1:], count)
    first, width = 1 + fixed.shape[1], linear.shape[1]
    rows = np.zeros((len(starts), first + 2 * width), dtype=np.int64)
    rows[:, 0] = stops - starts
    rows[:, 1:first] = fixed[starts]
    rows[:, first : first + width] = linear[starts]
    grows = rows[:, 0] > 1
    rows[grows, first + width :] = growth[starts[grows]]
    return rows


def iterations(pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every iteration of pieces, int64 ``[pieces, len(PIECE_COLUMNS)]``: what `cut` was given."""
    rows = np.repeat(pieces, pieces[:, 0], axis=0)
    began = np.cumsum(pieces[:, 0]) - pieces[:, 0]
    i = np.arange(len(rows)) - np.repeat(began, pieces[:, 0])
    fixed, linear, growth = np.split(rows[:, 1:], (len(FIXED), len(FIXED) + len(LINEAR)), axis=1)
    return fixed, linear + i[:, None] * growth


def joined(pieces: np.ndarray) -> np.ndarray:
    """Pieces that follow one another, as few as can be; int64 ``[pieces, len(PIECE_COLUMNS)]``."""
    return cut(*iterations(pieces)) if len(pieces) > 1 else pieces


def _starts(count: int, joined: np.ndarray, bent: np.ndarray) -> np.ndarray:
    """First iterations of the pieces."""
    starts = []
    bends = bent.tolist()
    at, i = 0, 0
    while at < count:
        starts.append(at)
        if at + 1 < count and not joined[at]:
            at += 1
            continue
        while i < len(bends) and bends[i] < at + 2:
            i += 1
        at = bends[i] if i < len(bends) else count
    return np.array(starts, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Piece:
    """Decode iterations of one search; a quantity is ``first + i * growth`` in iteration ``i``."""

    iterations: int
    sequences: int
    #: Seconds by part (`arborsim.machine.terms.PARTS`).
    compute_s: tuple[float, float]
    kv_s: tuple[float, float]
    dequantise_s: tuple[float, float]
    serial_s: tuple[float, float]
    policy_s: tuple[float, float]
    kv_tokens: tuple[float, float]  # read in a layer, where attention was measured; 0 if not
    hbm_bytes: tuple[int, int]
    prefix_bytes: tuple[int, int]
    #: The others are the same in every iteration.
    stream_s: float  # its streamed tokens on the link
    #: The CPU attending to its tokens, or choosing and fetching pages, and the part of the GPU's
    #: attention that cannot go on meanwhile.
    near_s: float
    link_s: float  # the link carrying `streamed_bytes`
    side_s: float  # streaming, attention on the CPU, or fetching, hidden or not
    streamed_bytes: int  # fetched; the link is kept meanwhile
    down_bytes: int  # messages to the host ...
    up_bytes: int  # ... and from it, streamed tokens aside
    buffer_bytes: int  # of `hbm_bytes`: buffers of what is streamed
    longer: Longer  # that each layer takes under its policy (`PolicySeconds`)
    launch_s: float = 0.0  # by how much launching takes longer with it

    def split(self, iterations: int) -> tuple[Piece, Piece]:
        """The first `iterations`, and the rest."""
        return self._part(0, iterations), self._part(iterations, self.iterations)

    def without_prefix(self) -> Piece:
        """The same with the shared prefix held elsewhere."""
        (held, grows), (prefix, prefix_grows) = self.hbm_bytes, self.prefix_bytes
        return replace(self, hbm_bytes=(held - prefix, grows - prefix_grows), prefix_bytes=(0, 0))

    def _part(self, first: int, last: int) -> Piece:
        pairs = {n: v for n in self.__slots__ if type(v := getattr(self, n)) is tuple}
        moved: dict[str, Any] = {n: (v[0] + first * v[1], v[1]) for n, v in pairs.items()}
        return replace(self, iterations=last - first, **moved)


@dataclass(frozen=True, slots=True)
class Extra:
    """Work that joins one iteration, a part of a prompt: seconds by part."""

    compute_s: float = 0.0
    kv_s: float = 0.0
    serial_s: float = 0.0
    policy_s: float = 0.0
    sequences: int = 0
    tokens: int = 0
    prompts: int = 0  # that end with it

    def plus(self, other: Extra) -> Extra:
        """Both in one iteration."""
        return Extra(*(getattr(self, n) + getattr(other, n) for n in self.__slots__))


NOTHING = Extra()


class Part(NamedTuple):
    """A part of a search's prefix, which lies in memory under its key."""

    key: str
    tokens: int
    bytes: int


@dataclass
class PricedProgram:
    """A program whose phases know their seconds."""

    source: SearchDemand | None  # None while it is being written
    info: DemandInfo
    #: As the demand's, with decode phases numbered by `pieces`; a first piece of one iteration.
    ops: list[tuple[int, int, int, int]]
    seconds: list[float]  # of each phase that the server spends; 0 for the others
    pieces: list[Piece]
    chains: list[list[Leg]]
    prefix_tokens: int = 0  # what may be shared, 0 without a key
    prefix_bytes: int = 0
    parts: tuple[Part, ...] = ()  # of that, as memory holds it
    open = False

    @property
    def demand(self) -> SearchDemand:
        assert self.source is not None
        return self.source

    @property
    def peak_ddr_bytes(self) -> int:
        return self.source.peak_ddr_bytes if self.source else 0

    @property
    def peak_stored_bytes(self) -> dict[int, int]:
        """By memory below DDR; empty while it is being written."""
        return self.source.peak_stored_bytes if self.source else {}

    def leg_ended(self, chain: int, leg: int) -> None:
        """A transfer has ended: an open program may say what follows it."""

    def starve(self) -> simpy.Event:
        """The event that the server waits for when it has played all of an open program."""
        raise NotImplementedError
