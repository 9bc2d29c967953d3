"""The server at one moment: its searches, queues, memory and batch."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection
from dataclasses import dataclass, field

from arborsim.core.geometry import UNBOUNDED
from arborsim.core.tiers import DDR
from arborsim.machine.batch import Batch, Span
from arborsim.machine.clock import Clock, Level
from arborsim.machine.engine import EngineProfile
from arborsim.machine.machine import ServingOptions
from arborsim.machine.prefixes import Host, Prefixes
from arborsim.machine.price import Price
from arborsim.machine.program import Op, Part, Piece, PricedProgram
from arborsim.machine.report import Tally


def chunk_tokens(options: ServingOptions, engine: EngineProfile | None) -> int:
    """Tokens of a step with parts of prompts, at most; 0 if prompts are passes of their own."""
    return options.prefill_chunk or (engine.chunk_tokens if engine is not None else 0)


@dataclass
class Restore:
    """The work of a search that lost its place before it goes on."""

    swapped_bytes: int = 0  # to be copied back from the host
    tokens: int = 0  # to be computed again
    ddr_bytes: int = 0  # to be copied to DDR again once computed


@dataclass(eq=False)
class ServedSearch:
    """State of one search in the engine."""

    key: int  # in order of arrival
    demand: int  # which of the demands it is
    priced: PricedProgram
    arrival_s: float
    at: int = 0  # its current phase
    offset: int = 0  # iterations done of the piece that it left, when it lost its place
    base_bytes: int = 0  # HBM in pages ...
    extra_bytes: int = 0  # ... and elsewhere, its own
    staging_bytes: int = 0  # of `extra_bytes`: buffers of recalled tokens; the rest is in flight
    buffer_bytes: int = 0  # of `base_bytes`: buffers of what its iterations stream
    ddr_bytes: int = 0
    stored_bytes: dict[int, int] = field(default_factory=dict)  # in memories below DDR
    wanted_bytes: int = 0  # HBM that it lacked when it gave up its own place ...
    wanted_ddr_bytes: int = 0  # ... and DDR
    ticket: int = -1  # in order of admission; -1 while it has no place
    epoch: int = 0  # how often it has lost its place
    swapping: int = -1  # the epoch in which its copy on the host was last sent for
    prompt_left: int = -1  # tokens of its prompt still to be computed, if that is done in parts
    prefilled: bool = False
    parked: bool = False  # waits for a transfer
    ended: bool = False
    holds_prefix: bool = False
    #: Tokens of its shared prefix that were in HBM when it first looked for them in its place; -1
    #: before, and -2 once what became of the prefix has been counted.
    prefix_found: int = -1
    restore: Restore | None = None
    #: Transfers of each of its chains.
    legs_begun: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    legs_ended: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    outstanding: int = 0  # chains that have not ended
    admitted_s: float = -1.0
    prefilled_s: float = -1.0  # when its prompt had been computed
    first_token_s: float = -1.0
    finish_s: float = -1.0
    preemptions: int = 0
    generated: int = 0
    refused: str = ""

    @property
    def resident(self) -> bool:
        return self.ticket >= 0

    @property
    def hbm_bytes(self) -> int:
        return self.base_bytes + self.extra_bytes

    @property
    def decodes(self) -> bool:
        """Whether its current phase is a run of iterations."""
        ops = self.priced.ops
        return self.at < len(ops) and ops[self.at][0] == Op.DECODE

    @property
    def piece(self) -> Piece:
        """The piece of its current phase, which is a run of iterations."""
        return self.priced.pieces[self.priced.ops[self.at][1]]

    def tokens_of(self, size_bytes: int) -> int:
        """Tokens whose keys and values take `size_bytes`, at full precision."""
        return -(-size_bytes // self.priced.info.kv_bytes_per_token)

    @property
    def context_tokens(self) -> int:
        """Its own tokens so far, those that its policy evicted included; 0 of a tree.

        Keys and values of those that were kept hold what the evicted ones said, so that all of them
        have to be computed again.
        """
        if any(piece.sequences > 1 for piece in self.priced.pieces):
            return 0
        prompt = next((op[1] for op in self.priced.ops if op[0] == Op.PREFILL), 0)
        shared = self.priced.prefix_tokens if self.holds_prefix else 0
        return prompt - shared + self.generated + self.offset

    def arrived(self, chain: int) -> bool:
        """Whether this chain, or all if it is -1, has ended."""
        if chain < 0:
            return not self.outstanding
        return self.legs_ended[chain] == len(self.priced.chains[chain])

    def begun(self, chain: int) -> bool:
        """Whether the last transfer of this chain has begun."""
        return self.legs_begun[chain] == len(self.priced.chains[chain])


class State:
    """The engine at one moment; `kv_bytes` is the HBM for keys and values."""

    def __init__(
        self,
        price: Price,
        options: ServingOptions,
        kv_bytes: int,
        clock: Clock,
        batch: Batch,
        tally: type[Tally] = Tally,
    ) -> None:
        self.price = price
        self.engine = price.engine
        self.options = options
        self.chunk_tokens = chunk_tokens(options, price.engine)
        self.request_s = price.engine.request_s if price.engine is not None else 0.0
        self.kv_bytes = kv_bytes
        self.clock = clock
        self.batch = batch
        self.searches: list[ServedSearch] = []  # all that have arrived
        self.ready: deque[ServedSearch] = deque()  # with a place, and more to do than decoding
        self.prefilling: deque[ServedSearch] = deque()  # whose prompts are computed in parts
        self.resident: dict[int, ServedSearch] = {}  # with a place, in order of admission
        self.displaced: list[ServedSearch] = []  # that lost their place, in order of arrival
        self.starved: ServedSearch | None = None  # it has done all of its program written so far
        #: All HBM for keys and values, but the pages of searches in the batch ...
        self.hbm = Level(clock)
        self.decoding_bytes = 0  # ... which take this
        self.stream_floor_s = 0.0  # what the NVMe takes for what iterations stream
        engine_block = price.engine.block_tokens if price.engine is not None else 16
        block = self.block_tokens = options.prefix_block_tokens or engine_block
        ddr_bytes, nvme_bytes = price.cost.profile.ddr_bytes, options.nvme_bytes
        self.host = Host(clock, ddr_bytes, nvme_bytes, options.prefix_host_bytes, block)
        self.prefixes = Prefixes(block, self.host)
        #: Memories below DDR: what there is of each, and what searches hold and may come to hold
        below = price.cost.profile.memories
        endless = kv_bytes >= UNBOUNDED
        self.stored_capacity = {m.number: UNBOUNDED if endless else m.bytes for m in below}
        self.stored = {each.number: Level(clock) for each in below}
        self.reserved_bytes = dict.fromkeys(self.stored, 0)
        self.tally = tally(clock, options.series_points)

    @property
    def used_bytes(self) -> int:
        return self.hbm.value + self.decoding_bytes

    @property
    def free_bytes(self) -> int:
        return self.kv_bytes - self.used_bytes

    @property
    def pages_left(self) -> int:
        """HBM that the pages of searches in the batch may take."""
        return self.kv_bytes - self.hbm.value

    @property
    def last_admitted(self) -> ServedSearch:
        return next(reversed(self.resident.values()))

    def hold(self, delta: int) -> None:
        """HBM outside the batch changes."""
        self.hbm.add(delta)
        self.tally.hbm(self.used_bytes)

    def evict_prefixes(self, need: int, spared: Collection[str] = ()) -> bool:
        """Give up `need` bytes of unused shared prefixes, or what there is of them."""
        freed = self.prefixes.evict(need, spared)
        self.hold(-freed)
        return freed > 0

    def parts_of(self, search: ServedSearch) -> tuple[Part, ...]:
        """The parts of its shared prefix; none if it shares nothing."""
        return search.priced.parts if self.options.prefix_sharing else ()

    def join(self, search: ServedSearch) -> None:
        """Take part in the iterations from now on."""
        self.hbm.add(-search.base_bytes)
        self.decoding_bytes += search.base_bytes
        search.buffer_bytes = search.piece.buffer_bytes
        self.batch.add(search.key, search.piece, search.offset)

    def leave(self, search: ServedSearch) -> None:
        """Stop decoding within a piece."""
        done = self.batch.remove(search.key)
        self.decoding_bytes -= self._held(search, search.piece, done)
        search.offset = done
        self.hbm.add(search.base_bytes)

    def piece_ended(self, search: ServedSearch) -> None:
        """It has decoded its piece, and left the batch."""
        piece = search.piece
        self.decoding_bytes -= self._held(search, piece, piece.iterations)
        search.offset = 0
        search.generated += piece.iterations * piece.sequences
        self.hbm.add(search.base_bytes)
        if search.first_token_s < 0:
            search.first_token_s = self.clock.now
        search.at += 1

    def _held(self, search: ServedSearch, piece: Piece, done: int) -> int:
        """Bytes of its pages after `done` iterations of a piece."""
        if done > search.offset:
            search.base_bytes = piece.hbm_bytes[0] + (done - 1) * piece.hbm_bytes[1]
        return search.base_bytes

    def release(self, search: ServedSearch) -> None:
        """Give up its place and its HBM; it must not be in the batch."""
        del self.resident[search.ticket]
        search.ticket = -1
        self.hold(-search.hbm_bytes)
        if search.holds_prefix:
            search.holds_prefix = False
            # What follows a part is used no later than the part.
            self.hold(-sum(self.prefixes.release(p.key) for p in reversed(self.parts_of(search))))

    def leave_host(self, search: ServedSearch) -> None:
        """Give up all that a search holds, or may come to hold, in memories other than HBM."""
        self.host.add(-search.ddr_bytes)
        if search.admitted_s >= 0:
            self.reserve(search, -1)
            for memory in search.stored_bytes:
                self.store(search, memory, 0)

    def wake(self, search: ServedSearch) -> None:
        """Something that it may have waited for has happened."""
        if search.parked and search.resident:
            search.parked = False
            self.ready.append(search)

    def withdraw(self, search: ServedSearch) -> None:
        """Take a search out of whatever it takes part in."""
        search.parked = False
        if search.key in self.batch:
            self.leave(search)
        if search in self.ready:
            self.ready.remove(search)
        if search in self.prefilling:
            self.prefilling.remove(search)

    def transfer_s(self, size_bytes: int, up: bool, memory: int = DDR) -> float:
        """A transfer to or from a memory; of the host as it is now, the NVMe included."""
        seconds = self.price.transfer_s(size_bytes, up, memory)
        return max(seconds, self.nvme_s(size_bytes)) if memory == DDR else seconds

    def reserve(self, search: ServedSearch, sign: int) -> None:
        """Take (sign 1) or give up (-1) what a search will hold at most in memories below DDR."""
        for memory, peak in search.priced.peak_stored_bytes.items():
            self.reserved_bytes[memory] += sign * peak

    def store(self, search: ServedSearch, memory: int, size_bytes: int) -> None:
        """A search holds this much in a memory below DDR from now on."""
        self.stored[memory].add(size_bytes - search.stored_bytes.get(memory, 0))
        search.stored_bytes[memory] = size_bytes

    def nvme_s(self, size_bytes: int) -> float:
        """Seconds of the NVMe for its share of such a transfer."""
        return self.price.nvme_s(int(self.host.below_share * size_bytes))

    def passing(self, k: int) -> None:
        """The driver is about to let `k` iterations pass."""
        sums = self.batch.sums
        last = sums.hbm + (k - 1) * sums.hbm_g
        self.decoding_bytes = max(sums.hbm, last)
        self.tally.hbm(self.used_bytes, decoding=True)
        self.decoding_bytes = last

    def passed(self, span: Span, k: int) -> None:
        """The driver has let `k` iterations pass."""
        self.tally.iterations(span, k, self.batch.sums)
        sums, clock = self.batch.sums, self.clock
        clock.down.carried_bytes += k * sums.down_bytes
        clock.up.carried_bytes += k * (sums.streamed_bytes + sums.up_bytes)
        clock.up.streamed_s += k * sums.link
        self.batch.advance(k)
        self.tally.sample(self.used_bytes, self.host.level.value, len(self.batch))

    def spent(self, seconds: float) -> None:
        """The driver has let time pass without an iteration."""
        self.tally.decoding_byte_s += self.decoding_bytes * seconds
        self.tally.sample(self.used_bytes, self.host.level.value, len(self.batch))
