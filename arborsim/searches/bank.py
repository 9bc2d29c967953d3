"""A bank: recorded thoughts, in the order in which a search that asks for children gets them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from arborsim.core.errors import TraceError
from arborsim.core.observations import Signal
from arborsim.trace.columns import numbers_of
from arborsim.trace.episode import Episode
from arborsim.trace.reader import TraceReader, open_trace
from arborsim.trace.schema import Kind
from arborsim.trace.validate import Where

_ROUNDING = 1e-3  # of a logarithm of a probability of 1


@dataclass(frozen=True, eq=False)
class Thoughts:
    """One problem's thoughts, for searches to walk, in sequences with one entry per node."""

    #: Node 0 is the prompt.
    parent: list[int]
    depth: list[int]
    tokens: list[int]  #: of the node itself
    #: False for a thought that was still running when its recording ended: its length, score and
    #: end are unknown.
    complete: list[bool]
    score: list[float]  #: search value, as stored (float32); NaN where there is none
    end: list[int]  #: `arborsim.trace.schema.End`, before duplicates are looked for
    answer: Sequence[str | None]
    verdict: list[bool | None]  #: of the thought's answer; None for "not judged"
    #: The first complete sibling that says the same: equal tokens, or equal texts where token ids
    #: are unknown; the node itself if there is none before it.
    twin: list[int]
    children: Sequence[Sequence[int]]  #: of each node, in order of opening
    #: Whether answers are judged: then a search that hands in no answer is wrong.
    judged: bool
    #: Of the nodes that have one: float16 ``[size]``.
    embedding: Mapping[int, np.ndarray] = field(default_factory=dict)
    text: Sequence[str | None] = ()  #: of the node's own tokens
    #: Of the next token's distribution after the node's last, nats; NaN where it is unknown
    entropy: Sequence[float] = ()
    logprob: Sequence[float] = ()  #: mean over the node's tokens, nats; NaN where it is unknown

    @property
    def prompt_tokens(self) -> int:
        return self.tokens[0]

    def below(self, node: int, first: int, count: int) -> Sequence[int]:
        """`count` children of `node` from number `first` on, or as many as there are."""
        return self.children[node][first : first + count]


@dataclass(frozen=True, eq=False)
class Bank(Thoughts):
    """One problem's recorded thoughts, and the episode that they are from."""

    episode: Episode = field(kw_only=True)

    @property
    def bare(self) -> Episode:
        """The episode without words and embeddings: nothing that is replayed needs them."""
        return replace(self.episode, text=None, answer=None, embedding=None, embedding_rows=None)

    @classmethod
    def of(cls, episode: Episode, logprob: np.ndarray | None = None) -> Bank:
        """The bank that an episode of a trace is.

        The episode was read with text, and with embeddings if a search needs them.  `logprob` is
        float32 ``[rows]``, NaN where it is unknown.  A thought without a reward scores the
        geometric mean of its tokens' probabilities: a live search ranks them so, too.  Refuses a
        trace that does not say which thoughts ended, because it is unknown which could be
        continued.
        """
        if episode.end is None:
            raise TraceError(_no_bank(f"episode {episode.index}"))
        nodes = int(episode.node.max()) + 1
        parent, depth = np.full(nodes, -1), np.zeros(nodes, dtype=int)
        parent[episode.node], depth[episode.node] = episode.parent, episode.depth
        closing = np.flatnonzero(episode.kind == Kind.BOUNDARY)
        at = episode.node[closing]
        complete, score = np.zeros(nodes, dtype=bool), np.full(nodes, np.nan)
        end, correct = np.zeros(nodes, dtype=int), np.full(nodes, -1)
        complete[at], score[at] = True, episode.reward[closing]
        end[at], correct[at] = episode.end[closing], episode.correct[closing]
        complete[0] = True
        entropy = np.full(nodes, np.nan)
        entropy[at] = episode.entropy[closing]
        node_of_token = episode.node[episode.token_rows]
        tokens = np.bincount(node_of_token, minlength=nodes)
        chance = np.full(nodes, np.nan)
        if logprob is not None:  # summed one by one, as a live search does
            nats = logprob[episode.token_rows].astype(np.float64)
            sums = np.bincount(node_of_token, nats, minlength=nodes)
            chance = np.divide(sums, tokens, out=chance, where=complete & (tokens > 0))
        unrewarded = at[np.isnan(score[at])]
        score[unrewarded] = np.exp(chance[unrewarded])
        embedding = {}
        if episode.embedding_rows is not None and episode.embedding is not None:
            of = episode.node[episode.embedding_rows].tolist()
            embedding = dict(zip(of, episode.embedding, strict=True))
        children: list[list[int]] = [[] for _ in range(nodes)]
        for node in range(1, nodes):
            children[parent[node]].append(node)
        return cls(
            episode=episode,
            parent=parent.tolist(),
            depth=depth.tolist(),
            tokens=tokens.tolist(),
            complete=complete.tolist(),
            score=score.tolist(),
            end=end.tolist(),
            answer=_by_node(episode.answer, closing, at, nodes),
            verdict=[None if value < 0 else bool(value) for value in correct.tolist()],
            twin=_twins(episode, parent.tolist(), closing, at),
            children=[tuple(below) for below in children],
            judged=bool((episode.correct >= 0).any()),
            embedding=embedding,
            text=_by_node(episode.text, closing, at, nodes),
            entropy=entropy.tolist(),
            logprob=chance.tolist(),
        )


