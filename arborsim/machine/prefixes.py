"""Prefixes that searches share: where they lie, which tokens go first, and what is copied.

A prefix is a chain: of what one memory holds, a head of any length can be read, so tokens are given
up from the end, whole blocks at a time.  The prefix unused for longest is evicted first, until
nothing of it is left, as in vLLM.

Prompts that are known block by block share the beginning that they have in common, whatever its
length: their prefixes are cut where they part (`parts`), as in the radix tree of SGLang, and a
search uses the parts from the root on.  What follows a part is never used later than the part, so
it is given up before it.

A prefix is copied to DDR once it is computed (write-through, as in LMCache and SGLang's HiCache):
giving it up in HBM later waits for nothing, at the price of copies that may never be asked for.
A search that finds less of its prefix in HBM than lies in DDR waits for the copy back, then
computes what is in neither; the others go on meanwhile, and later searches of the same prefix wait
for the same copy.  HiCache computes a layer while it copies the next one: its searches wait less
than these by at most their pass over the prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from arborsim.machine.clock import Callback, Clock, Level
from arborsim.machine.program import Part, PricedProgram


def parts(programs: Sequence[PricedProgram]) -> list[tuple[Part, ...]]:
    """The parts of each search's prefix, from its beginning on; none if it shares nothing.

    Without blocks (`DemandInfo.prefix_blocks`) a prefix is one part.  Blocks of the same ids after
    the same blocks are the same, as far as the shorter one goes.  Those that the same searches have
    are one part.
    """
    paths = _cut([list(_blocks(each)) for each in programs])
    number: dict[tuple[int, object, int], int] = {}  # of a block: behind which, its id, its tokens
    nodes = [
        _numbered(number, each.info.prefix, path)
        for each, path in zip(programs, paths, strict=True)
    ]
    used: dict[int, int] = {}  # by how many searches
    for path in nodes:
        for node in path:
            used[node] = used.get(node, 0) + 1
    return [
        tuple(_joined(each, path, nodes_of, used))
        for each, path, nodes_of in zip(programs, paths, nodes, strict=True)
    ]


def _blocks(program: PricedProgram) -> Iterator[tuple[int, int]]:
    """Id and tokens of each block of a prefix; the last one may be shorter."""
    info, left = program.info, program.prefix_tokens
    for block in info.prefix_blocks:
        tokens = min(info.prefix_block_tokens, left)
        if not tokens:
            return
        left -= tokens
        yield block, tokens


def _cut(paths: list[list[tuple[int, int]]]) -> list[list[tuple[int, int]]]:
    """Blocks in pieces, where another path has less of them: as its last one."""
    sizes: dict[int, set[int]] = {}
    for path in paths:
        for block, tokens in path:
            sizes.setdefault(block, set()).add(tokens)
    parted = {block: sorted(each) for block, each in sizes.items() if len(each) > 1}
    if not parted:
        return paths
    return [
        [
            (block, end - begin)
            for block, tokens in path
            for begin, end in pairwise([0, *parted.get(block, [tokens])])
            if end <= tokens
        ]
        for path in paths
    ]


def _numbered(
    number: dict[tuple[int, object, int], int], key: str, path: Sequence[tuple[int, int]]
) -> list[int]:
    """The number of each block of a path, new ones included."""
    at, found = number.setdefault((-1, key, 0), len(number)), []
    for block, tokens in path:
        at = number.setdefault((at, block, tokens), len(number))
        found.append(at)
    return found


def _joined(
    program: PricedProgram,
    path: Sequence[tuple[int, int]],
    nodes: Sequence[int],
    used: dict[int, int],
) -> Iterator[Part]:
    """Runs of blocks that the same number of searches use: as none can come back, the same ones."""
    tokens, size = program.prefix_tokens, program.prefix_bytes
    if not tokens:
        return
    if not path:
        yield Part(program.info.prefix, tokens, size)
        return
    begin = at = 0
    for i, (_, length) in enumerate(path):
        at += length
        if i + 1 == len(path) or used[nodes[i + 1]] != used[nodes[i]]:
            part_bytes = size * at // tokens - size * begin // tokens
            yield Part(f"{program.info.prefix} block {nodes[i]}", at - begin, part_bytes)
            begin = at


@dataclass(eq=False)
class Load:
    """A copy from DDR to HBM under way."""

    tokens: int  # how much of the prefix is in HBM once it has ended
    waiting: list[Callback] = field(default_factory=list)  # called when it has


@dataclass(eq=False)
class Prefix:
    """The keys and values of a prefix in one memory."""

    tokens: int  # of the longest prefix that a search of this key has ...
    bytes: int  # ... every token of which takes an equal part
    held: int = 0  # tokens, from the first on, that memory is taken for
    filled: int = 0  # of those, how many can be read
    references: int = 0  # searches with a place that use it
    load: Load | None = None  # what is being copied into it from DDR
    writes: int = 0  # copies into it from HBM that have not ended

    def bytes_of(self, tokens: int) -> int:
        """Bytes of the first `tokens`."""
        return self.bytes * tokens // self.tokens

    @property
    def held_bytes(self) -> int:
        return self.bytes_of(self.held)

    def within(self, size_bytes: int) -> int:
        """The most tokens that take no more than `size_bytes`."""
        if not self.bytes:
            return self.tokens
        return min(self.tokens, ((size_bytes + 1) * self.tokens - 1) // self.bytes)


class Shelf(OrderedDict[str, Prefix]):
    """Prefixes in one memory by key, the one unused for longest first.

    They give up `block_tokens` tokens at a time; `bytes` is what all take.
    """

    def __init__(self, block_tokens: int) -> None:
        super().__init__()
        self.bytes = 0
        self._block = block_tokens
        self._unused: OrderedDict[str, Prefix] = OrderedDict()  # in the same order ...
        self._unused_bytes = 0  # ... and what they take

    def move_to_end(self, key: str, last: bool = True) -> None:
        super().move_to_end(key, last)
        if key in self._unused:
            self._unused.move_to_end(key, last)

    def missing_bytes(self, key: str, tokens: int, size_bytes: int) -> int:
        """Bytes that `tokens`, which take `size_bytes`, need beyond those held."""
        prefix = self.get(key)
        if prefix is None:
            return size_bytes
        if tokens > prefix.tokens:
            return max(0, size_bytes - prefix.held_bytes)
        return max(0, prefix.bytes_of(tokens) - prefix.held_bytes)

    def grow(self, key: str, tokens: int, size_bytes: int) -> int:
        """Take memory for the first `tokens`, which take `size_bytes`; returns the bytes taken."""
        delta = self.missing_bytes(key, tokens, size_bytes)
        if key not in self:
            self[key] = self._unused[key] = Prefix(tokens, size_bytes)
        prefix = self[key]
        if tokens > prefix.tokens:
            prefix.bytes = prefix.held_bytes + delta
            prefix.tokens = tokens
        prefix.held = max(prefix.held, tokens)
        self._changed(key, delta)
        return delta

    def shrink(self, key: str, tokens: int) -> int:
        """Keep no more than the first `tokens`; returns the bytes given up."""
        prefix = self[key]
        before = prefix.held_bytes
        prefix.held = min(prefix.held, tokens)
        prefix.filled = min(prefix.filled, tokens)
        freed = before - prefix.held_bytes
        self._changed(key, -freed)
        if not prefix.held:
            del self[key]
            self._unused.pop(key, None)
        return freed

    def unused_bytes(self, spared: Collection[str] = ()) -> int:
        """Bytes that could be given up, `spared` aside."""
        kept = (self._unused[key].held_bytes for key in spared if key in self._unused)
        return self._unused_bytes - sum(kept)

    def evict(self, need: int, spared: Collection[str] = ()) -> int:
        """Give up `need` bytes, or all that is unused; returns the bytes freed."""
        chosen, found = [], 0
        for key, prefix in self._unused.items():
            if found >= need:
                break
            if key not in spared and prefix.held_bytes:
                chosen.append(key)
                found += prefix.held_bytes
        freed = 0
        for key in chosen:
            prefix = self[key]
            kept = prefix.within(prefix.held_bytes - (need - freed))
            freed += self.cut(key, max(0, kept // self._block * self._block))
        return freed

    def cut(self, key: str, tokens: int) -> int:
        """Give up what lies behind the first `tokens`; returns the bytes freed."""
        return self.shrink(key, tokens)

    def _changed(self, key: str, delta: int) -> None:
        self.bytes += delta
        if key in self._unused:
            self._unused_bytes += delta


class Prefixes(Shelf):
    """Shared prefixes in HBM, whose copies are on `host`."""

    def __init__(self, block_tokens: int, host: Host) -> None:
        super().__init__(block_tokens)
        self._host = host

    def acquire(self, key: str, tokens: int, size_bytes: int) -> int:
        """A search uses the first `tokens` from now on; returns the bytes that enter HBM."""
        entered = self.grow(key, tokens, size_bytes)
        self[key].references += 1
        if key in self._unused:
            self._unused_bytes -= self._unused.pop(key).held_bytes
        return entered

    def release(self, key: str) -> int:
        """A search no longer uses it; returns the bytes freed at once (they were never filled)."""
        prefix = self[key]
        prefix.references -= 1
        self.move_to_end(key)
        if prefix.references:
            return 0
        prefix.load = None  # what it still carries has no place any more
        self._unused[key] = prefix
        self._unused_bytes += prefix.held_bytes
        return self.shrink(key, prefix.filled)

    def cut(self, key: str, tokens: int) -> int:
        """As `Shelf.cut`; what is still being copied to DDR cannot be, any more."""
        self._host.interrupt_copy(key, tokens)
        return super().cut(key, tokens)


class Host:
    """DDR, and NVMe below it for what DDR cannot hold.

    What lies on NVMe is taken to be spread evenly over all that the host holds: that share of every
    transfer passes the NVMe, too.  Copies of shared prefixes lie in DDR only, in at most
    `copies_bytes`, and are evicted by `block_tokens` whenever a search needs their room.
    """

    def __init__(
        self, clock: Clock, ddr_bytes: int, nvme_bytes: int, copies_bytes: int, block_tokens: int
    ) -> None:
        self.level = Level(clock)  # all that the host holds
        self.ddr_bytes = ddr_bytes
        self.nvme_bytes = nvme_bytes
        self.copies = Shelf(block_tokens)  # the part of it that copies of prefixes take
        self._copies_bytes = copies_bytes
        self._block = block_tokens

    @property
    def free_bytes(self) -> int:
        """Bytes that searches may take; copies of prefixes count as free."""
        return self.ddr_bytes + self.nvme_bytes - self.level.value + self.copies.bytes

    @property
    def below_share(self) -> float:
        """Share of the bytes held that lies on NVMe."""
        below = self.level.value - self.ddr_bytes
        return below / self.level.value if below > 0 else 0.0

    def add(self, delta: int) -> None:
        """Change what searches hold; copies of prefixes make room for it in DDR."""
        over = self.level.value + delta - self.ddr_bytes
        if delta > 0 and over > 0 and self.copies.bytes:
            self.level.add(-self.copies.evict(over))
        self.level.add(delta)

    def begin_copy(self, key: str, prefix: Prefix, spared: Collection[str]) -> int:
        """Take DDR for what of a prefix in HBM has no copy yet; returns the bytes to be copied.

        Older copies but `spared` ones are evicted for it.  If it still does not fit, as many blocks
        as do are copied.
        """
        if not self._copies_bytes:
            return 0
        if key in self.copies:
            self.copies.move_to_end(key)
        tokens, size = prefix.filled, prefix.bytes_of(prefix.filled)
        lacking = self.copies.missing_bytes(key, tokens, size)
        if not lacking:
            return 0
        if lacking > self._room():
            self.level.add(-self.copies.evict(lacking - self._room(), spared))
        if lacking > self._room():
            held = size - lacking
            tokens = prefix.within(held + self._room()) // self._block * self._block
            size = prefix.bytes_of(tokens)
            if size <= held or self.copies.missing_bytes(key, tokens, size) > self._room():
                return 0
        entered = self.copies.grow(key, tokens, size)
        self.level.add(entered)
        return entered

    def interrupt_copy(self, key: str, tokens: int) -> None:
        """HBM keeps only the first `tokens` of a prefix: what else was being copied is lost."""
        if key in self.copies and self.copies[key].writes:
            kept = max(tokens, self.copies[key].filled)
            self.level.add(-self.copies.shrink(key, kept))

    def _room(self) -> int:
        return min(self._copies_bytes - self.copies.bytes, self.ddr_bytes - self.level.value)
