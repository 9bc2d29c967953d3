"""The event rows of one episode, as a recorder writes them down."""

from __future__ import annotations

from typing import Any

import numpy as np

from arborsim.trace.schema import End, Kind

_NAMES = (
    "time_s", "kind", "iteration", "node", "parent", "depth",
    "position", "token", "logprob", "entropy", "reward", "text", "correct", "embedding",
    "end", "answer",
)  # fmt: skip
_NAN = float("nan")


class Rows:
    """Appends rows in time order; `columns` turns them into what `TraceWriter` takes.

    Attributes
    ----------
    time_s : float
        Time of the rows to come.
    iteration : int
        Iteration of the rows to come.
    """

    def __init__(self) -> None:
        self.time_s = 0.0
        self.iteration = 0
        self._tree: list[tuple[int, int]] = []  # parent, depth
        self._rows: list[tuple[Any, ...]] = []

    def open(self, parent: int) -> int:
        """Number a new node."""
        depth = self._tree[parent][1] + 1 if parent >= 0 else 0
        self._tree.append((parent, depth))
        return len(self._tree) - 1

    def depth(self, node: int) -> int:
        return self._tree[node][1]

    def token(
        self, kind: Kind, node: int, position: int, token: int, logprob: float, entropy: float
    ) -> None:
        self._add(kind, node, position, token, logprob, entropy, _NAN, None, -1, None)

    def transition(self, node: int) -> None:
        self._add(Kind.TRANSITION, node)

    def prune(self, node: int) -> None:
        self._add(Kind.PRUNE, node)

    def boundary(
        self,
        node: int,
        reward: float,
        entropy: float,
        text: str,
        embedding: np.ndarray | None,
        end: End,
        answer: str | None,
        correct: bool | None,
    ) -> None:
        self._add(
            Kind.BOUNDARY, node, -1, -1, _NAN, entropy, reward, text, _verdict(correct), embedding,
            int(end), answer,
        )  # fmt: skip

    def answer(self, node: int, correct: bool | None, text: str) -> None:
        self._add(Kind.ANSWER, node, -1, -1, _NAN, _NAN, _NAN, text, _verdict(correct), None)

    def _add(
        self,
        kind: Kind,
        node: int,
        position: int = -1,
        token: int = -1,
        logprob: float = _NAN,
        entropy: float = _NAN,
        reward: float = _NAN,
        text: str | None = None,
        correct: int = -1,
        embedding: np.ndarray | None = None,
        end: int = 0,
        answer: str | None = None,
    ) -> None:
        self._rows.append(
            (self.time_s, int(kind), self.iteration, node, *self._tree[node],
             position, token, logprob, entropy, reward, text, correct, embedding, end, answer)
        )  # fmt: skip

    def columns(self, with_embeddings: bool) -> dict[str, Any]:
        """Columns by name, one entry per row."""
        by_name: dict[str, Any] = dict(zip(_NAMES, zip(*self._rows, strict=True), strict=True))
        for name in ("iteration", "node", "parent", "depth", "position", "token", "correct", "end"):
            by_name[name] = np.asarray(by_name[name], dtype=np.int32)
        for name in ("logprob", "entropy", "reward"):
            by_name[name] = np.asarray(by_name[name], dtype=np.float32)
        by_name["time_s"] = np.asarray(by_name["time_s"], dtype=np.float64)
        if not with_embeddings:
            del by_name["embedding"]
        return by_name


def _verdict(correct: bool | None) -> int:
    return -1 if correct is None else int(correct)
