"""One search while it is served, and what a run of the engine reports."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from arborsim.machine.priced import Piece, PricedProgram


@dataclass
class Restore:
    """What a search that lost its place must do before it goes on.

    Attributes
    ----------
    swapped_bytes : int
        To be copied back from the host.
    tokens : int
        To be computed again.
    ddr_bytes : int
        To be copied to DDR again once computed.
    """

    swapped_bytes: int = 0
    tokens: int = 0
    ddr_bytes: int = 0


@dataclass(eq=False)
class Search:
    """State of one search in the engine.

    Attributes
    ----------
    key : int
        In order of arrival.
    demand : int
        Which of the demands it is.
    at : int
        Its current phase.
    offset : int
        Iterations done of the piece that it left, when it lost its place.
    base_bytes, extra_bytes : int
        HBM in pages and beside them, its own.
    staging_bytes : int
        The part of `extra_bytes` that is buffers of recalled tokens; the rest is in flight.
    buffer_bytes : int
        The part of `base_bytes` that is buffers of what its iterations stream.
    ddr_bytes : int
    wanted_bytes, wanted_ddr_bytes : int
        What it lacked when it gave up its own place.
    ticket : int
        In order of admission; -1 while it has no place.
    epoch : int
        How often it has lost its place.
    swapping : int
        The epoch in which its copy on the host was last sent for.
    prompt_left : int
        Tokens of its prompt still to be computed, where that is done in parts.
    prefix_found : int
        Tokens of its shared prefix that were in HBM when it first looked for them in its place;
        -1 before, and -2 once what became of the prefix has been counted.
    parked : bool
        Waits for a transfer.
    legs_begun, legs_ended : dict of int to int
        Transfers of each of its chains.
    outstanding : int
        Chains that have not ended.
    """

    key: int
    demand: int
    priced: PricedProgram
    arrival_s: float
    at: int = 0
    offset: int = 0
    base_bytes: int = 0
    extra_bytes: int = 0
    staging_bytes: int = 0
    buffer_bytes: int = 0
    ddr_bytes: int = 0
    wanted_bytes: int = 0
    wanted_ddr_bytes: int = 0
    ticket: int = -1
    epoch: int = 0
    swapping: int = -1
    prompt_left: int = -1
    prefilled: bool = False
    parked: bool = False
    ended: bool = False
    holds_prefix: bool = False
    prefix_found: int = -1
    restore: Restore | None = None
    legs_begun: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    legs_ended: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    outstanding: int = 0
    admitted_s: float = -1.0
    first_token_s: float = -1.0
    finish_s: float = -1.0
    preemptions: int = 0
    generated: int = 0
    refused: str = ""

    @property
    def resident(self) -> bool:
        return self.ticket >= 0

    @property
    def hbm_bytes(self) -> int:
        return self.base_bytes + self.extra_bytes

    @property
    def piece(self) -> Piece:
        """The piece of its current phase, which is a run of iterations."""
        return self.priced.pieces[self.priced.ops[self.at][1]]

    def tokens_of(self, size_bytes: int) -> int:
        """Tokens whose keys and values take so much, at full precision."""
        return -(-size_bytes // self.priced.info.kv_bytes_per_token)

    def chain_ended(self, chain: int) -> bool:
        return self.legs_ended[chain] == len(self.priced.chains[chain])

    def chain_begun(self, chain: int) -> bool:
        return self.legs_begun[chain] == len(self.priced.chains[chain])


@dataclass(frozen=True)
class SearchOutcome:
    """What became of one search; times in seconds since the run began.

    Attributes
    ----------
    demand : int
        Which of the demands it was.
    arrival_s, admitted_s, first_token_s, finish_s : float
        -1 if that never happened.
    preemptions : int
        How often it lost its place.
    generated_tokens : int
    refused : str
        Why it could never be served; "" if it was.
    """

    demand: int
    arrival_s: float
    admitted_s: float
    first_token_s: float
    finish_s: float
    preemptions: int
    generated_tokens: int
    iterations: int
    refused: str

    @property
    def waiting_s(self) -> float:
        """From arrival to admission."""
        return self.admitted_s - self.arrival_s

    @property
    def latency_s(self) -> float:
        """From arrival to the end."""
        return self.finish_s - self.arrival_s

    @property
    def to_first_token_s(self) -> float:
        return self.first_token_s - self.arrival_s

    @property
    def per_token_s(self) -> float:
        """Mean time of an iteration after the first (each sequence of it decodes one token)."""
        if self.iterations < 2:
            return 0.0
        return (self.finish_s - self.first_token_s) / (self.iterations - 1)
