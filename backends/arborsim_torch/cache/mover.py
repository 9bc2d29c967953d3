"""Moves tokens between tiers: real copies, real frees.

What a decision sends to DDR is gathered on the device and goes down as one list of blocks, straight
to where it will lie.  The copy runs behind the computation, for as many steps as it takes; until it
is complete, attention reads the old slots, whose memory is *in flight*.  What comes back goes up in
the same way and is scattered on the device, which waits for it.  The host does not.

In ``stage`` mode what the active paths need is then fetched once into a staging copy on the device,
which stays as long as the token is in DDR, on an active path and selected by the policy
(`TieredCache.select`).  So it is in ``stream`` mode where a policy selects.  Otherwise nothing is
staged: reading tokens in DDR is up to the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from arborsim.machine.live_memory import portion_tokens
from arborsim_torch.cache.host_pool import HostPool
from arborsim_torch.cache.layout import HOME, STAGED, Place
from arborsim_torch.cache.pairs import GroupContent, GroupTokenPairs, PendingCopy
from arborsim_torch.cache.pool import StoredTokens
from arborsim_torch.cache.tiered import TieredCache
from arborsim_torch.tiers.codec import Packed
from arborsim_torch.tiers.copies import HeldUp
from arborsim_torch.tiers.link import HostLink

_ON_DEVICE = tuple(place for place in Place if place.in_hbm)
_MOST_UNDER_WAY = 8  #: copies to DDR at a time; the oldest is waited for


class Mover:
    """Carries out moves on a cache; without `overlap` it waits for every copy at once.

    `held_up` is the time that the search waited for copies.  `on_peak` is called when the device
    holds most in the middle of moves: tokens are back in HBM while the copies of leaving ones are
    on their way, or staging buffers are there for tokens that are still in HBM as well.
    """

    def __init__(
        self, cache: TieredCache, link: HostLink, *, recall: str = "stage", overlap: bool = True
    ) -> None:
        self.cache, self.link = cache, link
        self.recall, self.overlap = recall, overlap
        self.held_up = HeldUp()
        self.on_peak: Callable[[], None] = lambda: None
        self._pending: list[PendingCopy] = []

    @property
    def staging_in_flight_bytes(self) -> int:
        """Bytes on the device of buffers that tokens in DDR are being fetched into."""
        return sum(copy.nbytes for copy in self._pending if copy.to_stage)

    @property
    def in_flight_bytes(self) -> int:
        """Bytes on the device of tokens whose home is DDR and which are not staged."""
        return sum(
            int(np.count_nonzero(copy.places(self.cache) == place)) * pool.bytes_per_slot
            for copy in self._pending
            for place, pool in self.cache.pools.items()
            if place.in_hbm
        )

    @property
    def leaving_tokens(self) -> np.ndarray:
        """Int64 ``[groups]``: tokens of DDR that are still in HBM, because a copy is under way."""
        count = np.zeros(self.cache.layout.groups, dtype=np.int64)
        for copy in self._pending:
            leaving = np.isin(copy.places(self.cache), _ON_DEVICE)
            count += np.bincount(copy.pairs.group[leaving], minlength=len(count))
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
                self._finish(copy)

    def _finish(self, copy: PendingCopy) -> None:
        """Wait for a copy, on the host if it goes there, and let it take effect."""
        self._pending.remove(copy)
        if copy.to_stage:
            copy.ticket.order(self.held_up)
        else:
            self._arrived(copy)
            copy.buffers.clear()  # before others are allocated to fetch tokens back
        self._land(copy)

    def _arrived(self, copy: PendingCopy) -> None:
        """Wait on the host for a copy to DDR."""
        self.held_up.host_s += copy.ticket.wait()
        self._host_pool(copy.target).arriving.remove(copy.blocks)

    def _settle_for(self, pairs: GroupTokenPairs) -> None:
        """Let copies take effect that have ended, or that have any of these tokens."""
        self.settle(wait=False)
        moving = np.zeros((self.cache.layout.groups, self.cache.num_tokens), dtype=np.bool_)
        moving[pairs.group, pairs.token] = True
        while found := [c for c in self._pending if c.to_stage or c.any(moving)]:
            self._finish(found[0])
        while len(self._pending) >= _MOST_UNDER_WAY:
            self._finish(self._pending[0])

    @torch.inference_mode()
    def move(self, pairs: GroupTokenPairs, target: np.ndarray) -> None:
        """Give tokens, none lost, a new tier (values of `Tier`): what frees memory comes first."""
        if not len(pairs):
            return
        if self.cache.stream is not None:
            self.cache.stream.discard()
        self._settle_for(pairs)
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

    def evict(self, token: np.ndarray) -> None:
        """Forget tokens of a cache of one group `held_in_hbm_alone`, which need no `move`."""
        cache = self.cache
        cache.pools[Place.HBM].give_back_shared(token)
        cache.place.values[0, token] = Place.LOST
        cache.shrink()
        cache.changed()

    @property
    def held_in_hbm_alone(self) -> bool:
        """Whether all tokens that are held lie in HBM at full precision, and none is on its way."""
        pools = self.cache.pools.items()
        return not (self._pending or any(p.slots.total for at, p in pools if at is not Place.HBM))

    def restore(self, pairs: GroupTokenPairs) -> None:
        """Give lost tokens slots in HBM; `TreeDecoder.recompute` fills them."""
        self._settle_for(pairs)
        self.cache.pools[Place.HBM].take(pairs.group, pairs.token)
        self.cache.changed()

    @torch.inference_mode()
    def activate(self) -> None:
        """Paths or the selection have changed: stage what is needed, give up what is not.

        Only the difference crosses the link (the memory-hierarchy paper's differential prefetch,
        section 3.4): what is staged and still needed stays.
        """
        pools = self.cache.pools
        staged_now = any(pools[stage].slots.total for _, stage in self._ddr())
        if not self.anything_in_ddr or not (self._stages or staged_now):
            return
        self._settle_for(GroupTokenPairs.none())
        cache = self.cache
        needed = self._needed()
        for home, stage in self._ddr():
            staged = cache.pools[stage].slots.of >= 0
            self._unstage(GroupTokenPairs(*np.nonzero(staged & ~needed)), home, stage)
            missing = (cache.place.values == home) & needed
            self._stage(GroupTokenPairs(*np.nonzero(missing)), home)
        self._settle_for(GroupTokenPairs.none())
        cache.changed()

    @property
    def anything_in_ddr(self) -> bool:
        """Whether tokens are in DDR, or on their way there."""
        pools = self.cache.pools
        return bool(self._pending) or any(pools[home].slots.total for home, _ in self._ddr())

    def _ddr(self) -> Iterator[tuple[Place, Place]]:
        """Places of DDR that there are, with those of their staged copies."""
        return ((home, stage) for home, stage in STAGED.items() if home in self.cache.pools)

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
        for place in self.cache.pools:
            self._drop(place, pairs)
        self.cache.place.values[pairs.group, pairs.token] = Place.LOST

    def _bring(self, pairs: GroupTokenPairs, target: Place) -> None:
        """Move tokens from wherever they are to `target`."""
        for source in self.cache.pools:
            part = GroupTokenPairs.none()
            if source is not target and not source.staged:
                part = self._held_at(source, pairs)
            if len(part) and target.on_host and not source.on_host:
                # They are read where they are until the copy has ended.
                self._pending.append(self._send(part, source, target))
            elif len(part):
                self._copy(part, source, target)

    def _copy(self, pairs: GroupTokenPairs, source: Place, target: Place) -> None:
        """At once: on the device, up from DDR, or from one format to the other in DDR."""
        cache = self.cache
        if target.on_host:
            self._arrived(self._send(pairs, source, target))
        else:
            parts = self._parts(pairs, source)
            joined = GroupTokenPairs.joined([some for _, some in parts])
            cache.pools[target].take(joined.group, joined.token)
            for place, some in parts:
                self._put(target, self._contents(some, place, target))
        self._drop(source, pairs)
        if not source.on_host:
            cache.place.values[pairs.group, pairs.token] = target
            return
        if not target.on_host:
            self._drop(STAGED[source], pairs)
        cache.place.values[pairs.group, pairs.token] = target
        if target.on_host and self._stages:  # requantised in DDR
            self._unstage(self._held_at(STAGED[source], pairs), target, STAGED[source])
            self._stage(pairs.where(self._needed()[pairs.group, pairs.token]), target)
            self._settle_for(GroupTokenPairs.none())

    def _parts(self, pairs: GroupTokenPairs, source: Place) -> list[tuple[Place, GroupTokenPairs]]:
        """Where tokens are read, group by group; what is staged need not cross the link."""
        if not source.on_host:
            return [(source, pairs.grouped())]
        stage = STAGED[source]
        staged = self.cache.pools[stage].slots.of[pairs.group, pairs.token] >= 0
        away = self._by_row(pairs.where(~staged), source)
        return [(stage, pairs.where(staged).grouped()), (source, away)]

    def _contents(
        self, pairs: GroupTokenPairs, place: Place, target: Place
    ) -> Iterator[GroupContent]:
        """Contents of tokens of one of the `_parts`, in the format of `target`, in portions."""
        most = self._portion(target)
        if place.on_host:
            found = self._fetched(pairs, place, most)
        else:
            found = self._held(pairs, place, most)
        for group, token, read in found:
            yield group, token, partial(self._converted, read, place, target)

    def _portion(self, target: Place) -> int:
        """Tokens of a group that are read at a time, so that a move of many needs no more room."""
        pools = self.cache.pools
        codec, together = pools[target].codec, 1
        if isinstance(codec, Packed):
            together = codec.scale_tokens
        return portion_tokens(pools[Place.HBM].bytes_per_slot, together)

    def _held(self, pairs: GroupTokenPairs, place: Place, most: int) -> Iterator[GroupContent]:
        pool = self.cache.pools[place]
        for group, at in pairs.portions(most):
            token = pairs.token[at]
            yield group, token, partial(pool.read, group, pool.slots.of[group, token])

    def _fetched(self, pairs: GroupTokenPairs, home: Place, most: int) -> Iterator[GroupContent]:
        """Tokens that come up from DDR; the device waits for them."""
        if len(pairs):
            copy = self._order_up(pairs, home)
            copy.ticket.order(self.held_up)
            yield from copy.contents(self._host_pool(home), most)

    def _converted(
        self, read: Callable[[], StoredTokens], source: Place, target: Place
    ) -> StoredTokens:
        block = read()
        if source.rung == target.rung:
            return block
        pools, dtype = self.cache.pools, self.cache.layout.dtype
        exact = pools[source].codec.decode(block.data, block.scale, dtype)
        return StoredTokens(*pools[target].codec.encode(exact))

    # -- across the link -----------------------------------------------------------------------

    def _host_pool(self, place: Place) -> HostPool:
        pool = self.cache.pools[place]
        assert isinstance(pool, HostPool)
        return pool

    def _send(self, pairs: GroupTokenPairs, source: Place, target: Place) -> PendingCopy:
        """Give tokens rows in DDR, gather them on the device and order the copy."""
        cache, pool = self.cache, self._host_pool(target)
        parts = self._parts(pairs, source)
        pairs = GroupTokenPairs.joined([some for _, some in parts])
        pool.take(pairs.group, pairs.token)
        blocks = pool.blocks(pairs.group, pairs.token)
        buffers = pool.buffers(blocks.rows, cache.layout.device)
        first = 0
        for place, some in parts:
            if place.rung == target.rung:  # as it is: straight into the buffers
                own = cache.pools[place]
                for group, at in some.portions(len(some)):
                    rows = pool.rows_in(buffers, blocks.at[:, first + at.start : first + at.stop])
                    own.read_rows(group, own.slots.of[group, some.token[at]], rows)
                first += len(some)
                continue
            for _, token, read in self._contents(some, place, target):
                pool.fill(pool.rows_in(buffers, blocks.at[:, first : first + len(token)]), read())
                first += len(token)
        down = [(buffer, host) for host, buffer in pool.pairs(blocks, buffers)]
        pool.arriving.append(blocks)
        copy = PendingCopy(target, pairs, blocks, buffers, self.link.down_blocks(down))
        if cache.host_attention is not None:
            contents = copy.contents(pool, self._portion(target))
            cache.host_attention.enter(target, pairs, contents)
        return copy

    def _by_row(self, pairs: GroupTokenPairs, home: Place) -> GroupTokenPairs:
        """Group by group, in the order in which their rows lie in DDR."""
        row = self.cache.pools[home].slots.of[pairs.group, pairs.token]
        return pairs.where(np.lexsort((row, pairs.group)))

    def _order_up(self, pairs: GroupTokenPairs, home: Place) -> PendingCopy:
        """Order the copy of tokens in DDR to buffers on the device."""
        pool = self._host_pool(home)
        pairs = self._by_row(pairs, home)
        blocks = pool.blocks(pairs.group, pairs.token, join=True)
        buffers = pool.buffers(blocks.rows, self.cache.layout.device)
        ticket = self.link.up_blocks(pool.pairs(blocks, buffers))
        return PendingCopy(home, pairs, blocks, buffers, ticket)

    def _stage(self, pairs: GroupTokenPairs, home: Place) -> None:
        """Start to fetch tokens from DDR into staging."""
        if len(pairs):
            copy = self._order_up(pairs, home)
            copy.to_stage = True
            self._pending.append(copy)
            self.on_peak()

    def _unstage(self, pairs: GroupTokenPairs, home: Place, stage: Place) -> None:
        if len(pairs):
            self.cache.pools[stage].give_back(pairs.group, pairs.token)
            self.cache.place.values[pairs.group, pairs.token] = home

    def _land(self, copy: PendingCopy) -> None:
        cache, home = self.cache, copy.target
        if copy.to_stage:
            stage = STAGED[home]
            cache.pools[stage].take(copy.pairs.group, copy.pairs.token)
            self._put(stage, copy.contents(self._host_pool(home), self._portion(stage)))
            self._leave_device(copy.pairs, stage)
            cache.changed()
            return
        pairs = self._held_at(home, copy.pairs)  # but for nodes that were dropped meanwhile
        needed = self._needed()[pairs.group, pairs.token] & (self.recall == "stage")
        self._leave_device(pairs.where(~needed), home)
        cache.changed()
        self._stage(pairs.where(needed), home)

    def _leave_device(self, pairs: GroupTokenPairs, place: Place) -> None:
        """Give up the copies in HBM of tokens that attention finds at `place` from now on."""
        for other in _ON_DEVICE:
            self._drop(other, pairs)
        self.cache.place.values[pairs.group, pairs.token] = place

    def _put(self, place: Place, contents: Iterator[GroupContent]) -> None:
        """Write what tokens hold into the slots that they have been given."""
        pool = self.cache.pools[place]
        for group, token, read in contents:
            pool.write(group, pool.slots.of[group, token], read())

    def _held_at(self, place: Place, pairs: GroupTokenPairs) -> GroupTokenPairs:
        """Those of the pairs that the pool of a place holds."""
        pool = self.cache.pools.get(place)
        if pool is None:
            return GroupTokenPairs.none()
        return pairs.where(pool.slots.of[pairs.group, pairs.token] >= 0)

    def _drop(self, place: Place, pairs: GroupTokenPairs) -> None:
        held = self._held_at(place, pairs)
        if len(held):
            self.cache.pools[place].give_back(held.group, held.token)
