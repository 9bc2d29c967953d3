"""Tokens on their way between HBM and DDR, and the staging buffers of recalled tokens.

A copy to DDR runs in the background.  Until it has finished, its pages stay in HBM (*in flight*)
and attention still reads them there.  In ``stage`` mode the tokens that attention needs are then
fetched back, once, into a staging buffer that stays as long as the token is in DDR, on an active
path and selected by the last plan: reads are fast, but HBM holds all of them.  In ``stream`` mode
what a plan selects gets such buffers, too, filled while iterations run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from arborsim.core.tiers import NUM_TIERS, Tier
from arborsim.core.tree import GrowingTable
from arborsim.machine.program import Leg
from arborsim.machine.reading import ActivePaths, PathProfile
from arborsim.machine.writing import Next, OpenProgram
from arborsim.memory.ledger import Ledger
from arborsim.memory.moves import Changes, kinds

_IN_DDR = np.array([tier.in_ddr for tier in Tier])
_LEAVING = kinds(lambda source, target: target.in_ddr and not source.in_ddr)
_RECOMPUTED = kinds(lambda source, target: target.in_ddr and source == Tier.EVICTED)
_RETURNING = kinds(lambda source, target: source.in_ddr and target.in_hbm)
_FREEING = kinds(lambda source, target: target > source) * (1 - _LEAVING)
_OTHERS = 1 - _FREEING - _LEAVING
_FROM_DDR = kinds(lambda source, target: source.in_ddr)
_STARTING = kinds(  # changes that start transfers or a recomputation, or end a staged copy
    lambda source, target: source.in_ddr or target.in_ddr or source == Tier.EVICTED
)
_CELLS = 1 << 20  # (group, iteration) pairs of one run: bounds its arrays to some 100 MB

Cells = tuple[np.ndarray, ...]  # cache groups ``[m]`` and tokens ``[m]``, as np.nonzero gives them


class _Marks:
    """A bool per cell (group, token) that grows with the ledger when it is looked at."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._marked = GrowingTable(ledger.groups, np.bool_)

    @property
    def values(self) -> np.ndarray:
        """Bool ``[groups, tokens]``, to be read and written."""
        self._marked.extend(self._ledger.num_tokens - len(self._marked), False)
        return self._marked.values


