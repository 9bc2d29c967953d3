"""The course of a run on one machine, as records that figures are drawn from.

Seconds and bytes, as in `arborsim.plan.results`.
"""

from __future__ import annotations

from dataclasses import dataclass

from arborsim.machine.tally import ServingSeries


@dataclass(frozen=True)
class Slice:
    """Something that the machine did, or a search went through.

    Attributes
    ----------
    start_s, end_s : float
    kind : str
        waiting, prefill, recompute, policy, decode (a search takes part in iterations), swap (a
        search has lost its place), down, up (PCIe).
    search : int
        Number in order of arrival; -1 for what concerns the whole batch.
    amount : int
        Tokens or bytes; sequences for decode.
    """

    start_s: float
    end_s: float
    kind: str
    search: int
    amount: int = 0


@dataclass(frozen=True)
class Timeline:
    """The course of one run on one machine.

    Attributes
    ----------
    candidate : int
    load : float
    seed : int
    until_s : float
        What comes later is left out.
    slices : tuple of Slice
        By start.
    series : ServingSeries
        Memory and batch over the whole run.
    """

    candidate: int
    load: float
    seed: int
    until_s: float
    slices: tuple[Slice, ...]
    series: ServingSeries
