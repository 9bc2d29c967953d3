"""A search's reward: what it sees, what it says, what it costs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from arborsim.core.errors import UsageError
from arborsim.play.backends import ModelUsage
from arborsim_torch.hardware.memory import memory_errors
from arborsim_torch.models import check_room
from arborsim_torch.reference.tasks import Problem


@dataclass(frozen=True)
class Thought:
    """A thought that has just ended, with all that led to it."""

    problem: Problem  #: its `prompt` holds the prompt's token ids
    generated: Sequence[int]  #: all tokens after the prompt, this thought's included
    #: lengths of `generated` at which the thoughts of the path ended, this one last
    ends: tuple[int, ...]
    value: float | None = None  #: what the searched model itself said of the state


class Reward(Protocol):
    """Scores thoughts for a search.

    All thoughts that end in one iteration come in one call.  A score is in [0, 1], higher is
    better; NaN says that there is none, and the search falls back on probabilities.  A reward
    sees the text of a path and the model's own value, never its hidden states.
    """

    def score(self, thoughts: Sequence[Thought], rng: np.random.Generator) -> list[float]:
        """One score per thought; noise is drawn from `rng`, in the order of the thoughts."""

    def usage(self) -> ModelUsage | None:
        """Usage of its own model so far; None if it has none."""


class Embedder(Protocol):
    """Embeds the text of thoughts, for searches that look for unlike ones."""

    name: str
    size: int

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """float16 ``[texts, size]``."""

    def usage(self) -> ModelUsage:
        """Usage of the model so far."""


@dataclass
class Account:
    """Adds up what a reward or embedding model takes."""

    role: str
    name: str
    weight_bytes: int
    device: torch.device
    wall_s: float = 0.0  #: encoding of texts included; on a GPU until the results are on the host
    texts: int = 0
    tokens: int = 0  #: computed, padding included
    peak_kv_bytes: int = 0  #: most that its keys and values of one call took

    @contextmanager
    def timed(self, texts: Sequence[object]) -> Iterator[None]:
        """Time a call; its results must be on the host when the block ends."""
        if self.device.type == "cuda":  # what the searched model still computes is not ours
            torch.cuda.synchronize(self.device)
        began = time.perf_counter()
        with memory_errors(lambda: self._too_large(texts)):
            yield
        self.wall_s += time.perf_counter() - began
        self.texts += len(texts)

    def _too_large(self, texts: Sequence[object]) -> UsageError:
        return UsageError(
            f"--{self.role} {self.name}: out of memory on {self.device} with {len(texts)} thoughts "
            "at once: try fewer children, a lower --max-tokens, or a smaller model"
        )

    def usage(self) -> ModelUsage:
        sizes = (self.weight_bytes, self.peak_kv_bytes)
        return ModelUsage(self.role, self.name, self.wall_s, *sizes, self.texts, self.tokens)


def check_weights(option: str, path: Path, device: str) -> None:
    """Refuse a folder whose weights the device has no memory for, before they are read."""
    needed = sum(file.stat().st_size for file in path.rglob("*.safetensors"))
    check_room(option, needed, device, "use a smaller model or another device")
