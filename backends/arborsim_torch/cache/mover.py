"""Moves tokens between tiers: real copies, real frees.

A copy to DDR runs behind the computation; until it is complete, attention reads the old slots,
whose memory is *in flight*.  In ``stage`` mode what the active paths need is then fetched once into
a staging copy on the device, which stays as long as the token is in DDR, on an active path and
selected by the policy (`TieredCache.select`).  So it is in ``stream`` mode where a policy selects.
Otherwise nothing is staged: reading tokens in DDR is up to the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from arborsim_torch.cache.layout import HOME, STAGED, Place
from arborsim_torch.cache.pool import StoredTokens
from arborsim_torch.cache.tiered import TieredCache
from arborsim_torch.tiers.copies import Ticket
from arborsim_torch.tiers.link import HostLink

_ON_DEVICE = tuple(place for place in Place if place.in_hbm)


class Mover:
    """Carries out moves on a cache.

    Parameters
    ----------
    cache : TieredCache
    link : HostLink
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
        self, cache: TieredCache, link: HostLink, *, recall: str = "stage", overlap: bool = True
    ) -> None:
        self.cache, self.link = cache, link
        self.recall, self.overlap = recall, overlap
        self.exposed_s = 0.0
        self.on_peak: Callable[[], None] = lambda: None
        self._pending: list[PendingCopy] = []

    @property
    def staging_in_flight_bytes(self) -> int:
        """Bytes on the device of buffers that tokens in DDR are being fetched into."""
        return sum(
            block.nbytes for copy in self._pending if copy.to_stage for _, _, block in copy.parts
        )

    @property
    def in_flight_bytes(self) -> int:
        """Bytes on the device of tokens whose home is DDR and which are not staged."""
        cache = self.cache
        return sum(
            len(token) * cache.pools[Place(place)].bytes_per_slot
            for copy in self._pending
            if copy.target.on_host
            for group, token, _ in copy.parts
            for place in np.unique(cache.place.values[group, token])
            if Place(place).in_hbm
        )

    @property
    def leaving_tokens(self) -> np.ndarray:
        """Int64 ``[groups]``: tokens of DDR that are still in HBM, because a copy is under way."""
        count = np.zeros(self.cache.layout.groups, dtype=np.int64)
        for copy in self._pending:
            for group, token, _ in copy.parts:
                count[group] += int(
                    np.isin(self.cache.place.values[group, token], _ON_DEVICE).sum()
                )
        return count

    @torch.inference_mode()
    def settle(self, wait: bool) -> None:
        """Let copies that have ended take effect; `wait` for all of them."""
        self.cache.grow_slot_tables()
        while self._pending:
            ready = [copy for copy in self._pending if wait or copy.done()]
            if not ready:
                return
            for copy in ready:
                self._pending.remove(copy)
                self.exposed_s += copy.wait()
                self._land(copy)

    @torch.inference_mode()
    def move(self, pairs: GroupTokenPairs, target: np.ndarray) -> None:
        """Give tokens a new tier (values of `Tier`); none may be lost now.

        What frees memory comes first.
        """
        if not len(pairs):
            return
        self.settle(wait=True)
        homes = HOME[target]
        lost = homes == Place.LOST
        self._forget(pairs.where(lost))
        there = [place for place in self.cache.pools if not place.staged]
        for place in (*there[1:], Place.HBM):
            self._bring(pairs.where(homes == place), place)
        self.on_peak()
        self.cache.shrink()
        self.cache.changed()
        if not self.overlap:
            self.settle(wait=True)

    def restore(self, pairs: GroupTokenPairs) -> None:
        """Give lost tokens slots in HBM; `TreeDecoder.recompute` fills them."""
        self.settle(wait=True)
        self.cache.pools[Place.HBM].take(pairs.group, pairs.token)
        self.cache.changed()

    @torch.inference_mode()
    def turn(self) -> None:
        """Paths or the selection have changed: stage what is needed, give up what is not.

        Only the difference crosses the link (the memory-hierarchy paper's differential prefetch,
        section 3.4): what is staged and still needed stays.
        """
        if not self._anything_in_ddr() or not (self._stages or self._anything_staged()):
            return
        self.settle(wait=True)
        cache = self.cache
        needed = self._needed()
        for home, stage in self._ddr():
            staged = cache.pools[stage].slots.of >= 0
            self._unstage(GroupTokenPairs(*np.nonzero(staged & ~needed)), home, stage)
            missing = (cache.pools[home].slots.of >= 0) & needed & ~staged
            self._stage(GroupTokenPairs(*np.nonzero(missing)), home)
        self.settle(wait=True)
        cache.changed()

    def _anything_in_ddr(self) -> bool:
        pools = self.cache.pools
        return bool(self._pending) or any(pools[home].slots.used.any() for home, _ in self._ddr())

    def _ddr(self) -> Iterator[tuple[Place, Place]]:
        """Places of DDR that there are, with those of their staged copies."""
        return ((home, stage) for home, stage in STAGED.items() if home in self.cache.pools)

    def _anything_staged(self) -> bool:
        return any(self.cache.pools[stage].slots.used.any() for _, stage in self._ddr())

    @property
    def _stages(self) -> bool:
        return self.recall == "stage" or (self.recall == "stream" and self.cache.selects)

    def _needed(self) -> np.ndarray:
        """Bool ``[groups, tokens]``: those that, in DDR, would have a staging copy."""
        cache, tree = self.cache, self.cache.tree
        needed = cache.selected(np.arange(cache.num_tokens))
        needed &= self._stages
        needed &= tree.on_path(cache.leaves)[tree.node_of_token.values]
        return needed

    # -- one kind of move at a time ------------------------------------------------------------

    def _forget(self, pairs: GroupTokenPairs) -> None:
        """Give up every copy."""
        for pool in self.cache.pools.values():
            held = pool.slots.of[pairs.group, pairs.token] >= 0
            if held.any():
                pool.give_back(pairs.group[held], pairs.token[held])
        self.cache.place.values[pairs.group, pairs.token] = Place.LOST

    def _bring(self, pairs: GroupTokenPairs, target: Place) -> None:
        """Move tokens from wherever they are to `target`."""
        cache = self.cache
        for source, pool in cache.pools.items():
            if source is target or source.staged:
                continue
            held = pool.slots.of[pairs.group, pairs.token] >= 0
            part = pairs.where(held)
            if not len(part):
                continue
            if target.on_host and not source.on_host:
                self._offload(part, source, target)
            else:
                self._copy(part, source, target)

    def _offload(self, pairs: GroupTokenPairs, source: Place, target: Place) -> None:
        copy = PendingCopy(target)
        for group, token in pairs.by_group():
            block = self._converted(source, target, group, token)
            host, tickets = self._copy_down(block)
            copy.tickets += tickets
            copy.parts.append((group, token, host))
        self._pending.append(copy)

    def _copy_down(self, block: StoredTokens) -> tuple[StoredTokens, list[Ticket]]:
        """Memory of the host that a block is on its way to, and the tickets of its copies."""
        host = StoredTokens(*(self.link.host_empty(p.shape, p.dtype) for p in block.parts()))
        tensors = zip(block.parts(), host.parts(), strict=True)
        return host, [self.link.down(part, out) for part, out in tensors]

    def _copy(self, pairs: GroupTokenPairs, source: Place, target: Place) -> None:
        """At once: on the device, up from DDR, or from one format to the other in DDR."""
        cache = self.cache
        for group, token in pairs.by_group():
            block = self._converted(source, target, group, token)
            if target.on_host:
                block = self._down(block)
            self._put(target, group, token, block)
            self._drop(source, group, token)
            if source.on_host and not target.on_host:
                self._drop(STAGED[source], group, token)
            cache.place.values[group, token] = target
        if target.on_host and self._stages:  # requantised in DDR
            source_stage = STAGED[source]
            held = cache.pools[source_stage].slots.of[pairs.group, pairs.token] >= 0
            self._unstage(pairs.where(held), source, source_stage)
            needed = self._needed()[pairs.group, pairs.token]
            self._stage(pairs.where(needed), target)
            self.settle(wait=True)

    def _converted(
        self, source: Place, target: Place, group: int, token: np.ndarray
    ) -> StoredTokens:
        """The tokens in the format of `target`, on the device."""
        cache, dtype = self.cache, self.cache.layout.dtype
        staged = STAGED.get(source)
        if staged is not None and (cache.pools[staged].slots.of[group, token] >= 0).all():
            source = staged
        pool = cache.pools[source]
        block = pool.read(group, pool.slots.of[group, token])
        if source.on_host:
            block = self._up(block)
        if source.rung == target.rung:
            return block
        codec = cache.pools[target].codec
        return StoredTokens(*codec.encode(pool.codec.decode(block.data, block.scale, dtype)))

    def _up(self, block: StoredTokens) -> StoredTokens:
        device = self.cache.layout.device
        out = StoredTokens(
            *(torch.empty(p.shape, dtype=p.dtype, device=device) for p in block.parts())
        )
        tickets = [self.link.up(p, o) for p, o in zip(block.parts(), out.parts(), strict=True)]
        self.exposed_s += sum(ticket.wait() for ticket in tickets)
        return out

    def _down(self, block: StoredTokens) -> StoredTokens:
        host, tickets = self._copy_down(block)
        self.exposed_s += sum(ticket.wait() for ticket in tickets)
        return host

    def _stage(self, pairs: GroupTokenPairs, home: Place) -> None:
        """Start to fetch tokens from DDR into staging."""
        if not len(pairs):
            return
        pool, device = self.cache.pools[home], self.cache.layout.device
        copy = PendingCopy(home, to_stage=True)
        for group, token in pairs.by_group():
            block = pool.read(group, pool.slots.of[group, token])
            out = StoredTokens(*(torch.empty(p.shape, dtype=p.dtype, device=device)
                          for p in block.parts()))  # fmt: skip
            for part, target in zip(block.parts(), out.parts(), strict=True):
                copy.tickets.append(self.link.up(part, target))
            copy.parts.append((group, token, out))
        self._pending.append(copy)
        self.on_peak()

    def _unstage(self, pairs: GroupTokenPairs, home: Place, stage: Place) -> None:
        if len(pairs):
            self.cache.pools[stage].give_back(pairs.group, pairs.token)
            self.cache.place.values[pairs.group, pairs.token] = home

    def _land(self, copy: PendingCopy) -> None:
        place = STAGED[copy.target] if copy.to_stage else copy.target
        for group, token, block in copy.parts:
            self._put(place, group, token, block)
            if copy.to_stage:
                self._leave_device(group, token)
                self.cache.place.values[group, token] = place
        self.cache.changed()
        if copy.to_stage:
            return
        pairs = GroupTokenPairs(
            np.concatenate([np.full(len(t), g, dtype=np.int64) for g, t, _ in copy.parts]),
            np.concatenate([t for _, t, _ in copy.parts]),
        )
        needed = self._needed()[pairs.group, pairs.token] & (self.recall == "stage")
        for group, token in pairs.where(~needed).by_group():
            self._leave_device(group, token)
            self.cache.place.values[group, token] = place
        self._stage(pairs.where(needed), copy.target)

    def _leave_device(self, group: int, token: np.ndarray) -> None:
        for place in _ON_DEVICE:
            self._drop(place, group, token)

    def _put(self, place: Place, group: int, token: np.ndarray, block: StoredTokens) -> None:
        pool = self.cache.pools[place]
        slot = pool.take(np.full(len(token), group, dtype=np.int64), token)
        pool.write(group, slot, block)

    def _drop(self, place: Place, group: int, token: np.ndarray) -> None:
        pool = self.cache.pools.get(place)
        if pool is None:
            return
        held = token[pool.slots.of[group, token] >= 0]
        if len(held):
            pool.give_back(np.full(len(held), group, dtype=np.int64), held)


@dataclass
class GroupTokenPairs:
    """(group, token) pairs, each of which takes a slot of its own; int64 arrays ``[m]``."""

    group: np.ndarray
    token: np.ndarray

    def __len__(self) -> int:
        return len(self.token)

    def where(self, mask: np.ndarray) -> GroupTokenPairs:
        return GroupTokenPairs(self.group[mask], self.token[mask])

    def by_group(self) -> Iterator[tuple[int, np.ndarray]]:
        """Each group that occurs, and its tokens."""
        for group in np.unique(self.group).tolist():
            yield group, self.token[self.group == group]


@dataclass
class PendingCopy:
    """Tokens that are being copied, per group; `target` is where they will be stored."""

    target: Place
    parts: list[tuple[int, np.ndarray, StoredTokens]] = field(default_factory=list)
    tickets: list[Ticket] = field(default_factory=list)
    to_stage: bool = False

    def done(self) -> bool:
        return all(ticket.done() for ticket in self.tickets)

    def wait(self) -> float:
        return sum(ticket.wait() for ticket in self.tickets)
