"""Random banks for tests: trees of recorded thoughts, as episodes in memory."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from arborsim.core.observations import Signal
from arborsim.searches.bank import Bank
from arborsim.trace.columns import encode
from arborsim.trace.decode import decode_episode
from arborsim.trace.episode import Episode
from arborsim.trace.schema import Capture, Kind, TraceInfo
from arborsim.trace.validate import Where, validate
from tests.helpers.traces import EMBEDDING_SIZE, Rows, make_info, random_trace_columns


def bank_columns(
    seed: int,
    width: int = 4,
    depth: int = 4,
    prompt: int = 8,
    block: tuple[int, int] = (1, 6),
    duplicates: float = 0.2,
    embeddings: bool = True,
) -> dict[str, Any]:
    """A bank recorded level by level: every state that can be continued has `width` children.

    Thoughts finish at `depth` at the latest; answers are "a" (right), "b" and "c".
    """
    rng, draws = random.Random(seed), np.random.default_rng(seed)
    rows = Rows()
    rows.open(-1)
    for _ in range(prompt):
        rows.token(Kind.PREFILL, 0, token=rng.randrange(100))
    level, vectors = [0], {}
    for at in range(1, depth + 1):
        said: dict[int, list[int]] = {}
        for parent in level:
            for _ in range(width):
                own = [rng.randrange(100) for _ in range(rng.randint(*block))]
                before = [said[n] for n in said if rows.parents[n] == parent]
                if before and rng.random() < duplicates:
                    own = list(rng.choice(before))
                said[rows.open(parent)] = own
        for node in said:
            rows.add(Kind.TRANSITION, node)
        level = _grow(rows, said, rng, last=at == depth)
        for node in said:
            direction = np.eye(EMBEDDING_SIZE)[rng.randrange(3)]
            vectors[node] = direction + draws.normal(0, 0.05, EMBEDDING_SIZE)
    rows.add(Kind.ANSWER, len(rows.parents) - 1, correct=False)
    columns: dict[str, Any] = dict(rows.columns)
    if embeddings:
        columns["embedding"] = [
            vectors[node].astype(np.float16) if kind == Kind.BOUNDARY else None
            for kind, node in zip(columns["kind"], columns["node"], strict=True)
        ]
    return columns


def _grow(rows: Rows, said: dict[int, list[int]], rng: random.Random, last: bool) -> list[int]:
    """Decode a level together; returns the states that can be continued."""
    goes_on = []
    for step in range(max(map(len, said.values()), default=0)):
        rows.iteration += 1
        running = [node for node in said if len(said[node]) > step]
        for node in running:
            rows.token(Kind.TOKEN, node, token=said[node][step])
        for node in running:
            if len(said[node]) > step + 1:
                continue
            end = "finished" if last or rng.random() < 0.1 else None
            end = "dead" if end is None and rng.random() < 0.05 else end
            answer = rng.choice("abc") if end == "finished" else None
            rows.add(
                Kind.BOUNDARY, node, reward=round(rng.random(), 2), end=end, answer=answer,
                correct=None if answer is None else answer == "a", text=f"thought {said[node]}",
            )  # fmt: skip
            goes_on += [node] if end is None else []
    return goes_on


def bank_info(embeddings: bool = True, **others: Any) -> TraceInfo:
    return make_info(capture=Capture.TREE, embeddings=embeddings, **others)


def episode_of(columns: dict[str, Any], info: TraceInfo, **wanted: Any) -> Episode:
    table = encode(columns, info, 0)
    return decode_episode(table, info, "bank", 0, text=True, **wanted)


def made_bank(seed: int, embeddings: bool = True, **shape: Any) -> Bank:
    columns = bank_columns(seed, embeddings=embeddings, **shape)
    return Bank.of(episode_of(columns, bank_info(embeddings), embedding=embeddings))


def random_bank(seed: int, **shape: Any) -> Bank:
    """A bank of another kind: pauses, revisits, prunes, thoughts that were never completed."""
    rng = np.random.default_rng(seed)
    info = make_info()
    columns = random_trace_columns(rng, info, **shape)
    needs = frozenset({Signal.ATTENTION, Signal.HIDDEN_CHANGE, Signal.KEY_SKETCH})
    return Bank.of(episode_of(columns, info, needs=needs, embedding=True))


def check_valid(episode: Episode) -> None:
    """As strict as reading a trace."""
    validate(episode, Where("walk", 0))
