"""Demands in seconds, as the engine plays them."""

from __future__ import annotations

from dataclasses import dataclass

from arborsim.machine.demand import SearchDemand


@dataclass(frozen=True, slots=True)
class Piece:
    """Decode iterations of one search; a quantity is ``first + i * growth`` in iteration ``i``.

    Attributes
    ----------
    iterations, sequences : int
    flops_s, kv_s, dequantise_s, policy_s : (float, float)
        Seconds at full use of what they are bound by: first and growth.
    hbm_bytes, prefix_bytes : (int, int)
    stream_s : float
        Time that its streamed tokens need on the link per iteration.
    near_s : float
        Time that the CPU attends to its tokens, or that choosing and fetching pages takes, per
        iteration.
    link_s : float
        Time that the link carries `streamed_bytes`.
    streamed_bytes : int
        Fetched per iteration; the link is kept meanwhile.
    eager : int
        1 if it needs attention rows written out.
    """

    iterations: int
    sequences: int
    flops_s: tuple[float, float]
    kv_s: tuple[float, float]
    dequantise_s: tuple[float, float]
    policy_s: tuple[float, float]
    hbm_bytes: tuple[int, int]
    prefix_bytes: tuple[int, int]
    stream_s: float
    near_s: float
    link_s: float
    streamed_bytes: int
    eager: int

    def split(self, iterations: int) -> tuple[Piece, Piece]:
        """The first so many iterations, and the rest."""
        return self._part(0, iterations), self._part(iterations, self.iterations)

    def without_prefix(self) -> Piece:
        """The same with the shared prefix held by somebody else."""
        (held, grows), (prefix, prefix_grows) = self.hbm_bytes, self.prefix_bytes
        return self._but(hbm_bytes=(held - prefix, grows - prefix_grows), prefix_bytes=(0, 0))

    def _part(self, first: int, last: int) -> Piece:
        names = ("flops_s", "kv_s", "dequantise_s", "policy_s", "hbm_bytes", "prefix_bytes")
        moved = {n: (getattr(self, n)[0] + first * getattr(self, n)[1], getattr(self, n)[1])
                 for n in names}  # fmt: skip
        return self._but(iterations=last - first, **moved)

    def _but(self, **changes: object) -> Piece:
        values = {name: getattr(self, name) for name in self.__slots__}
        return Piece(**{**values, **changes})


@dataclass(frozen=True, slots=True)
class Extra:
    """Work that joins one iteration, a part of a prompt: seconds by what bounds them."""

    flops_s: float = 0.0
    kv_s: float = 0.0
    other_s: float = 0.0
    sequences: int = 0
    tokens: int = 0


NOTHING = Extra()


@dataclass(frozen=True)
class Leg:
    """One transfer: its direction and size, and bytes of HBM taken when it begins and ends."""

    up: bool
    bytes: int
    hold_before: int
    hold_after: int


@dataclass(frozen=True)
class PricedDemand:
    """A demand whose phases know their seconds.

    Attributes
    ----------
    source : SearchDemand
    ops : list of (Op, int, int, int)
        As the demand's, with decode phases numbered by `pieces`; a first piece of one iteration.
    seconds : list of float
        Of each phase that the engine spends; 0 for the others.
    pieces : list of Piece
    chains : list of list of Leg
    prefix_tokens, prefix_bytes : int
        What may be shared, 0 without a key.
    """

    source: SearchDemand
    ops: list[tuple[int, int, int, int]]
    seconds: list[float]
    pieces: list[Piece]
    chains: list[list[Leg]]
    prefix_tokens: int
    prefix_bytes: int
