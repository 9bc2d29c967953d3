"""Record searches that ran elsewhere, whose tokens are known (teacher forcing): no decoding.

`record_tree` computes a tree in blocks (`arborsim_torch.tree_blocks`) and writes the rows that a
live search of the same tree has: thoughts of a step side by side, a token each per iteration.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from arborsim.play.given import PROMPT, GivenThought, GivenTree
from arborsim.trace.schema import End, Kind
from arborsim_torch.capture import Capture
from arborsim_torch.recording import EpisodeResult, EventRows, verdict_number
from arborsim_torch.sources import Source
from arborsim_torch.tree_blocks import BlockDecoder


def record_tree(
    model: Any, tree: GivenTree, capture: Capture | None, source: Source | None
) -> EpisodeResult:
    """The columns of one search as a trace holds them; its time is that of one long prompt.

    `source` says what tokens read, and what they answer, where the tree does not.
    """
    began = time.perf_counter()
    decoder = BlockDecoder(model, capture, tree)
    logprob, entropy = decoder.run()
    rows = _Rows(tree, decoder.order.first, logprob, entropy, capture, source)
    rows.write()
    signals = capture if capture is not None and capture.keeps else None
    columns = rows.events.columns(with_embeddings=signals is not None and signals.embeddings)
    if signals is not None:
        columns.update(signals.columns(np.array(rows.computed)))
    thoughts, prompt = len(tree.nodes) - 1, len(tree.nodes[PROMPT].tokens)
    counts = (tree.num_tokens - prompt, thoughts, tree.num_tokens, 0)
    return EpisodeResult(columns, tree.correct, *counts, time.perf_counter() - began, 0.0, 0.0)


@dataclass
class _Rows:
    """The events of a search in the making."""

    tree: GivenTree
    first: np.ndarray  #: number of each node's first token in the order of computing
    logprob: np.ndarray
    entropy: np.ndarray
    capture: Capture | None
    source: Source | None

    def __post_init__(self) -> None:
        self.events = EventRows()
        self.computed: list[int] = []  #: numbers of the tokens in the order of rows
        self._lengths = self.tree.lengths
        for node in self.tree.nodes:
            self.events.open(node.parent)

    def write(self) -> None:
        prompt = self.tree.nodes[PROMPT]
        for position in range(len(prompt.tokens)):
            self._token(Kind.PREFILL, PROMPT, position)
        for step, given_up in zip(self.tree.steps, self.tree.given_up, strict=True):
            self._step(step)
            for n in given_up:
                self.events.add(Kind.PRUNE, n)
        if self.tree.chosen is not None:
            text = self._text(self._generated(self.tree.chosen))
            verdict = verdict_number(self.tree.correct)
            self.events.add(Kind.ANSWER, self.tree.chosen, text=text, correct=verdict)

    def _text(self, tokens: Sequence[int]) -> str | None:
        return None if self.source is None else self.source.text(tokens)

    def _step(self, active: Sequence[int]) -> None:
        for n in active:
            self.events.add(Kind.TRANSITION, n)
        done = 0
        while active:
            self.events.iteration += 1
            for n in active:
                self._token(Kind.TOKEN, n, done)
            done += 1
            sizes = {n: len(self.tree.nodes[n].tokens) for n in active}
            for n in active:
                if sizes[n] == done:
                    self._close(n)
            active = [n for n in active if sizes[n] > done]

    def _token(self, kind: Kind, n: int, index: int) -> None:
        node, number = self.tree.nodes[n], int(self.first[n]) + index
        known: dict[str, Any] = {"position": self._lengths[n] - len(node.tokens) + index}
        if kind is Kind.TOKEN:
            known["logprob"] = float(self.logprob[number])
        known |= {"token": node.tokens[index], "entropy": float(self.entropy[number])}
        self.events.add(kind, n, **known)
        self.computed.append(number)

    def _close(self, n: int) -> None:
        node, last = self.tree.nodes[n], int(self.first[n]) + len(self.tree.nodes[n].tokens) - 1
        known: dict[str, Any] = {"reward": node.reward, "answer": node.answer}
        known["text"] = self._text(node.tokens) if node.text is None else node.text
        if node.finished and node.answer is None and self.source is not None:
            known["answer"] = self.source.answer(self._generated(n))
        known["end"] = int(End.FINISHED if node.finished else End.NONE)
        if self.capture is not None and self.capture.embeddings:
            known["embedding"] = self.capture.embedding(n)
        correct = verdict_number(node.correct)
        self.events.add(
            Kind.BOUNDARY, n, entropy=float(self.entropy[last]), correct=correct, **known
        )

    def _generated(self, n: int) -> list[int]:
        """Tokens after the prompt on the path of a node."""
        path = list[GivenThought]()
        while n != PROMPT:
            path.append(self.tree.nodes[n])
            n = path[-1].parent
        return [token for node in reversed(path) for token in node.tokens]
