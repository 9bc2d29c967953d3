"""What a recorder keeps of a search while it runs, whom it tells, and what it hands back."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from torch import Tensor

from arborsim_torch.decoder import TreeDecoder

_Result = TypeVar("_Result")
Iterations = Generator[list[int], Tensor, _Result]  # tokens of the leaves, their logits


class Listener(Protocol):
    """Hears of everything that happens in a search, as it happens."""

    def began(self, decoder: TreeDecoder) -> None:
        """A search begins on this decoder."""

    def prompt(self, tokens: Sequence[int]) -> None:
        """The prompt has been computed."""

    def iteration(self, leaves: Sequence[int], tokens: Sequence[int]) -> None:
        """Each leaf, in batch order, has computed one token."""

    def turned(self, leaves: tuple[int, ...], parents: tuple[int, ...]) -> None:
        """The search goes on with these leaves, in order of number."""

    def closed(self, node: int, reward: float, entropy: float) -> None:
        """A thought is complete."""

    def pruned(self, node: int) -> None:
        """The search will not come back to a node."""

    def answered(self, correct: bool | None) -> None:
        """The search is over."""


@dataclass
class LiveNode:
    """A node while its search runs.

    Attributes
    ----------
    generated : list of int
        All tokens after the prompt, this node's included.
    tokens : int
        The node's own.
    logits : Tensor or None
        After its last token, to draw its children's first tokens from.
    value : float or None
        What the model itself said of the state.
    reward : float
        What it was rewarded with once complete; NaN if nothing rewards it.
    answer : str or None
        What it answers, if it is finished and its source can read that.
    twin : int
        The first complete sibling that says the same, or the node itself.
    correct : bool or None
        Verdict on the answer of a finished thought.
    held : bool
        Whether its keys and values are there.
    """

    parent: int
    generated: list[int]
    tokens: int = 0
    logprob: float = 0.0
    visits: int = 0
    score: float = math.nan
    finished: bool = False
    dead: bool = False
    value: float | None = None
    reward: float = math.nan
    logits: Tensor | None = None
    embedding: np.ndarray | None = None
    answer: str | None = None
    twin: int = -1
    correct: bool | None = None
    held: bool = True


def path_ends(nodes: Sequence[LiveNode], n: int) -> tuple[int, ...]:
    """Generated tokens on the path of node `n` after each of its thoughts, the first one first."""
    ends = []
    while nodes[n].parent >= 0:
        ends.append(len(nodes[n].generated))
        n = nodes[n].parent
    return tuple(reversed(ends))


@dataclass
class EpisodeResult:
    """What `EpisodeRecorder.run` hands back; times in seconds.

    `decode_s` is all that came after the prompt, `forward_s` the part of it that decode iterations
    took in the model and in drawing tokens.
    """

    columns: dict[str, Any]
    correct: bool | None
    tokens: int
    thoughts: int
    prompt_tokens: int
    iterations: int
    prefill_s: float
    decode_s: float
    forward_s: float
