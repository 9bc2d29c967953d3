"""Programs in seconds, as the server plays them."""

from __future__ import annotations

from dataclasses import dataclass

import simpy

from arborsim.machine.program import DemandInfo, Leg, SearchDemand


@dataclass(frozen=True, slots=True)
class Piece:
    """Decode iterations of one search; a quantity is ``first + i * growth`` in iteration ``i``.

    Attributes
    ----------
    iterations, sequences : int
    compute_s, kv_s, dequantise_s, serial_s, policy_s : (float, float)
        Seconds by lane: first and growth.
    hbm_bytes, prefix_bytes : (int, int)
    stream_s : float
        Time that its streamed tokens need on the link per iteration.
    near_s : float
        Time that the CPU attends to its tokens, or that choosing and fetching pages takes, per
        iteration, and the part of the GPU's attention that cannot go on meanwhile.
    link_s : float
        Time that the link carries `streamed_bytes`.
    side_s : float
        What streaming, attention on the CPU, or fetching takes per iteration, hidden or not.
    streamed_bytes : int
        Fetched per iteration; the link is kept meanwhile.
    down_bytes, up_bytes : int
        Messages to and from the host per iteration, besides what is streamed.
    buffer_bytes : int
        The part of `hbm_bytes` that is buffers of what is streamed.
    eager : int
        1 if it needs attention rows written out.
    """

    iterations: int
    sequences: int
    compute_s: tuple[float, float]
    kv_s: tuple[float, float]
    dequantise_s: tuple[float, float]
    serial_s: tuple[float, float]
    policy_s: tuple[float, float]
    hbm_bytes: tuple[int, int]
    prefix_bytes: tuple[int, int]
    stream_s: float
    near_s: float
    link_s: float
    side_s: float
    streamed_bytes: int
    down_bytes: int
    up_bytes: int
    buffer_bytes: int
    eager: int

    def split(self, iterations: int) -> tuple[Piece, Piece]:
        """The first `iterations`, and the rest."""
        return self._part(0, iterations), self._part(iterations, self.iterations)

    def without_prefix(self) -> Piece:
        """The same with the shared prefix held elsewhere."""
        (held, grows), (prefix, prefix_grows) = self.hbm_bytes, self.prefix_bytes
        return self._but(hbm_bytes=(held - prefix, grows - prefix_grows), prefix_bytes=(0, 0))

    def _part(self, first: int, last: int) -> Piece:
        pairs = {n: v for n in self.__slots__ if isinstance(v := getattr(self, n), tuple)}
        moved = {name: (v[0] + first * v[1], v[1]) for name, v in pairs.items()}
        return self._but(iterations=last - first, **moved)

    def _but(self, **changes: object) -> Piece:
        values = {name: getattr(self, name) for name in self.__slots__}
        return Piece(**{**values, **changes})


@dataclass(frozen=True, slots=True)
class Extra:
    """Work that joins one iteration, a part of a prompt: seconds by lane."""

    compute_s: float = 0.0
    kv_s: float = 0.0
    serial_s: float = 0.0
    policy_s: float = 0.0
    sequences: int = 0
    tokens: int = 0


NOTHING = Extra()


@dataclass
class PricedProgram:
    """A program whose phases know their seconds.

    Attributes
    ----------
    source : SearchDemand or None
        None while it is being written.
    info : DemandInfo
    ops : list of (Op, int, int, int)
        As the demand's, with decode phases numbered by `pieces`; a first piece of one iteration.
    seconds : list of float
        Of each phase that the server spends; 0 for the others.
    pieces : list of Piece
    chains : list of list of Leg
    prefix_tokens, prefix_bytes : int
        What may be shared, 0 without a key.
    """

    source: SearchDemand | None
    info: DemandInfo
    ops: list[tuple[int, int, int, int]]
    seconds: list[float]
    pieces: list[Piece]
    chains: list[list[Leg]]
    prefix_tokens: int = 0
    prefix_bytes: int = 0
    open = False

    @property
    def demand(self) -> SearchDemand:
        assert self.source is not None
        return self.source

    @property
    def peak_ddr_bytes(self) -> int:
        """0 while it is being written."""
        return self.source.peak_ddr_bytes if self.source else 0

    def leg_ended(self, chain: int, leg: int) -> None:
        """A transfer has ended: an open program may say what follows it."""

    def starve(self) -> simpy.Event:
        """What the server waits for when it has played all of an open program."""
        raise NotImplementedError
