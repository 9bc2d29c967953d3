"""Memory of the engine: levels over time, shared prefixes in HBM, and the host's DDR and NVMe."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from arborsim.serving.world import World


class Level:
    """A number of bytes over time.

    Attributes
    ----------
    value, peak : int
    entered, left : int
        All that was ever added and taken.
    """

    def __init__(self, world: World) -> None:
        self.value = 0
        self.peak = 0
        self.entered = 0
        self.left = 0
        self._world = world
        self._since = 0.0
        self._byte_s = 0.0

    def add(self, delta: int) -> None:
        if not delta:
            return
        now = self._world.now
        self._byte_s += self.value * (now - self._since)
        self._since = now
        self.value += delta
        if delta > 0:
            self.entered += delta
            self.peak = max(self.peak, self.value)
        else:
            self.left -= delta

    def byte_s(self) -> float:
        """The integral up to now."""
        return self._byte_s + self.value * (self._world.now - self._since)


@dataclass
class Prefix:
    """The keys and values of a prefix that searches share.

    Attributes
    ----------
    bytes : int
    references : int
        Searches with a place that use it.
    computed : bool
        Whether one of them has computed it.
    """

    bytes: int
    references: int = 0
    computed: bool = False


class Prefixes:
    """Shared prefixes in HBM by key; unused ones stay until their place is needed (LRU)."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, Prefix] = OrderedDict()

    def __getitem__(self, key: str) -> Prefix:
        return self._held[key]

    def __contains__(self, key: str) -> bool:
        return key in self._held

    @property
    def bytes(self) -> int:
        return sum(prefix.bytes for prefix in self._held.values())

    def unused_bytes(self, spared: str = "") -> int:
        """Bytes that could be given up, `spared` aside."""
        return sum(p.bytes for k, p in self._held.items() if not p.references and k != spared)

    def acquire(self, key: str, size_bytes: int) -> int:
        """A search uses the prefix from now on; returns the bytes that enter HBM."""
        new = 0 if key in self._held else size_bytes
        prefix = self._held.setdefault(key, Prefix(size_bytes))
        prefix.references += 1
        self._held.move_to_end(key)
        return new

    def release(self, key: str) -> int:
        """A search no longer uses it; returns the bytes freed at once (it was never computed)."""
        prefix = self._held[key]
        prefix.references -= 1
        self._held.move_to_end(key)
        if prefix.references or prefix.computed:
            return 0
        return self._held.pop(key).bytes

    def evict(self, spared: str = "") -> int:
        """Give up the one unused for longest, `spared` aside; returns its bytes, 0 if none is."""
        for key, prefix in self._held.items():
            if not prefix.references and key != spared:
                return self._held.pop(key).bytes
        return 0


class Host:
    """DDR, and NVMe below it for what DDR cannot hold.

    What lies on NVMe is taken to be spread evenly over all that the host holds: that share of every
    transfer passes the NVMe, too.
    """

    def __init__(self, world: World, ddr_bytes: int, nvme_bytes: int) -> None:
        self.level = Level(world)
        self.ddr_bytes = ddr_bytes
        self.nvme_bytes = nvme_bytes

    @property
    def free_bytes(self) -> int:
        return self.ddr_bytes + self.nvme_bytes - self.level.value

    @property
    def below_share(self) -> float:
        """Share of the bytes held that lies on NVMe."""
        below = self.level.value - self.ddr_bytes
        return below / self.level.value if below > 0 else 0.0
