"""A program that is played while it is written.

What a search asks for can depend on the clock: which tokens are still read from HBM while their
copy is under way, what a copy that has ended fetches next, what is waited for.  So the executor
writes phases, and lets the clock run until the server has played them all and *starves*.  Where
nothing under way can change what is asked for, it writes on and lets the clock run later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import simpy

from arborsim.core.geometry import UNBOUNDED
from arborsim.core.sourced import Basis
from arborsim.machine.basis import basis_of
from arborsim.machine.batch import Batch
from arborsim.machine.clock import Clock
from arborsim.machine.cost import CostModel
from arborsim.machine.machine import ServingOptions
from arborsim.machine.memory_tally import MemoryTally
from arborsim.machine.price import Price
from arborsim.machine.program import (
    FIXED,
    LEG_COLUMNS,
    LINEAR,
    PIECE_COLUMNS,
    DemandInfo,
    Leg,
    Op,
    PricedProgram,
    SearchDemand,
    cut,
)
from arborsim.machine.scheduler import Timed
from arborsim.machine.server import Server
from arborsim.machine.serving import serving
from arborsim.machine.terms import BACKGROUND, LINK_TERMS, Term, total

Levels = tuple[int, ...]
#: What follows a transfer: bytes of HBM that change now, and the next transfer of its chain.
Next = tuple[int, Leg | None]
_HBM, _PREFIX = LINEAR.index("hbm_bytes"), LINEAR.index("prefix_bytes")
#: Columns of pieces as `cut` makes them of rows, which begin with their segment
_NO_SEGMENT = np.delete(np.arange(1 + len(PIECE_COLUMNS)), 1)
_SPENT = (Op.PREFILL, Op.DECIDE, Op.COPY, Op.RECOMPUTE, Op.TURN, Op.MOVE)


class OpenProgram(PricedProgram):
    """A program that is being written, and the machine that plays it by itself.

    `levels` tells bytes of HBM in pages and streaming buffers, of those the shared prefix, of DDR,
    and of the memories below, as the profile lists them; `keep` keeps the iterations, for `kept`
    and `terms`.
    """

    open = True

    def __init__(
        self, info: DemandInfo, cost: CostModel, levels: Callable[[], Levels], keep: bool
    ) -> None:
        super().__init__(None, info, [], [], [], [])
        # DDR has no end: what a search by itself lacks is only reported.
        # Nothing comes between a search and its machine, and its prompt is one pass.
        engine = cost.profile.engine
        if engine is not None:
            engine = replace(engine, request_s=0.0, chunk_tokens=0)
        profile = replace(cost.profile, ddr_bytes=UNBOUNDED, engine=engine)
        self.price = Price(CostModel(profile, cost.geometry))
        self.clock = Clock()
        self.side_s = 0.0  # streaming, attention on the CPU and fetching, hidden or not
        self._keep = keep
        self._levels = levels
        self._shown: Levels | None = None
        self._below = tuple(each.number for each in profile.memories)
        self._phases: list[tuple[int, int, int, int]] = []  # ops, decode phases by segment
        self._rows: list[np.ndarray] = []  # of all iterations: segment, fixed and linear columns
        self._segment = 0
        self._unflushed: np.ndarray | None = None
        self._pending: list[tuple[int, int, int, int]] = []  # not yet given to the server
        self._pending_rows: list[np.ndarray] = []
        self._sent = False  # since all was quiet
        self._newest_up = -1  # the newest chain that ends with a transfer from the host
        self._then: dict[int, Callable[[], Next]] = {}
        self._waited_for: set[int] = set()
        self._starving: simpy.Event | None = None
        alone = [self], [0], self.price, ServingOptions(prefix_sharing=False), UNBOUNDED
        self._server = Server(*alone, self.clock, Batch(), MemoryTally)
        assert isinstance(self._server.state.tally, MemoryTally)
        self.tally = self._server.state.tally
        self.tally.watch(self._server.state)
        self._server.expect(Timed(((0.0, 0),)))
        self.clock.env.process(serving(self._server))
        self._run()
        (self.search,) = self._server.state.searches

    # Writing.

    def iterations(self, table: np.ndarray) -> None:
        """Decode iterations; int64 ``[iterations, FIXED and LINEAR columns]``."""
        segment = np.full((len(table), 1), self._segment)
        rows = np.concatenate([segment, table], axis=1)
        if self._keep:
            self._rows.append(rows)
        op = (int(Op.DECODE), self._segment, 0, 0)
        if not self._pending_rows or self._pending[-1] != op:
            self._pending.append(op)
        self._pending_rows.append(rows)
        self._unflushed = rows[-1]

    def put(self, op: Op, one: int = 0, two: int = 0) -> None:
        """A phase other than decoding, once memory holds what it does."""
        self.settle_levels()
        self._append(op, one, two)

    def move(self, transfers: int, groups: int, size_bytes: int) -> None:
        """The host works on transfers that it is about to order."""
        self.settle_levels()
        self._append(Op.MOVE, transfers, groups, size_bytes)

    def activate(self, sequences: int) -> None:
        """Switch to as many sequences; the next iteration notes what memory holds."""
        self._flush()
        self._append(Op.TURN, sequences)

    def settle_levels(self) -> None:
        """Write down what memory holds now, if that has changed."""
        self._flush()
        levels = self._levels()
        if levels != self._shown:
            shown = self._shown or (-1, -1, -1, *(0 for _ in self._below))
            if levels[:3] != shown[:3]:
                self._append(Op.LEVEL, *levels[:3])
            for memory, held, before in zip(self._below, levels[3:], shown[3:], strict=True):
                if held != before:
                    self._append(Op.STORE, memory, held)
            self._shown = levels

    def hold(self, delta_bytes: int, staging: bool) -> None:
        """HBM other than the pages changes."""
        if not delta_bytes:
            return
        if delta_bytes < 0 and self._newest_up >= 0:
            # A buffer can only be given up once the transfer that fills it has begun.
            self.put(Op.BEGUN, self._newest_up)
        self.put(Op.HOLD, delta_bytes, int(staging))

    def send(self, leg: Leg, then: Callable[[], Next] | None = None) -> int:
        """Start a chain of transfers in the background; `then` says what follows its first one."""
        chain = len(self.chains)
        self.put(Op.SEND, chain)
        self.chains.append([leg])
        if leg.up:
            self._newest_up = chain
        self._sent = True
        if then is not None:
            self._then[chain] = then
        return chain

    def wait(self, chain: int = -1) -> None:
        """The search goes on when this chain, or all, have ended."""
        if not self.chains:
            return
        self.put(Op.WAIT, chain)
        self._waited_for |= {chain} if chain >= 0 else set(range(len(self.chains)))

    def wait_for_returned(self) -> None:
        """Tokens that came back while the search went on must be there from now on."""
        for chain, legs in enumerate(self.chains):
            if chain not in self._waited_for and legs[0].up and self.search.arrived(chain):
                self.wait(chain)

    def _flush(self) -> None:
        """The iterations since the last phase are over."""
        if self._unflushed is None:
            return
        self._phases.append((int(Op.DECODE), self._segment, 0, 0))
        linear = self._unflushed[1 + len(FIXED) :]
        away = self._shown[2:] if self._shown else (0, *(0 for _ in self._below))
        self._shown = int(linear[_HBM]), int(linear[_PREFIX]), *away
        self._unflushed = None
        self._segment += 1

    def _append(self, op: Op, one: int, two: int = 0, three: int = 0) -> None:
        row = int(op), int(one), int(two), int(three)
        self._phases.append(row)
        self._pending.append(row)

    # Playing.

    @property
    def under_way(self) -> bool:
        """Whether transfers are in the background, once all that is written has been played."""
        self.settle()
        return self._sent

    def settle(self) -> None:
        """Let the clock catch up, if the end of a transfer can lie before the present."""
        if self._sent:
            self.play()

    def play(self) -> None:
        """Let the clock run until everything that has been written so far has been played."""
        if self._pending:
            self._give()
            assert self._starving is not None
            self._starving.succeed()
            self._run()
            self._sent = self.search.outstanding > 0

    def drain(self) -> None:
        """Let the clock run until nothing is under way, either."""
        self.play()
        while self.search.outstanding:
            self.clock.env.step()
        self._sent = False

    def starve(self) -> simpy.Event:
        """The event that the server waits for: there is more to play."""
        self._starving = self.clock.env.event()
        return self._starving

    def leg_ended(self, chain: int, leg: int) -> None:
        then = self._then.pop(chain, None)
        if then is not None:
            legs = self.chains[chain]
            hold, following = then()
            legs[leg] = replace(legs[leg], hold_after=hold)
            if following is not None:
                legs.append(following)
                if following.up:
                    self._newest_up = max(self._newest_up, chain)

    def _run(self) -> None:
        self._starving = None
        while self._starving is None:
            self.clock.env.step()

    def _give(self) -> None:
        """Price what has been written, and give it to the server."""
        table, segments = _pieces(self._pending_rows)
        first = len(self.pieces)
        self.pieces += self.price.pieces(self.info, table) if len(table) else []
        self.side_s += sum(piece.iterations * piece.side_s for piece in self.pieces[first:])
        row = 0
        for op in self._pending:
            if op[0] == Op.DECODE:
                while row < len(segments) and segments[row] == op[1]:
                    self.ops.append((int(Op.DECODE), first + row, 0, 0))
                    self.seconds.append(0.0)
                    row += 1
                continue
            seconds = self.price.op_s(self.info, op) if op[0] in _SPENT else 0.0
            if seconds or op[0] not in _SPENT:
                self.ops.append(op)
                self.seconds.append(seconds)
        self._pending, self._pending_rows = [], []

    # Afterwards.

    @property
    def behind_s(self) -> float:
        """Transfers in the background that nothing waited for."""
        moving_s = sum(link.moving_s for link in self.clock.links)
        return max(0.0, moving_s - self.tally.idle_s - self.tally.link_wait_s)

    def terms(self) -> tuple[Term, ...]:
        """The time of everything so far, term by term."""
        table, _ = _pieces(self._rows)
        terms = [term for op in self._phases for term in self.price.op_terms(self.info, op)]
        if len(table):
            terms += [term for _, term in self.price.iteration_terms(self.info, table)]
        waited_s = self.tally.idle_s + self.tally.link_wait_s
        terms.append(Term(BACKGROUND, waited_s, self.behind_s))
        for name, link in zip(LINK_TERMS, (self.clock.down, self.clock.up), strict=True):
            terms.append(Term(name, 0.0, link.moving_s))
        shown = [term for term in total([terms]) if term.seconds or term.hidden_s]
        return tuple(replace(term, basis=self._basis(term.name, table)) for term in shown)

    def _basis(self, name: str, table: np.ndarray) -> Basis:
        """The basis of a term, over the widths and lengths of this program."""
        widths: tuple[int, ...] = (1,)
        context: tuple[float, ...] = (4096.0,)
        if len(table):
            first, last, sequences = self.price.reads(self.info, table)
            widths = tuple(np.unique(sequences).tolist())[:64]
            lengths = np.stack([first, last]) / np.maximum(sequences, 1)
            context = float(lengths.min()), float(lengths.max())
        passes = {op[1] for op in self._phases if op[0] in (Op.PREFILL, Op.RECOMPUTE)} or {1024}
        return basis_of(self.price, name, widths, context, sorted(passes)[:64], self.info.policy)

    def kept(self, info: DemandInfo) -> SearchDemand:
        """The program, kept."""
        self.settle_levels()
        table, segments = _pieces(self._rows)
        first = np.searchsorted(segments, np.arange(self._segment + 1))
        ops: list[tuple[int, int, int, int]] = []
        for op in self._phases:
            if op[0] == Op.DECODE:
                rows = range(int(first[op[1]]), int(first[op[1] + 1]))
                ops += [(int(Op.DECODE), row, 0, 0) for row in rows]
            else:
                ops.append(op)
        legs = [(chain, *leg.row) for chain, legs in enumerate(self.chains) for leg in legs]
        return SearchDemand(
            info,
            np.array(ops, dtype=np.int64).reshape(-1, 4),
            table,
            np.array(legs, dtype=np.int64).reshape(-1, len(LEG_COLUMNS)),
        )


def _pieces(rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Iterations as pieces of which none crosses a phase; each piece's segment, int64."""
    if not rows:
        return np.zeros((0, len(PIECE_COLUMNS)), dtype=np.int64), np.zeros(0, dtype=np.int64)
    every = np.concatenate(rows) if len(rows) > 1 else rows[0]
    fixed = 1 + len(FIXED)
    table = cut(every[:, :fixed], every[:, fixed:])
    return table[:, _NO_SEGMENT], table[:, 1]
