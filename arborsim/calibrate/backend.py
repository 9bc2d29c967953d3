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
    """A reference model and its problems."""

    #: As for `arborsim record`
    model: str = "chain"
    task: str = ""
    task_options: Mapping[str, Any] = field(default_factory=dict)  # e.g. ``lines`` of `chain`.
    device: str = "cpu"
    batch: int = 32  # sequences at a time


@dataclass(frozen=True)
class OcclusionRequest:
    """Which windows of which reasonings to occlude (EpiKV, section 3.4 and appendix C)."""

    choice: ModelChoice
    traces: int  # correctly answered greedy reasonings to use
    split: str = "train"
    first: int = 0  # number of the first problem
    #: Tokens
    window: int = 32
    stride: int = 16
    #: What is generated anew after a window was occluded: the answer alone, as in the paper, or
    #: everything after the window
    regenerate: str = "answer"
    #: Tokens a regenerated reasoning may have beyond the original's place of the answer
    answer_tokens: int = 48


@dataclass(frozen=True)
class OccludedTrace:
    """One reasoning, and which of its windows the answer depends on."""

    problem: int
    #: float16 [reasoning tokens, layers]: of the reasoning as it was generated, without its answer
    hidden_change: np.ndarray
    #: int64 [windows, 2]: first token of each window, counted from the start of the reasoning, and
    #: last one + 1
    windows: np.ndarray
    flipped: np.ndarray  # bool [windows]: whether the answer changed when the window was occluded


@dataclass(frozen=True)
class Occlusions:
    """All traces of a request."""

    model: str  # its full name
    padding: str  # the token that stood in for occluded ones
    problems: int  # tried until there were enough correct answers
    traces: tuple[OccludedTrace, ...]


@dataclass(frozen=True)
class Masking:
    """A block of a recorded path, to be hidden from everything after it."""

    problem: int
    prompt: tuple[int, ...]
    path: tuple[int, ...]  # generated tokens from the prompt to the end of the block
    block_tokens: int  # how many of them are the block


@dataclass(frozen=True)
class MaskingRequest:
    """Blocks to hide, one at a time."""

    choice: ModelChoice
    split: str  # where the problems come from
    recorded: str  # full name of the model that decoded the blocks
    items: Sequence[Masking]


@dataclass(frozen=True)
class Maskings:
    """Whether greedy continuations answer right."""

    #: bool [items]: after the end of each block, with all keys and values readable, and without the
    #: block's
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
