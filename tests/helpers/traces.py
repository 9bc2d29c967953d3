"""Random but valid traces for tests: chains and trees, every capture level.

The structure (nodes, kinds, tokens, rewards) depends on the seed and the shape only, never on the
capture level, so that dense, sparse and bare twins of one search can be compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from arborsim.core.observations import Signal
from arborsim.core.shape import Rope
from arborsim.policies.base import Policy
from arborsim.trace.schema import PER_LAYER, VECTORS, Capture, Geometry, Kind, TraceInfo
from arborsim.trace.writer import TraceWriter

EMBEDDING_SIZE = 8
SKETCH_SIZE = 16


def make_info(
    layers: int = 6,
    capture: Capture | str = Capture.SIGNALS,
    attention: str = "dense",
    attention_top: int = 8,
    vocab: int = 128,
    **others: Any,
) -> TraceInfo:
    """Metadata of a small made-up model; `others` are further fields of `TraceInfo`."""
    capture = Capture(capture)
    if capture is Capture.TREE:
        attention = "none"
    geometry = Geometry(
        name="tiny", layers=layers, heads=4, kv_heads=2, head_dim=8, hidden=32, intermediate=64,
        vocab=vocab, parameters=100_000,
    )  # fmt: skip
    values = {
        "model": "tiny", "task": "random", "search": "random", "tokenizer": "none",
        "software": {"python": "3"}, "command": "pytest",
    }  # fmt: skip
    return TraceInfo(
        geometry=geometry,
        capture=capture,
        attention=attention,
        attention_top=attention_top if attention == "sparse" else 0,
        **{**values, **others},
    )


@dataclass
class Rows:
    """Event rows as a recorder would append them; `columns` has one entry per row."""

    columns: dict[str, list[Any]] = field(
        default_factory=lambda: {
            name: []
            for name in (
                "time_s", "kind", "iteration", "node", "parent", "depth", "position", "token",
                "logprob", "entropy", "reward", "text", "correct", "end", "answer",
            )
        }
    )  # fmt: skip
    parents: list[int] = field(default_factory=list)
    paths: list[list[int]] = field(default_factory=list)
    """Token ids (entry order) on the path of each node."""
    path_of_token: list[list[int]] = field(default_factory=list)
    """Per token: the ids at positions 0 .. own position."""
    iteration: int = 0
    time_s: float = 0.0

    def add(self, kind: Kind, node: int, **values: Any) -> None:
        depth, up = 0, self.parents[node]
        while up >= 0:
            depth, up = depth + 1, self.parents[up]
        row = {
            "time_s": self.time_s, "kind": int(kind), "iteration": self.iteration, "node": node,
            "parent": self.parents[node], "depth": depth, **values,
        }  # fmt: skip
        for name, column in self.columns.items():
            column.append(row.get(name))

    def open(self, parent: int) -> int:
        self.parents.append(parent)
        self.paths.append([] if parent < 0 else list(self.paths[parent]))
        return len(self.parents) - 1

    def token(self, kind: Kind, node: int, **values: Any) -> None:
        path = self.paths[node]
        self.add(kind, node, position=len(path), **values)
        path.append(len(self.path_of_token))
        self.path_of_token.append(list(path))


def random_trace_columns(
    rng: np.random.Generator,
    info: TraceInfo,
    kind: str = "tree",
    prompt: int = 32,
    nodes: int = 12,
    block: tuple[int, int] = (2, 10),
    width: int = 4,
    rewards: bool = True,
    coarse: bool = False,
) -> dict[str, Any]:
    """Columns of one random episode, as `TraceWriter.write_episode` takes them.

    Parameters
    ----------
    rng : numpy.random.Generator
    info : TraceInfo
        Its capture level and attention form decide which columns there are.
    kind : {"tree", "linear"}
        A tree has batches of parallel leaves, pauses in mid-block, revisits and prunes.
    prompt : int
        Prompt tokens (at least 1).
    nodes : int
        Blocks to open beyond the prompt.
    block : (int, int)
        Fewest and most tokens per block.
    width : int
        Most leaves in a batch.
    rewards : bool
        Whether boundaries carry a reward.
    coarse : bool
        Round signals so much that many tokens tie.
    """
    structure, signals = rng.spawn(2)
    rows = _structure(structure, info, kind, prompt, nodes, block, width, rewards)
    _end_thoughts(np.random.default_rng(structure.integers(2**32)), rows)
    columns: dict[str, Any] = dict(rows.columns)
    if info.capture is Capture.TREE:
        columns["entropy"] = [None] * len(columns["kind"])
        if info.embeddings:
            columns["embedding"] = _embeddings(columns["kind"], signals)
        return columns
    _add_signals(columns, rows, signals, info, coarse)
    return columns


def make_trace(
    path: Path,
    seed: int = 0,
    episodes: int = 3,
    kind: str = "tree",
    layers: int = 6,
    prompt: int = 32,
    capture: Capture | str = Capture.SIGNALS,
    attention: str = "dense",
    attention_top: int = 8,
    nodes: int = 12,
    block: tuple[int, int] = (2, 10),
    width: int = 4,
    rewards: bool = True,
    coarse: bool = False,
    info: TraceInfo | None = None,
    **others: Any,
) -> Path:
    """Write a random trace and return its path; see `random_trace_columns` for the shape.

    `others` are further fields of `TraceInfo`, e.g. ``qkv_layers=(0, 1)`` for the `qkv` level.
    """
    info = info or make_info(layers, capture, attention, attention_top, seed=seed, **others)
    rng = np.random.default_rng(seed)
    with TraceWriter(Path(path), info) as writer:
        for _ in range(episodes):
            writer.write_episode(
                random_trace_columns(rng, info, kind, prompt, nodes, block, width, rewards, coarse)
            )
    return Path(path)


def trace_for(policy: Policy, path: Path, **shape: Any) -> Path:
    """A random trace that holds what the policy reads."""
    reads = policy.reads()
    if reads & set(VECTORS) or policy.grouping != "shared":  # groups are captured layers' heads
        shape |= {"capture": "qkv", "layers": 3, "qkv_layers": (0, 1, 2)}
    if Signal.HIDDEN in reads:
        shape["hidden_layers"] = (1, 2, 5)
    if Signal.ROPE in reads:
        shape["rope"] = Rope((1.0, 0.3, 0.1, 0.03), 1.1)
    if Signal.LAYER_ATTENTION in reads:
        shape["attention_layer_ids"] = (0, 1, 2)
    return make_trace(path, **shape)


def _structure(
    rng: np.random.Generator,
    info: TraceInfo,
    kind: str,
    prompt: int,
    nodes: int,
    block: tuple[int, int],
    width: int,
    rewards: bool,
) -> Rows:
    rows = Rows()
    vocab = info.geometry.vocab

    def entropy() -> float:
        return min(float(rng.exponential()), math.log(vocab))

    def token(row_kind: Kind, node: int) -> None:
        chosen = {} if row_kind is Kind.PREFILL else {"logprob": -float(rng.exponential())}
        rows.token(
            row_kind, node, token=int(rng.integers(vocab)), entropy=entropy(),
            **chosen,
        )  # fmt: skip

    def boundary(node: int) -> None:
        rows.add(
            Kind.BOUNDARY, node, entropy=entropy(),
            reward=float(rng.uniform()) if rewards else None, text=f"step {node}",
        )  # fmt: skip

    root = rows.open(-1)
    for _ in range(prompt):
        token(Kind.PREFILL, root)
    left = {}  # tokens that an open block has yet to decode
    closed, pruned = [root], set[int]()
    while len(rows.parents) <= nodes or left:
        rows.time_s += float(rng.exponential(0.01))
        leaves = _choose_leaves(rng, rows, left, closed, pruned, nodes, width, block, kind)
        for node in leaves:
            rows.add(Kind.TRANSITION, node)
        # A pause leaves blocks unfinished, to be taken up by a later transition.
        longest = max(left[node] for node in leaves)
        pauses = kind == "tree" and longest > 0 and rng.uniform() < 0.3
        pause = int(rng.integers(1, longest + 1)) if pauses else longest
        late = []
        for _ in range(pause):
            rows.iteration += 1
            rows.time_s += 0.001
            decoding = [node for node in leaves if left[node] > 0]
            for node in decoding:
                token(Kind.TOKEN, node)
                left[node] -= 1
            for node in decoding:
                if left[node] == 0 and rng.uniform() < 0.5:
                    boundary(node)
                    closed.append(node)
                elif left[node] == 0:
                    late.append(node)
        late += [node for node in leaves if left[node] == 0 and node not in closed + late]
        for node in late:
            boundary(node)
            closed.append(node)
        for node in leaves:
            if left[node] == 0:
                del left[node]
        if kind == "tree" and rng.uniform() < 0.3:
            candidates = [n for n in closed if n not in pruned and n != root]
            if len(candidates) > 2:
                gone = int(rng.choice(candidates))
                pruned.add(gone)
                rows.add(Kind.PRUNE, gone)
    leaf = len(rows.parents) - 1 if kind == "linear" else int(rng.choice(closed))
    verdict = [None, True, False][int(rng.integers(3))]
    rows.add(Kind.ANSWER, leaf, text="the answer", correct=verdict)
    return rows


def _end_thoughts(rng: np.random.Generator, rows: Rows) -> None:
    """Some thoughts without children are finished, with or without an answer, and some dead."""
    columns = rows.columns
    for row, kind in enumerate(columns["kind"]):
        if kind == Kind.BOUNDARY and columns["node"][row] not in rows.parents:
            columns["end"][row] = [None, "finished", "dead"][int(rng.integers(3))]
            if columns["end"][row] == "finished":
                columns["answer"][row] = [None, "24", "\u00e9"][int(rng.integers(3))]
                columns["correct"][row] = [None, True, False][int(rng.integers(3))]


def _choose_leaves(
    rng: np.random.Generator,
    rows: Rows,
    left: dict[int, int],
    closed: list[int],
    pruned: set[int],
    nodes: int,
    width: int,
    block: tuple[int, int],
    kind: str,
) -> list[int]:
    """New children of a random closed node, together with some paused blocks."""
    budget = nodes + 1 - len(rows.parents)
    leaves: list[int] = []
    if left and (budget <= 0 or kind == "linear" or rng.uniform() < 0.5):
        paused = sorted(left)
        count = int(rng.integers(1, min(len(paused), width) + 1))
        leaves = [int(n) for n in rng.choice(paused, size=count, replace=False)]
    if budget <= 0 or (kind == "linear" and leaves):
        return leaves
    room = 1 if kind == "linear" else min(budget, width - len(leaves))
    for _ in range(int(rng.integers(0 if leaves else 1, room + 1)) if room > 0 else 0):
        parents = [n for n in closed if n not in pruned]
        parent = closed[-1] if kind == "linear" else int(rng.choice(parents))
        node = rows.open(parent)
        left[node] = int(rng.integers(block[0], block[1] + 1))
        leaves.append(node)
    return leaves


def _add_signals(
    columns: dict[str, Any],
    rows: Rows,
    rng: np.random.Generator,
    info: TraceInfo,
    coarse: bool,
) -> None:
    tokens, layers = len(rows.path_of_token), info.geometry.layers

    def vectors(drawn: np.ndarray) -> np.ndarray:
        return (np.round(drawn) if coarse else drawn).astype(np.float16)

    for signal in PER_LAYER:
        columns[signal.value] = vectors(rng.lognormal(0.0, 0.5, (tokens, layers)))
    columns["key_sketch"] = vectors(rng.normal(size=(tokens, SKETCH_SIZE)))
    columns["readers"] = _readers(np.random.default_rng(tokens), rows)
    columns["embedding"] = _embeddings(columns["kind"], rng)
    # Attention as models show it: a sink, a taste for the recent, and a few heavy hitters.
    weight = rng.gamma(0.3, 3.0, tokens)
    dense = [_attention_row(weight[ids], rng) for ids in rows.path_of_token]
    if coarse:
        dense = [_coarse_row(row) for row in dense]
    if info.attention == "dense":
        columns["attention"] = dense
    elif info.attention == "sparse":
        columns.update(sparse_columns(dense, info.attention_top))
    heads, kv_heads, size = info.geometry.heads, info.geometry.kv_heads, info.geometry.head_dim
    if info.attention_layer_ids:
        spread = [
            None if k > Kind.TOKEN else [dense[i] for _ in info.attention_layer_ids for _ in "mv"]
            for k, i in zip(columns["kind"], _token_number(columns["kind"]), strict=True)
        ]
        columns["attention_layers"] = spread
    if info.hidden_layers:
        width = len(info.hidden_layers) * info.geometry.hidden
        columns["hidden"] = vectors(rng.normal(size=(tokens, width)))
    if info.capture is Capture.QKV:
        captured = len(info.qkv_layers)
        for name, width in (("queries", heads), ("keys", kv_heads), ("values", kv_heads)):
            columns[name] = vectors(rng.normal(size=(tokens, captured * width * size)))


def _readers(rng: np.random.Generator, rows: Rows) -> list[list[int]]:
    """Steps go up by one every few positions, and some tokens have many readers, some none."""
    found = []
    for path in rows.path_of_token:
        step = max(0, len(path) // 5 - 4)
        ahead = rng.integers(0, 12, rng.integers(0, 5))
        found.append([step, *(step + np.unique(ahead)).tolist()])
    return found


def _embeddings(kinds: list[int], rng: np.random.Generator) -> list[np.ndarray | None]:
    return [
        rng.normal(size=EMBEDDING_SIZE).astype(np.float16) if kind == Kind.BOUNDARY else None
        for kind in kinds
    ]


def _token_number(kinds: list[int]) -> list[int]:
    return (np.cumsum([k <= Kind.TOKEN for k in kinds]) - 1).tolist()


def _attention_row(weight: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    age = np.arange(len(weight))[::-1]
    score = weight * rng.uniform(0.5, 1.5, len(weight)) + 4.0 / (1 + age) + 0.01
    score[0] += 3.0
    return (score / score.sum()).astype(np.float16)


def _coarse_row(row: np.ndarray) -> np.ndarray:
    """The row in steps of 1/32; what rounding takes away goes to the newest position."""
    steps = np.floor(row.astype(np.float64) * 32) / 32
    steps[-1] += 1 - steps.sum()
    return steps.astype(np.float16)


def sparse_columns(dense: list[np.ndarray], top: int) -> dict[str, list[Any]]:
    """The sparse form of dense rows: the `top` largest positions of each, and the mass left."""
    index, value, rest = [], [], []
    for row in dense:
        kept = np.sort(np.argsort(-row, kind="stable")[:top])
        index.append(kept.astype(np.int32))
        value.append(row[kept])
        rest.append(max(0.0, float(row.sum(dtype=np.float64) - row[kept].sum(dtype=np.float64))))
    return {"attention_index": index, "attention_value": value, "attention_rest": rest}
