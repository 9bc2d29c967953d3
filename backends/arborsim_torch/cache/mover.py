"""Moves tokens between tiers: real copies, real frees.

A copy to DDR runs behind the computation; until it has landed, attention reads the old place, whose
memory is *in flight*.  In ``stage`` mode what the active paths need is then fetched once into a
staging copy on the device, which stays as long as the token is in DDR and on an active path.  In
the other modes nothing is staged: reading tokens in DDR is up to the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from arborsim_torch.cache.cells import Cells, Flight
from arborsim_torch.cache.places import HOME, STAGED, Place
from arborsim_torch.cache.pool import Block
from arborsim_torch.cache.tiered import TieredCache
from arborsim_torch.tiers.lane import Ticket
from arborsim_torch.tiers.link import Link

_ON_DEVICE = (Place.HBM, Place.HBM_QUANTISED)


class Mover:
    """Carries out moves on a cache.

    Parameters
    ----------
    cache : TieredCache
    link : Link
    recall : {"stage", "stream", "near", "ondemand"}
    overlap : bool
        False waits for every copy at once.

    Attributes
    ----------
    exposed_s : float
        Seconds that the search waited for copies.
    on_peak : callable
        Called when the device holds most in the middle of moves: tokens have come back to HBM while
        the copies of leaving ones are on their way, or staging buffers have been allocated for
        tokens that are still in HBM as well.
    """

    def __init__(
        self, cache: TieredCache, link: Link, *, recall: str = "stage", overlap: bool = True
    ) -> None:
        self.cache, self.link = cache, link
        self.recall, self.overlap = recall, overlap
        self.exposed_s = 0.0
        self.on_peak: Callable[[], None] = lambda: None
        self._flights: list[Flight] = []

    @property
    def staging_in_flight_bytes(self) -> int:
        """Bytes on the device of buffers that tokens in DDR are being fetched into."""
        return sum(
            block.nbytes
            for flight in self._flights
            if flight.to_stage
            for _, _, block in flight.parts
        )

    @property
    def in_flight_bytes(self) -> int:
        """Bytes on the device of tokens whose home is DDR and which are not staged."""
        cache = self.cache
        return sum(
            len(token) * cache.pools[Place(place)].bytes_per_cell
            for flight in self._flights
            if flight.lands.on_host
            for group, token, _ in flight.parts
            for place in np.unique(cache.place.values[group, token])
            if place in (Place.HBM, Place.HBM_QUANTISED)
        )

    @property
    def leaving_tokens(self) -> np.ndarray:
        """Int64 ``[groups]``: tokens of DDR that are still in HBM, because a copy is under way."""
        count = np.zeros(self.cache.layout.groups, dtype=np.int64)
        for flight in self._flights:
            for group, token, _ in flight.parts:
                count[group] += int(
                    np.isin(self.cache.place.values[group, token], _ON_DEVICE).sum()
                )
        return count

    @torch.inference_mode()
    def settle(self, wait: bool) -> None:
        """Let copies that have ended take effect; `wait` for all of them."""
        self.cache.catch_up()
        while self._flights:
            ready = [flight for flight in self._flights if wait or flight.done()]
            if not ready:
                return
            for flight in ready:
                self._flights.remove(flight)
                self.exposed_s += flight.wait()
                self._land(flight)

    @torch.inference_mode()
    def move(self, cells: Cells, target: np.ndarray) -> None:
        """Give cells a new tier (values of `Tier`); none may be lost now.

        What frees memory comes first.
        """
        if not len(cells):
            return
        self.settle(wait=True)
        homes = HOME[target]
        lost = homes == Place.LOST
        self._forget(cells.where(lost))
        for place in (Place.HBM_QUANTISED, Place.DDR, Place.DDR_QUANTISED, Place.HBM):
            self._bring(cells.where(homes == place), place)
        self.on_peak()
        self.cache.shrink()
        self.cache.changed()
        if not self.overlap:
            self.settle(wait=True)

    def restore(self, cells: Cells) -> None:
        """Give lost cells slots in HBM; `TreeDecoder.recompute` fills them."""
        self.settle(wait=True)
        self.cache.pools[Place.HBM].take(cells.group, cells.token)
        self.cache.changed()

    @torch.inference_mode()
    def turn(self) -> None:
        """The active paths have changed: stage what they need, give up what they do not.

        Only the difference crosses the link (the memory-hierarchy paper's differential prefetch,
        section 3.4): what is staged and still needed stays.
        """
        if self.recall != "stage" or not self._anything_in_ddr():
            return
        self.settle(wait=True)
        cache = self.cache
        on_path = self._on_path()
        for home, stage in STAGED.items():
            staged = cache.pools[stage].slots.of >= 0
            self._unstage(Cells(*np.nonzero(staged & ~on_path)), home, stage)
            missing = (cache.pools[home].slots.of >= 0) & on_path & ~staged
            self._stage(Cells(*np.nonzero(missing)), home)
        self.settle(wait=True)
        cache.changed()

    def _anything_in_ddr(self) -> bool:
        pools = self.cache.pools
        return bool(self._flights) or any(pools[home].slots.used.any() for home in STAGED)

    def _on_path(self) -> np.ndarray:
        tree = self.cache.tree
        return np.asarray(tree.on_path(self.cache.leaves)[tree.node_of_token.values])

    # -- one kind of move at a time ------------------------------------------------------------

    def _forget(self, cells: Cells) -> None:
        """Give up every copy."""
        for pool in self.cache.pools.values():
            held = pool.slots.of[cells.group, cells.token] >= 0
            if held.any():
                pool.give_back(cells.group[held], cells.token[held])
        self.cache.place.values[cells.group, cells.token] = Place.LOST

    def _bring(self, cells: Cells, target: Place) -> None:
        """Move cells from wherever they are to `target`."""
        cache = self.cache
        for source in (Place.HBM, Place.HBM_QUANTISED, Place.DDR, Place.DDR_QUANTISED):
            if source is target:
                continue
            held = cache.pools[source].slots.of[cells.group, cells.token] >= 0
            part = cells.where(held)
            if not len(part):
                continue
            if target.on_host and not source.on_host:
                self._offload(part, source, target)
            else:
                self._copy(part, source, target)

    def _offload(self, cells: Cells, source: Place, target: Place) -> None:
        flight = Flight(target)
        for group, token in cells.by_group():
            block = self._converted(source, target, group, token)
            host, tickets = self._sent_down(block)
            flight.tickets += tickets
            flight.parts.append((group, token, host))
        self._flights.append(flight)

    def _sent_down(self, block: Block) -> tuple[Block, list[Ticket]]:
        """Memory of the host that a block is on its way to, and the tickets of its copies."""
        host = Block(*(self.link.host_empty(p.shape, p.dtype) for p in block.parts()))
        pairs = zip(block.parts(), host.parts(), strict=True)
        return host, [self.link.down(part, out) for part, out in pairs]

    def _copy(self, cells: Cells, source: Place, target: Place) -> None:
        """At once: on the device, up from DDR, or from one format to the other in DDR."""
        cache = self.cache
        for group, token in cells.by_group():
            block = self._converted(source, target, group, token)
            if target.on_host:
                block = self._down(block)
            self._put(target, group, token, block)
            self._drop(source, group, token)
            if source.on_host and not target.on_host:
                self._drop(STAGED[source], group, token)
            cache.place.values[group, token] = target
        if target.on_host and self.recall == "stage":  # requantised in DDR
            source_stage = STAGED[source]
            held = cache.pools[source_stage].slots.of[cells.group, cells.token] >= 0
            self._unstage(cells.where(held), source, source_stage)
            on_path = self._on_path()[cells.token]
            self._stage(cells.where(on_path), target)
            self.settle(wait=True)

    def _converted(self, source: Place, target: Place, group: int, token: np.ndarray) -> Block:
        """The tokens in the format of `target`, on the device."""
        cache, dtype = self.cache, self.cache.layout.dtype
        staged = STAGED.get(source)
        if staged is not None and (cache.pools[staged].slots.of[group, token] >= 0).all():
            source = staged
        pool = cache.pools[source]
        block = pool.read(group, pool.slots.of[group, token])
        if source.on_host:
            block = self._up(block)
        if source.quantised == target.quantised:
            return block
        codec = cache.pools[target].codec
        return Block(*codec.encode(pool.codec.decode(block.data, block.scale, dtype)))

    def _up(self, block: Block) -> Block:
        device = self.cache.layout.device
        out = Block(*(torch.empty(p.shape, dtype=p.dtype, device=device) for p in block.parts()))
        tickets = [self.link.up(p, o) for p, o in zip(block.parts(), out.parts(), strict=True)]
        self.exposed_s += sum(ticket.wait() for ticket in tickets)
        return out

    def _down(self, block: Block) -> Block:
        host, tickets = self._sent_down(block)
        self.exposed_s += sum(ticket.wait() for ticket in tickets)
        return host

    def _stage(self, cells: Cells, home: Place) -> None:
        """Start to fetch cells from DDR into staging."""
        if not len(cells):
            return
        pool, device = self.cache.pools[home], self.cache.layout.device
        flight = Flight(home, to_stage=True)
        for group, token in cells.by_group():
            block = pool.read(group, pool.slots.of[group, token])
            out = Block(*(torch.empty(p.shape, dtype=p.dtype, device=device)
                          for p in block.parts()))  # fmt: skip
            for part, target in zip(block.parts(), out.parts(), strict=True):
                flight.tickets.append(self.link.up(part, target))
            flight.parts.append((group, token, out))
        self._flights.append(flight)
        self.on_peak()

    def _unstage(self, cells: Cells, home: Place, stage: Place) -> None:
        if len(cells):
            self.cache.pools[stage].give_back(cells.group, cells.token)
            self.cache.place.values[cells.group, cells.token] = home

    def _land(self, flight: Flight) -> None:
        place = STAGED[flight.lands] if flight.to_stage else flight.lands
        for group, token, block in flight.parts:
            self._put(place, group, token, block)
            if flight.to_stage:
                self._leave_device(group, token)
                self.cache.place.values[group, token] = place
        self.cache.changed()
        if flight.to_stage:
            return
        cells = Cells(
            np.concatenate([np.full(len(t), g, dtype=np.int64) for g, t, _ in flight.parts]),
            np.concatenate([t for _, t, _ in flight.parts]),
        )
        needed = self._on_path()[cells.token] & (self.recall == "stage")
        for group, token in cells.where(~needed).by_group():
            self._leave_device(group, token)
            self.cache.place.values[group, token] = place
        self._stage(cells.where(needed), flight.lands)

    def _leave_device(self, group: int, token: np.ndarray) -> None:
        for place in (Place.HBM, Place.HBM_QUANTISED):
            self._drop(place, group, token)

    def _put(self, place: Place, group: int, token: np.ndarray, block: Block) -> None:
        pool = self.cache.pools[place]
        slot = pool.take(np.full(len(token), group, dtype=np.int64), token)
        pool.write(group, slot, block)

    def _drop(self, place: Place, group: int, token: np.ndarray) -> None:
        pool = self.cache.pools[place]
        held = token[pool.slots.of[group, token] >= 0]
        if len(held):
            pool.give_back(np.full(len(held), group, dtype=np.int64), held)
