"""The server at one moment: its searches, queues, memory and batch."""

from __future__ import annotations

import bisect
from collections import defaultdict, deque
from dataclasses import dataclass, field

from arborsim.machine.batch import Batch, Span
from arborsim.machine.clock import Clock, Level
from arborsim.machine.options import ServingOptions
from arborsim.machine.prefixes import Host, Prefixes
from arborsim.machine.price import Price
from arborsim.machine.priced import Piece, PricedProgram
from arborsim.machine.report import Tally


@dataclass
class Restore:
    """What a search that lost its place must do before it goes on.

    Attributes
    ----------
    swapped_bytes : int
        To be copied back from the host.
    tokens : int
        To be computed again.
    ddr_bytes : int
        To be copied to DDR again once computed.
    """

    swapped_bytes: int = 0
    tokens: int = 0
    ddr_bytes: int = 0


@dataclass(eq=False)
class Search:
    """State of one search in the engine.

    Attributes
    ----------
    key : int
        In order of arrival.
    demand : int
        Which of the demands it is.
    at : int
        Its current phase.
    offset : int
        Iterations done of the piece that it left, when it lost its place.
    base_bytes, extra_bytes : int
        HBM in pages and besides them, its own.
    staging_bytes : int
        The part of `extra_bytes` that is buffers of recalled tokens; the rest is in flight.
    buffer_bytes : int
        The part of `base_bytes` that is buffers of what its iterations stream.
    ddr_bytes : int
    wanted_bytes, wanted_ddr_bytes : int
        What it lacked when it gave up its own place.
    ticket : int
        In order of admission; -1 while it has no place.
    epoch : int
        How often it has lost its place.
    swapping : int
        The epoch in which its copy on the host was last sent for.
    prompt_left : int
        Tokens of its prompt still to be computed, where that is done in parts.
    prefix_found : int
        Tokens of its shared prefix that were in HBM when it first looked for them in its place;
        -1 before, and -2 once what became of the prefix has been counted.
    parked : bool
        Waits for a transfer.
    legs_begun, legs_ended : dict of int to int
        Transfers of each of its chains.
    outstanding : int
        Chains that have not ended.
    """

    key: int
    demand: int
    priced: PricedProgram
    arrival_s: float
    at: int = 0
    offset: int = 0
    base_bytes: int = 0
    extra_bytes: int = 0
    staging_bytes: int = 0
    buffer_bytes: int = 0
    ddr_bytes: int = 0
    wanted_bytes: int = 0
    wanted_ddr_bytes: int = 0
    ticket: int = -1
    epoch: int = 0
    swapping: int = -1
    prompt_left: int = -1
    prefilled: bool = False
    parked: bool = False
    ended: bool = False
    holds_prefix: bool = False
    prefix_found: int = -1
    restore: Restore | None = None
    legs_begun: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    legs_ended: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    outstanding: int = 0
    admitted_s: float = -1.0
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
    def piece(self) -> Piece:
        """The piece of its current phase, which is a run of iterations."""
        return self.priced.pieces[self.priced.ops[self.at][1]]

    def tokens_of(self, size_bytes: int) -> int:
        """Tokens whose keys and values take so much, at full precision."""
        return -(-size_bytes // self.priced.info.kv_bytes_per_token)

    def chain_ended(self, chain: int) -> bool:
        return self.legs_ended[chain] == len(self.priced.chains[chain])

    def chain_begun(self, chain: int) -> bool:
        return self.legs_begun[chain] == len(self.priced.chains[chain])


class State:
    """The engine at one moment.

    Parameters
    ----------
    price : Price
    options : ServingOptions
    kv_bytes : int
        HBM for keys and values.
    clock : Clock
    batch : Batch

    Attributes
    ----------
    searches : list of Search
        All that have arrived.
    ready : deque of Search
        With a place, and something to do other than decoding.
    prefilling : deque of Search
        Whose prompts are computed in parts.
    resident : dict of int to Search
        With a place, in order of admission.
    hbm : Level
        All HBM for keys and values but the pages of searches in the batch, which are
        `decoding_bytes`.
    starved : Search or None
        One that has done all of its program that has been written so far.
    stream_floor_s : float
        What the NVMe takes for what iterations stream.
    """

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
        self.options = options
        self.kv_bytes = kv_bytes
        self.clock = clock
        self.batch = batch
        self.searches: list[Search] = []
        self.ready: deque[Search] = deque()
        self.prefilling: deque[Search] = deque()
        self.resident: dict[int, Search] = {}
        self.hbm = Level(clock)
        block = options.prefix_block_tokens
        self.host = Host(
            clock, price.cost.profile.ddr_bytes, options.nvme_bytes,
            options.prefix_host_bytes, block,
        )  # fmt: skip
        self.prefixes = Prefixes(block, self.host)
        self.tally = tally(self, options.series_points)
        self.decoding_bytes = 0
        self.stream_floor_s = 0.0
        self.starved: Search | None = None
        self._returning: list[tuple[int, Search]] = []  # by order of arrival

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
    def last_admitted(self) -> Search:
        return next(reversed(self.resident.values()))

    @property
    def returning(self) -> Search | None:
        """The search that arrived first of those that lost their place."""
        return self._returning[0][1] if self._returning else None

    @property
    def displaced(self) -> list[Search]:
        """Searches that lost their place, by order of arrival."""
        return [search for _, search in self._returning]

    def take_returning(self) -> None:
        """It has got a place."""
        self._returning.pop(0)

    def queue_returning(self, search: Search) -> None:
        """A search has lost its place."""
        bisect.insort(self._returning, (search.key, search), key=lambda pair: pair[0])

    def hold(self, delta: int) -> None:
        """HBM outside the batch changes."""
        self.hbm.add(delta)
        self.tally.hbm(self.used_bytes)

    def evict_prefixes(self, need: int, spared: str = "") -> bool:
        """Give up `need` bytes of unused shared prefixes, or what there is of them."""
        freed = self.prefixes.evict(need, spared)
        self.hold(-freed)
        return freed > 0

    def prefix_of(self, search: Search) -> str:
        """Key of its shared prefix; "" for none."""
        shared = self.options.prefix_sharing and search.priced.prefix_tokens
        return search.priced.info.prefix if shared else ""

    def join(self, search: Search) -> None:
        """Take part in the iterations from now on."""
        self.hbm.add(-search.base_bytes)
        self.decoding_bytes += search.base_bytes
        search.buffer_bytes = search.piece.buffer_bytes
        self.batch.add(search.key, search.piece, search.offset)

    def leave(self, search: Search) -> None:
        """Stop decoding within a piece."""
        done = self.batch.remove(search.key)
        self.decoding_bytes -= self._held(search, search.piece, done)
        search.offset = done
        self.hbm.add(search.base_bytes)

    def piece_ended(self, search: Search) -> None:
        """It has decoded its piece, and left the batch."""
        piece = search.piece
        self.decoding_bytes -= self._held(search, piece, piece.iterations)
        search.offset = 0
        search.generated += piece.iterations * piece.sequences
        self.hbm.add(search.base_bytes)
        if search.first_token_s < 0:
            search.first_token_s = self.clock.now
        search.at += 1

    def _held(self, search: Search, piece: Piece, done: int) -> int:
        """Bytes of its pages after `done` iterations of a piece."""
        if done > search.offset:
            search.base_bytes = piece.hbm_bytes[0] + (done - 1) * piece.hbm_bytes[1]
        return search.base_bytes

    def release(self, search: Search) -> None:
        """Give up its place and its HBM; it must not be in the batch."""
        del self.resident[search.ticket]
        search.ticket = -1
        self.hold(-search.hbm_bytes)
        if search.holds_prefix:
            search.holds_prefix = False
            self.hold(-self.prefixes.release(self.prefix_of(search)))

    def wake(self, search: Search) -> None:
        """Something that it may have waited for has happened."""
        if search.parked and search.resident:
            search.parked = False
            self.ready.append(search)

    def withdraw(self, search: Search) -> None:
        """Take a search out of whatever it takes part in."""
        search.parked = False
        if search.key in self.batch:
            self.leave(search)
        if search in self.ready:
            self.ready.remove(search)
        if search in self.prefilling:
            self.prefilling.remove(search)

    def drop_copy(self, spared: Search) -> bool:
        """The search without a place that arrived last gives up what it has on the host."""
        for _, search in reversed(self._returning):
            restore = search.restore
            swapped = restore.swapped_bytes if restore else 0
            if search is spared or not (search.ddr_bytes or swapped):
                continue
            restore = restore or Restore()
            if swapped:
                self.host.add(-swapped)
                restore.swapped_bytes = 0
                restore.tokens += search.tokens_of(swapped)
            self.drop_host(search, restore)
            search.restore = restore
            return True
        return False

    def drop_host(self, search: Search, restore: Restore) -> None:
        """What a search has in DDR must be computed again."""
        if search.ddr_bytes:
            restore.tokens += search.tokens_of(search.ddr_bytes)
            restore.ddr_bytes = search.ddr_bytes
            self.host.add(-search.ddr_bytes)
            search.ddr_bytes = 0

    def transfer_s(self, size_bytes: int, up: bool) -> float:
        """A transfer to or from the host as it is now, the NVMe included."""
        below_s = self.price.nvme_s(int(size_bytes * self.host.below_share))
        return max(self.price.transfer_s(size_bytes, up), below_s)

    def find_stream_floor(self) -> None:
        """Bring `stream_floor_s` up to date."""
        share = self.host.below_share
        streamed = self.batch.sums.streamed_bytes if share else 0
        self.stream_floor_s = self.price.nvme_s(int(share * streamed))

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
        self.tally.held(self.decoding_bytes * seconds)
        self.tally.sample(self.used_bytes, self.host.level.value, len(self.batch))
