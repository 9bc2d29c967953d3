"""Prefixes that searches share, by key: where they lie, and which tokens go first.

A prefix is a chain: of what one memory holds, a head of any length can be read, so tokens are given
up from the end, whole blocks at a time.  Among prefixes the one unused for longest gives way first,
and keeps giving way until nothing of it is left.  vLLM does the same: a request that ends appends
its blocks to the queue of free ones from the last to the first, and the queue is taken from its
front.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from arborsim.machine.memory import Host
    from arborsim.machine.search import Search


@dataclass(eq=False)
class Load:
    """A copy from DDR to HBM under way.

    Attributes
    ----------
    tokens : int
        How much of the prefix is in HBM once it has ended.
    waiting : list of Search
    """

    tokens: int
    waiting: list[Search] = field(default_factory=list)


@dataclass(eq=False)
class Prefix:
    """The keys and values of a prefix in one memory.

    Attributes
    ----------
    tokens, bytes : int
        Of the longest prefix that a search of this key has; every token takes an equal part.
    held : int
        Tokens, from the first on, that memory is taken for.
    filled : int
        Of those, how many can be read.
    references : int
        Searches with a place that use it.
    load : Load or None
        What is being copied into it from DDR.
    writes : int
        Copies into it from HBM that have not ended.
    """

    tokens: int
    bytes: int
    held: int = 0
    filled: int = 0
    references: int = 0
    load: Load | None = None
    writes: int = 0

    def bytes_of(self, tokens: int) -> int:
        """What so many tokens, from the first on, take."""
        return self.bytes * tokens // self.tokens

    @property
    def held_bytes(self) -> int:
        return self.bytes_of(self.held)

    def within(self, size_bytes: int) -> int:
        """The most tokens that take no more than `size_bytes`."""
        if not self.bytes:
            return self.tokens
        return min(self.tokens, ((size_bytes + 1) * self.tokens - 1) // self.bytes)


class Shelf:
    """Prefixes in one memory, the one unused for longest first.

    Parameters
    ----------
    block_tokens : int
        How many tokens are given up at a time.

    Attributes
    ----------
    bytes : int
        Taken by all.
    """

    def __init__(self, block_tokens: int) -> None:
        self.bytes = 0
        self._block = block_tokens
        self._prefixes: OrderedDict[str, Prefix] = OrderedDict()

    def __getitem__(self, key: str) -> Prefix:
        return self._prefixes[key]

    def __contains__(self, key: str) -> bool:
        return key in self._prefixes

    def values(self) -> list[Prefix]:
        return list(self._prefixes.values())

    def missing_bytes(self, key: str, tokens: int, size_bytes: int) -> int:
        """What `tokens`, which take `size_bytes`, need beyond what is held."""
        prefix = self._prefixes.get(key)
        if prefix is None:
            return size_bytes
        if tokens > prefix.tokens:
            return max(0, size_bytes - prefix.held_bytes)
        return max(0, prefix.bytes_of(tokens) - prefix.held_bytes)

    def grow(self, key: str, tokens: int, size_bytes: int) -> int:
        """Take memory for the first `tokens`, which take `size_bytes`; returns the bytes taken."""
        delta = self.missing_bytes(key, tokens, size_bytes)
        prefix = self._prefixes.setdefault(key, Prefix(tokens, size_bytes))
        if tokens > prefix.tokens:
            prefix.bytes = prefix.held_bytes + delta
            prefix.tokens = tokens
        prefix.held = max(prefix.held, tokens)
        self.bytes += delta
        return delta

    def shrink(self, key: str, tokens: int) -> int:
        """Keep no more than the first `tokens`; returns the bytes given up."""
        prefix = self._prefixes[key]
        before = prefix.held_bytes
        prefix.held = min(prefix.held, tokens)
        prefix.filled = min(prefix.filled, tokens)
        if not prefix.held:
            del self._prefixes[key]
        freed = before - prefix.held_bytes
        self.bytes -= freed
        return freed

    def touch(self, key: str) -> None:
        """It has been used."""
        if key in self._prefixes:
            self._prefixes.move_to_end(key)

    def unused_bytes(self, spared: str = "") -> int:
        """Bytes that could be given up, `spared` aside."""
        return sum(prefix.held_bytes for _, prefix in self._unused(spared))

    def evict(self, need: int, spared: str = "") -> int:
        """Give up `need` bytes, or all that nobody uses; returns the bytes freed."""
        freed = 0
        for key, prefix in self._unused(spared):
            if freed >= need:
                break
            kept = prefix.within(prefix.held_bytes - (need - freed))
            freed += self.cut(key, max(0, kept // self._block * self._block))
        return freed

    def cut(self, key: str, tokens: int) -> int:
        """Give up what lies behind the first `tokens`; returns the bytes freed."""
        return self.shrink(key, tokens)

    def _unused(self, spared: str) -> list[tuple[str, Prefix]]:
        return [
            (key, prefix)
            for key, prefix in self._prefixes.items()
            if not prefix.references and key != spared and prefix.held_bytes
        ]


class Prefixes(Shelf):
    """Shared prefixes in HBM.

    Parameters
    ----------
    block_tokens : int
    host : Host
        Where their copies are.
    """

    def __init__(self, block_tokens: int, host: Host) -> None:
        super().__init__(block_tokens)
        self._host = host

    def acquire(self, key: str, tokens: int, size_bytes: int) -> int:
        """A search uses the first `tokens` from now on; returns the bytes that enter HBM."""
        entered = self.grow(key, tokens, size_bytes)
        self[key].references += 1
        return entered

    def release(self, key: str) -> int:
        """A search no longer uses it; returns the bytes freed at once (they were never filled)."""
        prefix = self[key]
        prefix.references -= 1
        self.touch(key)
        if prefix.references:
            return 0
        prefix.load = None  # what it still carries has no place any more
        return self.shrink(key, prefix.filled)

    def cut(self, key: str, tokens: int) -> int:
        """As `Shelf.cut`; what is still being copied to DDR cannot be, any more."""
        self._host.interrupt_copy(key, tokens)
        return super().cut(key, tokens)
