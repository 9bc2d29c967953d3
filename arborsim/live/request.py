"""What a live run is asked for, and what it reports: plain records, no framework."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from arborsim.core.measurements import Measurements
from arborsim.live.backends import LayerChoice, SearchRequest
from arborsim.machine.machine import Machine
from arborsim.run.episode import Cell


@dataclass(frozen=True, kw_only=True)
class LiveRequest(SearchRequest):
    """Searches on a live model, each under every cell.

    Attributes
    ----------
    cells : tuple of Cell
        A share of a budget is of the tokens that the same search has under full retention, which
        is run first.
    recall : {"stage", "stream", "near", "ondemand"}
        How tokens in DDR take part in attention.
    overlap : bool
        False waits for every copy at once.
    page_tokens : int
        Slots by which pools grow and shrink.
    attention_top : int
        Positions kept per attention row that policies see; 0 keeps rows whole.
    batch : int
        Searches whose iterations are computed together, each on a cache of its own: more tokens
        per second, but the times of one search are then those of all.
    shadow : bool
        Policies decide, nothing is removed: one search serves all cells, each with a simulated
        machine of its own.
    machine : Machine or None
        The simulated machine of a shadow run.
    trace : Path or None
        A shadow run also records this trace.
    qkv_layers : tuple of int or "all"
        Captured layers of a shadow run; plans per layer or head are about these.  Otherwise all
        layers are captured.
    """

    cells: tuple[Cell, ...]
    recall: str = "stage"
    overlap: bool = True
    page_tokens: int = 16
    attention_top: int = 0
    batch: int = 1
    shadow: bool = False
    machine: Machine | None = None
    trace: Path | None = None
    qkv_layers: LayerChoice = "all"
    command: str = ""


@dataclass(frozen=True)
class LiveResult:
    """One search under one cell.

    Attributes
    ----------
    episode : int
        Number of the problem.
    policy, budget : str
    budget_tokens : int
    correct : bool or None
        None if it was not judged, or if the budget is infeasible.
    tokens : int
        Generated, on all branches together.
    full_tokens : int
        Tokens of the same search under full retention, prompt included; 0 if unknown.
    wall_s : float
    measured : Measurements
        Of the live machine; of the simulated one in a shadow run.
    allocated_bytes : int
        Largest size of the pools' tensors on the device, gaps included.
    device_peak_bytes : int
        Largest memory of the framework's allocator on the device, weights included; 0 on the CPU.
    infeasible : str
        Why the budget cannot hold the search; empty if it could.
    """

    episode: int
    policy: str
    budget: str
    budget_tokens: int
    correct: bool | None
    tokens: int
    full_tokens: int
    wall_s: float
    measured: Measurements = field(default_factory=Measurements)
    allocated_bytes: int = 0
    device_peak_bytes: int = 0
    infeasible: str = ""


@dataclass(frozen=True)
class LiveFacts:
    """What the numbers were made with.

    Attributes
    ----------
    model, task : str
    device : str
        The device's name.
    dtype : str
    weight_bytes, kv_bytes_per_token : int
    random_weights : bool
        The answers mean nothing then.
    software : dict of str to str
        Versions.
    """

    model: str
    task: str
    device: str
    dtype: str
    weight_bytes: int
    kv_bytes_per_token: int
    random_weights: bool
    software: dict[str, str]


class LiveObserver(Protocol):
    """Hears of a live run while it goes on; an exception raised here ends it."""

    def began(self, facts: LiveFacts, episodes: int) -> None:
        """The model is loaded; `episodes` problems will be searched."""

    def wants(self, episode: int, cell: Cell) -> bool:
        """Whether this result is still missing (a resumed run has some)."""

    def full_tokens(self, episode: int) -> int:
        """What an earlier run found for `LiveResult.full_tokens`; 0 if nothing."""

    def running(self, episode: int, what: str, tokens: int) -> None:
        """`tokens` more have been generated."""

    def finished(self, result: LiveResult) -> None:
        """A search is complete."""


class ValidationObserver(Protocol):
    """Hears of a validation while it goes on; an exception raised here ends it."""

    def began(self, facts: LiveFacts, episodes: int) -> None:
        """The model is loaded; `episodes` problems will be searched."""

    def wants(self, episode: int) -> bool:
        """Whether this problem is still missing (a resumed run has some)."""

    def running(self, episode: int, what: str, tokens: int) -> None:
        """`tokens` more have been generated."""

    def checked(self, checks: tuple[Any, ...]) -> None:
        """One problem is complete under all policies and budgets: as `CellCheck`s."""
