"""What a replay hands to tables and reports: plain records, no behaviour.

Executors fill in `Measurements`; a replay labels them with trace, episode, policy and budget.
Everything that is shown is derived from these records by the pure functions of this package.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from arborsim.core.measurements import Measurements
from arborsim.run.token_map import TokenMap

if TYPE_CHECKING:
    from arborsim.machine.terms import Term


@dataclass(frozen=True)
class EpisodeResult:
    """One search under one policy and budget.

    Attributes
    ----------
    trace : str
        Name of the trace file.
    episode : int
    policy : str
    budget : str
        As the user gave it: tokens (``"2048"``) or a share (``"0.25"``).
    budget_tokens : int
        What that came to for this search.
    measured : Measurements
    attention_kept : float
        Share of the recorded attention that fell on readable tokens; NaN if unknown.
    kv_bytes_per_token : int
        Keys and values of one token over all layers; 0 if unknown.  Draws the budget in bytes.
    output_error : float
        Relative error of the attention output on the captured layers; NaN if unknown.
    bounded : bool
        Whether the policy keeps the cache within the budget after every decision.
    terms : tuple of Term
        What the time consists of; empty unless it was to be explained.
    """

    trace: str
    episode: int
    policy: str
    budget: str
    budget_tokens: int
    measured: Measurements
    attention_kept: float
    kv_bytes_per_token: int = 0
    output_error: float = math.nan
    bounded: bool = True
    terms: tuple[Term, ...] = ()


@dataclass(frozen=True)
class LeftOut:
    """A policy that a trace cannot serve, under one budget or under any.

    Attributes
    ----------
    trace, policy : str
    budget : str
        Empty if no budget would do.
    remedy : str
        Options of ``arborsim record`` that supply what the trace lacks; empty if that is not the
        reason, but a budget that is too small.
    unrecorded : str
        Why no recording supplies it (`TraceInfo.unrecorded`); empty if one does.
    least : str
        The least budget that could do, as far as is known; empty if there is none.
    detail : str
        The whole story in one line.
    instead : str
        Setting under which the trace serves the policy after all, e.g. ``"per=shared"``.
    unsuited : bool
        The policy has no meaning on the model whose bytes are charged.
    """

    trace: str
    policy: str
    budget: str = ""
    remedy: str = ""
    least: str = ""
    detail: str = ""
    instead: str = ""
    unsuited: bool = False
    unrecorded: str = ""


@dataclass(frozen=True)
class NodeRecord:
    """A thought block as it was at the end of the search.

    Attributes
    ----------
    parent, depth : int
        Index of the parent (-1 for the root) and distance from the root.
    tokens : int
    reward : float
        NaN if the search gave none.
    pruned, closed : bool
    """

    parent: int
    depth: int
    tokens: int
    reward: float
    pruned: bool
    closed: bool


@dataclass(frozen=True, eq=False)
class Frame:
    """A moment of the search.

    Attributes
    ----------
    time_s : float
    label : str
        What happened, e.g. ``"block 7 complete"``.
    active : tuple of int
        Leaves that decode next.
    tokens_by_tier : integer array ``[nodes, 5]``
        Columns in the order of `arborsim.core.tiers.Tier`; zero rows for nodes not opened yet.
    """

    time_s: float
    label: str
    active: tuple[int, ...]
    tokens_by_tier: np.ndarray


@dataclass(frozen=True, eq=False)
class TreePicture:
    """One search as a film: its tree, and where the tree's KV lived at some moments."""

    policy: str
    budget: str
    trace: str
    episode: int
    nodes: tuple[NodeRecord, ...]
    frames: tuple[Frame, ...]


@dataclass(frozen=True, eq=False)
class ReplayResult:
    """All results of a replay, and what they rest on.

    Attributes
    ----------
    episodes : tuple of EpisodeResult
    pictures : tuple of TreePicture
    settings : dict
        GPU, model geometry, recall mode, page size, traces with their sha256, versions, seeds.
    assumed : tuple of str
        Numbers of the hardware profile that nobody measured.
    left_out : tuple of LeftOut
    token_maps : tuple of TokenMap
    notes : tuple of str
        Cautions about single policies on these traces.
    does_not_fit : tuple of str
        What needs more memory than the machine has, and how much more.
    """

    episodes: tuple[EpisodeResult, ...]
    pictures: tuple[TreePicture, ...]
    settings: dict[str, str]
    assumed: tuple[str, ...]
    left_out: tuple[LeftOut, ...] = ()
    token_maps: tuple[TokenMap, ...] = ()
    notes: tuple[str, ...] = ()
    does_not_fit: tuple[str, ...] = ()
