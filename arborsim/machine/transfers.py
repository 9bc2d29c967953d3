"""Tokens on their way between HBM and other memories, and staging buffers of recalled tokens.

A copy out of HBM runs in the background, on the link of the memory that it goes to.  Until it has
finished, its pages stay in HBM (*in flight*) and attention still reads them there.  In ``stage``
mode the tokens that attention needs are then fetched back, once, into a staging buffer that stays
as long as the token is in that memory, on an active path and selected by the last plan: reads are
fast, but HBM holds all of them.  In ``stream`` mode what a plan selects gets such buffers, too,
filled while iterations run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from arborsim.core.tiers import DDR, MOST_TIERS, RUNGS, Tier, by_tier
from arborsim.core.tree import GrowingTable
from arborsim.machine.program import Leg
from arborsim.machine.reading import ActivePaths, PathProfile
from arborsim.machine.writing import Next, OpenProgram
from arborsim.memory.ledger import Ledger
from arborsim.memory.moves import Changes, kinds

_OFFLOADED = by_tier(lambda tier: tier.offloaded)
_LEAVING = kinds(lambda source, target: target.offloaded and not source.offloaded)
_RECOMPUTED = kinds(lambda source, target: target.offloaded and source == Tier.EVICTED)
_RETURNING = kinds(lambda source, target: source.offloaded and target.in_hbm)
_BETWEEN = kinds(  # memories other than HBM
    lambda source, target: source.offloaded and target.offloaded and source.memory != target.memory
)
_FREEING = kinds(lambda source, target: target.is_below(source)) * (1 - _LEAVING)
_OTHERS = 1 - _FREEING - _LEAVING
_OFFLOADED_BEFORE = kinds(lambda source, target: source.offloaded)
_STARTING = kinds(  # changes that start transfers or a recomputation, or end a staged copy
    lambda source, target: source.offloaded or target.offloaded or source == Tier.EVICTED
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
    """Moves tokens of a search between memories behind its decode iterations."""

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
        self._sizes_left = _LEAVING * np.repeat(ledger.bytes_by_tier, MOST_TIERS)
        self._staged = _Marks(ledger)
        self._flying = _Marks(ledger)
        self._promotions: list[tuple[int, np.ndarray]] = []  # chains, and their tokens

    def needs_link(self, changes: Changes) -> bool:
        """Whether carrying out `changes` starts a transfer."""
        moved = changes.count(_LEAVING) or changes.count(_BETWEEN)
        return bool(moved or len(self._returning(changes)))

    def carry_out(self, changes: Changes) -> None:
        """Change tiers in ledger and paths, what frees memory first, and start the transfers."""
        sizes = self._ledger.bytes_by_tier
        leaving = changes.of(_LEAVING)
        parts = _by_memory(leaving, leaving.target)
        returning, between = self._returning(changes), changes.of(_BETWEEN)
        self._release_staging(changes.of(_OFFLOADED_BEFORE))
        for (memory, part), freed_bytes in zip(parts, self._record(changes, parts), strict=True):
            self._flying.values[part.group, part.token] = True
            self._program.hold(freed_bytes, staging=False)
            size = int(sizes[part.target].sum())
            self._leaving_bytes += size
            self._order(part.group, size, 1 + self._follows(part.token))
            then = partial(self._left, part, size, freed_bytes)
            self._program.send(Leg(False, size, 0, 0, memory), then)
        for memory, part in _by_memory(returning, returning.source):
            size = int(sizes[part.source].sum())
            self._order(part.group, size)
            chain = self._program.send(Leg(True, size, 0, 0, memory))
            self._promotions.append((chain, part.token))
            self._note_link(size)
        for memory, part in _by_memory(between, np.maximum(between.source, between.target)):
            for up in (False, True):
                own = part.where((part.source > part.target) == up)
                if len(own):
                    size = int(sizes[own.source if up else own.target].sum())
                    self._order(own.group, size)
                    self._program.send(Leg(up, size, 0, 0, memory))
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

    def activate(self) -> None:
        """The active paths have changed: wait for tokens that they need."""
        if not self._ledger.offloaded_bytes and not self._promotions:
            return
        self.wait_for_returning()
        if self._stages:
            missing = self._missing()
            if not len(missing[0]):
                return
            memory_of = self._ledger.tier[missing] // RUNGS
            chains = []
            for memory in np.unique(memory_of).tolist():
                cells = tuple(each[memory_of == memory] for each in missing)
                self._order(cells[0], self._bytes(cells))
                self._note_link(self._bytes(cells))
                chains.append(self._program.send(self._stage(cells, memory=memory)))
            for chain in chains:
                self._program.wait(chain)

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
        needed = _OFFLOADED[self._ledger.tier] & self._paths.active(np.arange(staged.shape[1]))
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

    def _record(self, changes: Changes, leaving: list[tuple[int, Changes]]) -> list[int]:
        """Record `changes`, what frees memory first; bytes of HBM that each part of them leaves.

        What is recomputed for another memory is in HBM, too, until it has been copied.
        """
        ledger, paged = self._ledger, self._ledger.has_pages
        hbm_bytes = int(ledger.bytes_by_tier[Tier.HBM])
        freed = [part.count(_RECOMPUTED) * hbm_bytes for _, part in leaving]
        stages = (changes.of(_FREEING), *(part for _, part in leaving), changes.of(_OTHERS))
        for at, part in enumerate(stages if paged else (changes,)):
            held_bytes = ledger.hbm_page_bytes if paged else 0
            ledger.record(part)
            self._paths.change(part)
            if 0 < at <= len(leaving):
                freed[at - 1] += held_bytes - ledger.hbm_page_bytes
        if not paged:
            lost = (part.count(self._sizes_left) for _, part in leaving)
            freed = [own + left for own, left in zip(freed, lost, strict=True)]
        return freed

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
        needed = _OFFLOADED[self._ledger.tier[cells]] & read & ~self._staged.values[cells]
        kept_bytes = freed_bytes
        if not self._ledger.has_pages:  # a page waits for all of its tokens
            came_from = np.where(leaving.source == Tier.EVICTED, Tier.HBM, leaving.source)
            kept_bytes = int(self._ledger.bytes_by_tier[came_from[needed]].sum())
        memory = Tier(leaving.target[0]).memory
        fetch = self._stage((cells[0][needed], cells[1][needed]), kept_bytes, memory)
        return kept_bytes - freed_bytes, fetch

    def _stage(self, cells: Cells, freed_bytes: int = 0, memory: int = DDR) -> Leg:
        """Fetch tokens from a memory into staging buffers; then give pages up."""
        size = self._bytes(cells)
        self._staged.values[cells] = True
        self.staging_bytes += size
        return Leg(True, size, size, -freed_bytes, memory)

    def _release_staging(self, changes: Changes) -> None:
        """Staged tokens that leave DDR, or shrink there, give up (part of) their buffer."""
        if not self.staging_bytes or not len(changes):
            return
        staged = self._staged.values
        held = changes.where(staged[changes.group, changes.token])
        stays = _OFFLOADED[held.target]
        bytes_by_tier = self._ledger.bytes_by_tier
        before = int(bytes_by_tier[held.source].sum())
        self._release(before - int(bytes_by_tier[held.target[stays]].sum()))
        staged[held.group[~stays], held.token[~stays]] = False

    def _release(self, size: int) -> None:
        self.staging_bytes -= size
        self._program.hold(-size, staging=True)

    def _bytes(self, cells: Cells) -> int:
        return int(self._ledger.bytes_by_tier[self._ledger.tier[cells]].sum())


def _by_memory(changes: Changes, tier: np.ndarray) -> list[tuple[int, Changes]]:
    """Changes by the memory of `tier`, their source or target, nearest first."""
    memory = tier // RUNGS
    found = np.unique(memory).tolist()
    if len(found) == 1:
        return [(found[0], changes)]
    return [(each, changes.where(memory == each)) for each in found]


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