class Transfers:
    """Moves tokens of a search between HBM and DDR behind its decode iterations."""

    def __init__(
        self, program: OpenProgram, ledger: Ledger, paths: ActivePaths, recall: str
    ) -> None:
        self.staging_bytes = 0
        self.peak_link_bytes = 0  # of buffers that tokens cross the link from and to
        self._leaving_bytes = 0
        self._program = program
        self._ledger = ledger
        self._paths = paths
        self._stages = recall == "stage"
        self._streams = recall == "stream"
        self._sizes_left = _LEAVING * np.repeat(ledger.bytes_by_tier, NUM_TIERS)
        self._staged = _Marks(ledger)
        self._flying = _Marks(ledger)
        self._promotions: list[tuple[int, np.ndarray]] = []  # chains, and their tokens

    def needs_link(self, changes: Changes) -> bool:
        """Whether carrying out `changes` starts a transfer."""
        return bool(changes.count(_LEAVING) or len(self._returning(changes)))

    def carry_out(self, changes: Changes) -> None:
        """Change tiers in ledger and paths, what frees memory first, and start the transfers."""
        leaving, returning = changes.of(_LEAVING), self._returning(changes)
        self._release_staging(changes.of(_FROM_DDR))
        if self._ledger.has_pages:
            freed_bytes = self._record_pages(changes, leaving)
        else:
            self._record(changes)
            freed_bytes = changes.count(self._sizes_left)
        # What is recomputed for DDR is in HBM, too, until it has been copied.
        freed_bytes += changes.count(_RECOMPUTED) * int(self._ledger.bytes_by_tier[Tier.HBM])
        if len(leaving):
            self._flying.values[leaving.group, leaving.token] = True
            self._program.hold(freed_bytes, staging=False)
            size = int(self._ledger.bytes_by_tier[leaving.target].sum())
            self._leaving_bytes += size
            self._order(leaving.group, size, 1 + self._follows(leaving.token))
            then = partial(self._left, leaving, size, freed_bytes)
            self._program.send(Leg(False, size, 0, 0), then)
        if len(returning):
            size = int(self._ledger.bytes_by_tier[returning.source].sum())
            self._order(returning.group, size)
            chain = self._program.send(Leg(True, size, 0, 0))
            self._promotions.append((chain, returning.token))
            self._note_link(size)
        self._note_link()

    def wait_for_returning(self) -> None:
        """Wait for tokens on their way back to an active path."""
        if not self._promotions:
            return
        program = self._program
        needed = [n for n, tokens in self._promotions if self._paths.active(tokens).any()]
        for chain in needed:
            program.wait(chain)
        program.settle()
        arrived = program.search.arrived
        self._promotions = [(n, tokens) for n, tokens in self._promotions if not arrived(n)]

    def turn(self) -> None:
        """The active paths have changed: wait for tokens that they need."""
        if not self._ledger.ddr_bytes and not self._promotions:
            return
        self.wait_for_returning()
        if self._stages:
            missing = self._missing()
            if len(missing[0]):
                self._order(missing[0], self._bytes(missing))
                self._note_link(self._bytes(missing))
                self._program.wait(self._program.send(self._stage(missing)))

    def _note_link(self, arriving_bytes: int = 0) -> None:
        self.peak_link_bytes = max(self.peak_link_bytes, self._leaving_bytes + arriving_bytes)

    def _order(self, group: np.ndarray, size_bytes: int, transfers: int = 1) -> None:
        """The host gathers tokens of these groups, orders their transfer and enters what came."""
        groups = len(np.unique(group))
        self._program.move(transfers, transfers * groups, transfers * size_bytes)

    def _follows(self, token: np.ndarray) -> bool:
        """Whether what leaves is fetched back into staging buffers as soon as it has left."""
        return self._stages and bool(self._paths.read_now(token).any())

    def fetch(self, steps: int) -> np.ndarray | None:
        """Bytes that ``stream`` fetches of the selection in each of the next iterations, int64.

        What is fetched stays until it is no longer selected, so that the first iteration brings
        all that is missing.  None where there is no selection, or another mode.
        """
        if not self._streams or (self._paths.selected is None and not self.staging_bytes):
            return None
        missing = self._missing()
        if self._paths.selected is None:
            return None
        leg = self._stage(missing)
        self._note_link(leg.bytes)
        self._program.hold(leg.bytes, staging=True)
        fetched = np.zeros(steps, dtype=np.int64)
        fetched[0] = leg.bytes
        return fetched

    def _missing(self) -> Cells:
        """Tokens that lack the buffer they need; those that need none give theirs up."""
        staged, selected = self._staged.values, self._paths.selected
        needed = _IN_DDR[self._ledger.tier] & self._paths.active(np.arange(staged.shape[1]))
        if selected is not None:
            needed &= selected
        elif self._streams:
            needed &= False
        left = np.nonzero(staged & ~needed)
        self._release(self._bytes(left))
        staged[left] = False
        return np.nonzero(needed & ~staged & ~self._flying.values)

    @property
    def copies_are_read(self) -> bool:
        """Whether tokens are read from HBM until a copy of them has ended."""
        return not self._stages and bool(self._flying.values.any())

    def landing(self) -> PathProfile | None:
        """Tokens on the active paths that are in DDR by name and still read from HBM, if any."""
        if self._stages or not self._program.under_way:
            return None
        return self._paths.count(*np.nonzero(self._flying.values))

    def _returning(self, changes: Changes) -> Changes:
        """From DDR to HBM, unless a copy is already (or still) in HBM."""
        back = changes.of(_RETURNING)
        if not len(back):
            return back
        cells = back.group, back.token
        return back.where(~(self._staged.values[cells] | self._flying.values[cells]))

    def _record_pages(self, changes: Changes, leaving: Changes) -> int:
        """Record `changes`, what frees memory first; bytes of the pages that `leaving` closes."""
        self._record(changes.of(_FREEING))
        held_bytes = self._ledger.hbm_page_bytes
        self._record(leaving)
        freed_bytes = held_bytes - self._ledger.hbm_page_bytes
        self._record(changes.of(_OTHERS))
        return freed_bytes

    def _record(self, changes: Changes) -> None:
        self._ledger.record(changes)
        self._paths.change(changes)

    def _left(self, leaving: Changes, size: int, freed_bytes: int) -> Next:
        """A copy to DDR has ended: give the pages up, if need be once what is needed is back.

        What is not needed gives up its place at once.
        """
        cells = leaving.group, leaving.token
        self._leaving_bytes -= size  # a buffer of the same size may take them back
        self._flying.values[cells] = False
        if not self._stages:
            return -freed_bytes, None
        # For a branch that has ended nothing is fetched before the search turns to it again.
        read, selected = self._paths.read_now(cells[1]), self._paths.selected
        if selected is not None:
            read = read & selected[cells]
        needed = _IN_DDR[self._ledger.tier[cells]] & read & ~self._staged.values[cells]
        kept_bytes = freed_bytes
        if not self._ledger.has_pages:  # a page waits for all of its tokens
            came_from = np.where(leaving.source == Tier.EVICTED, Tier.HBM, leaving.source)
            kept_bytes = int(self._ledger.bytes_by_tier[came_from[needed]].sum())
        fetch = self._stage((cells[0][needed], cells[1][needed]), kept_bytes)
        return kept_bytes - freed_bytes, fetch

    def _stage(self, cells: Cells, freed_bytes: int = 0) -> Leg:
        """Fetch tokens from DDR into staging buffers; then give pages up."""
        size = self._bytes(cells)
        self._staged.values[cells] = True
        self.staging_bytes += size
        return Leg(True, size, size, -freed_bytes)

    def _release_staging(self, changes: Changes) -> None:
        """Staged tokens that leave DDR, or shrink there, give up (part of) their buffer."""
        if not self.staging_bytes or not len(changes):
            return
        staged = self._staged.values
        held = changes.where(staged[changes.group, changes.token])
        stays = _IN_DDR[held.target]
        bytes_by_tier = self._ledger.bytes_by_tier
        before = int(bytes_by_tier[held.source].sum())
        self._release(before - int(bytes_by_tier[held.target[stays]].sum()))
        staged[held.group[~stays], held.token[~stays]] = False

    def _release(self, size: int) -> None:
        self.staging_bytes -= size
        self._program.hold(-size, staging=True)

    def _bytes(self, cells: Cells) -> int:
        return int(self._ledger.bytes_by_tier[self._ledger.tier[cells]].sum())


def stretches(
    steps: int, changes: Changes, groups: int, one_by_one: Callable[[], bool]
) -> Iterator[tuple[int, int, bool]]:
    """Cut a run into stretches of iterations written together, and single iterations.

    An iteration stands alone if transfers run meanwhile, or if its moves, part of `changes`, start
    some.  `one_by_one` tells whether iterations must be written by themselves from now on; it is
    asked before each stretch.  Yields the first iteration, the last one + 1, and whether they are
    written together.
    """
    starting = changes.of(_STARTING)
    alone = np.unique(starting.step) if len(starting) else starting.step
    longest = max(1, _CELLS // groups)
    first = 0
    while first < steps:
        i = int(np.searchsorted(alone, first))
        last = int(alone[i]) if i < len(alone) else steps
        together = last > first and not one_by_one()
        last = min(last, first + longest) if together else first + 1
        yield first, last, together
        first = last