def open_bank(path: Path) -> TraceReader:
    """Open a trace that can be searched: one that says which thoughts ended."""
    reader = open_trace(path)
    if "end" not in reader.columns or not reader.info.knows_ends:
        raise TraceError(_no_bank(str(path)))
    return reader


def read_bank(
    reader: TraceReader, episode: int, needs: Sequence[Signal] = (), embeddings: bool = False
) -> Bank:
    """The bank of one problem."""
    (found,) = reader.episodes(
        needs, text=True, embedding=embeddings, start=episode, stop=episode + 1
    )
    logprob = numbers_of(reader.table(episode, ["logprob"])["logprob"])
    where = Where(str(reader.path), episode)
    where.check(logprob > _ROUNDING, "logprob is {:.6g} nats, which is above 0", logprob)
    return Bank.of(found, logprob)


def _no_bank(where: str) -> str:
    """The message about a trace whose thoughts have no ends."""
    return (
        f"{where}: the trace does not say which thoughts ended, so it is no bank to search: make "
        "one with arborsim record --bank, or import the log again (arborsim import tot)"
    )


def _by_node(
    values: Sequence[str | None] | None, rows: np.ndarray, nodes: np.ndarray, count: int
) -> list[str | None]:
    found: list[str | None] = [None] * count
    if values is not None:
        for row, node in zip(rows.tolist(), nodes.tolist(), strict=True):
            found[node] = values[row]
    return found


def _twins(episode: Episode, parent: list[int], closing: np.ndarray, at: np.ndarray) -> list[int]:
    """The first sibling with the same content.  Unknown content equals nothing else."""
    count = len(parent)
    content: list[bytes | str | None]
    if episode.info.knows_token_ids:
        node = episode.node[episode.token_rows]
        order = np.argsort(node, kind="stable")
        bounds = np.searchsorted(node[order], np.arange(count + 1)).tolist()
        token = episode.token[order]
        content = [token[bounds[n] : bounds[n + 1]].tobytes() for n in range(count)]
    else:
        content = list(_by_node(episode.text, closing, at, count))
    first: dict[tuple[int, bytes | str], int] = {}
    twin = list(range(count))
    for n in sorted(at.tolist()):  # complete thoughts only
        said = content[n]
        if said is not None:
            twin[n] = first.setdefault((parent[n], said), n)
    return twin
