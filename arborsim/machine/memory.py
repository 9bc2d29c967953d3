"""The host's memory: DDR, NVMe below it, and the copies of shared prefixes."""

from __future__ import annotations

from arborsim.machine.clock import Clock, Level
from arborsim.machine.prefixes import Prefix, Shelf


class Host:
    """DDR, and NVMe below it for what DDR cannot hold.

    What lies on NVMe is taken to be spread evenly over all that the host holds: that share of every
    transfer passes the NVMe, too.  Copies of shared prefixes lie in DDR only, and give way whenever
    a search wants their place.

    Parameters
    ----------
    clock : Clock
    ddr_bytes, nvme_bytes : int
    copies_bytes : int
        DDR for copies of prefixes, at most.
    block_tokens : int
        Tokens by which they give way.

    Attributes
    ----------
    level : Level
        All that the host holds.
    copies : Shelf
        The part of it that copies of prefixes take.
    """

    def __init__(
        self,
        clock: Clock,
        ddr_bytes: int,
        nvme_bytes: int,
        copies_bytes: int = 0,
        block_tokens: int = 1,
    ) -> None:
        self.level = Level(clock)
        self.ddr_bytes = ddr_bytes
        self.nvme_bytes = nvme_bytes
        self.copies = Shelf(block_tokens)
        self._copies_bytes = copies_bytes
        self._block = block_tokens

    @property
    def free_bytes(self) -> int:
        """What searches may take; copies of prefixes count as free."""
        return self.ddr_bytes + self.nvme_bytes - self.level.value + self.copies.bytes

    @property
    def below_share(self) -> float:
        """Share of the bytes held that lies on NVMe."""
        below = self.level.value - self.ddr_bytes
        return below / self.level.value if below > 0 else 0.0

    def add(self, delta: int) -> None:
        """What searches hold changes; copies of prefixes make room for it in DDR."""
        over = self.level.value + delta - self.ddr_bytes
        if delta > 0 and over > 0 and self.copies.bytes:
            self.level.add(-self.copies.evict(over))
        self.level.add(delta)

    def copied_tokens(self, key: str) -> int:
        """How much of a prefix can be read from DDR."""
        return self.copies[key].filled if key in self.copies else 0

    def begin_copy(self, key: str, prefix: Prefix) -> int:
        """Take DDR for what of a prefix in HBM has no copy yet; returns the bytes to be copied.

        Older copies give way to it; of one that does not fit even so, as many blocks as do.
        """
        if not self._copies_bytes:
            return 0
        self.copies.touch(key)
        tokens, size = prefix.filled, prefix.bytes_of(prefix.filled)
        lacking = self.copies.missing_bytes(key, tokens, size)
        if not lacking:
            return 0
        if lacking > self._room():
            self.level.add(-self.copies.evict(lacking - self._room(), key))
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
