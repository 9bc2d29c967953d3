"""What a calibration asks of a live model, without importing any framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from arborsim.core.errors import UsageError
from arborsim.live.backends import get_backend

#: Told what is being done, and how much of it: ``(what, done, total)``.
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ModelChoice:
    """A reference model and its problems.

    Attributes
    ----------
    model, task : str
        As for `arborsim record`.
    task_options : mapping
        E.g. ``lines`` of `chain`.
    device : str
    batch : int
        Sequences at a time.
    """

    model: str = "chain"
    task: str = ""
    task_options: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    batch: int = 32


@dataclass(frozen=True)
class OcclusionRequest:
    """Which windows of which reasonings to occlude (EpiKV, section 3.4 and appendix C).

    Attributes
    ----------
    choice : ModelChoice
    traces : int
        Correctly answered greedy reasonings to use.
    split : str
    first : int
        Number of the first problem.
    window, stride : int
        Tokens.
    regenerate : {"answer", "rest"}
        What is generated anew after a window was occluded: the answer alone, as in the paper, or
        everything after the window.
    answer_tokens : int
        Tokens a regenerated reasoning may have beyond the original's place of the answer.
    """

    choice: ModelChoice
    traces: int
    split: str = "train"
    first: int = 0
    window: int = 32
    stride: int = 16
    regenerate: str = "answer"
    answer_tokens: int = 48


@dataclass(frozen=True)
class OccludedTrace:
    """One reasoning, and which of its windows the answer depends on.

    Attributes
    ----------
    problem : int
    hidden_change : float16 ``[reasoning tokens, layers]``
        Of the reasoning as it was generated, without its answer.
    windows : int64 ``[windows, 2]``
        First token of each window, counted from the start of the reasoning, and last one + 1.
    flipped : bool ``[windows]``
        Whether the answer changed when the window was occluded.
    """

    problem: int
    hidden_change: np.ndarray
    windows: np.ndarray
    flipped: np.ndarray


@dataclass(frozen=True)
class Occlusions:
    """All traces of a request.

    Attributes
    ----------
    model : str
        Its full name.
    padding : str
        The token that stood in for occluded ones.
    problems : int
        Tried until there were enough correct answers.
    """

    model: str
    padding: str
    problems: int
    traces: tuple[OccludedTrace, ...]


@dataclass(frozen=True)
class Masking:
    """A block of a recorded path, to be hidden from everything after it.

    Attributes
    ----------
    problem : int
    prompt : tuple of int
    path : tuple of int
        Generated tokens from the prompt to the end of the block.
    block_tokens : int
        How many of them are the block.
    """

    problem: int
    prompt: tuple[int, ...]
    path: tuple[int, ...]
    block_tokens: int


@dataclass(frozen=True)
class MaskingRequest:
    """Blocks to hide, one at a time.

    Attributes
    ----------
    choice : ModelChoice
    split : str
        Where the problems come from.
    recorded : str
        Full name of the model that decoded the blocks.
    items : sequence of Masking
    """

    choice: ModelChoice
    split: str
    recorded: str
    items: Sequence[Masking]


@dataclass(frozen=True)
class Maskings:
    """Whether greedy continuations answer right.

    Attributes
    ----------
    whole, masked : bool ``[items]``
        After the end of each block, with all keys and values readable, and without the block's.
    """

    whole: np.ndarray
    masked: np.ndarray


@runtime_checkable
class CalibratingBackend(Protocol):
    """A live model that can be asked what its answers depend on."""

    def occlude(self, request: OcclusionRequest, on_progress: OnProgress) -> Occlusions:
        """Occlude windows of greedy reasonings."""
        ...

    def mask(self, request: MaskingRequest, on_progress: OnProgress) -> Maskings:
        """Hide blocks of recorded paths."""
        ...


def get_calibrating_backend() -> CalibratingBackend:
    """The backend, or a `UsageError` if it cannot calibrate or lacks what it needs."""
    backend = get_backend()
    if not isinstance(backend, CalibratingBackend):
        raise UsageError("the torch backend cannot calibrate: it lacks `occlude` and `mask`")
    return backend
