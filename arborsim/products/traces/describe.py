"""The content of a trace, in numbers and as drawn trees: the data of ``arborsim inspect``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from arborsim.core.observations import Signal
from arborsim.core.statistics import clopper_pearson
from arborsim.trace.episode import Episode
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import End, Kind, TraceInfo, recording_options


@dataclass(frozen=True)
class ColumnSize:
    """Bytes of one column over all episodes."""

    name: str
    stored_bytes: int
    unpacked_bytes: int


@dataclass(frozen=True)
class Spread:
    """How a quantity varies over episodes."""

    total: float
    smallest: float
    median: float
    mean: float
    largest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        array = np.asarray(list(values), dtype=np.float64)
        return cls(*(float(of(array)) for of in (np.sum, np.min, np.median, np.mean, np.max)))


@dataclass(frozen=True)
class EpisodeFacts:
    """One search in numbers."""

    index: int
    prompt_tokens: int
    generated_tokens: int
    #: Tokens from the root to the end of the longest path, the prompt included.
    longest_path_tokens: int
    #: Blocks including the prompt's, and the depth of the deepest one.
    nodes: int
    depth: int
    branching: float  #: mean number of children of the blocks that have any
    transitions: int  #: batches of leaves that the search turned to
    #: Times that it came back: went on from a block, by itself or by a new child, that was not
    #: among the leaves it had just turned to.
    revisits: int
    prunes: int
    iterations: int
    #: Thoughts that hold an answer, and that ran into the cap; None if the trace does not tell.
    finished: int | None
    dead: int | None
    duration_s: float | None  #: None if the trace does not know times
    answered: bool  #: whether the search came to an end by an answer
    correct: bool | None


@dataclass(frozen=True)
class Accuracy:
    """Correct answers out of those judged, with a 95% Clopper-Pearson interval."""

    correct: int
    judged: int
    low: float
    high: float


@dataclass(frozen=True)
class PolicyFit:
    """Can a policy be replayed on this trace?"""

    name: str
    missing: tuple[str, ...]  #: signals that it reads and the trace lacks; empty if it can
    remedy: str  #: how to come by them: the recording option, or why there is none


@dataclass(frozen=True)
class Description:
    """Everything that ``arborsim inspect`` shows but the trees."""

    file: str
    file_bytes: int
    num_episodes: int
    info: TraceInfo
    signals: tuple[str, ...]
    columns: tuple[ColumnSize, ...]
    spreads: dict[str, Spread]
    episodes: tuple[EpisodeFacts, ...]
    accuracy: Accuracy | None
    policies: tuple[PolicyFit, ...]


#: `EpisodeFacts` that make a row of statistics, and how they are called there.
SPREADS = {
    "prompt_tokens": "prompt tokens",
    "generated_tokens": "generated tokens",
    "longest_path_tokens": "longest path, tokens",
    "nodes": "nodes",
    "depth": "depth",
    "branching": "branching",
    "transitions": "transitions",
    "revisits": "revisits",
    "prunes": "prunes",
    "iterations": "iterations",
    "finished": "finished thoughts",
    "dead": "thoughts cut by the cap",
    "duration_s": "duration, s",
}


def describe(reader: TraceReader) -> Description:
    """Read the structure of every episode once, and sum it up.

    Raises `TraceError`: an episode is damaged.
    """
    facts = tuple(episode_facts(episode) for episode in reader.episodes())
    values = {name: [getattr(fact, name) for fact in facts] for name in SPREADS}
    return Description(
        file=str(reader.path),
        file_bytes=reader.file_bytes,
        num_episodes=reader.num_episodes,
        info=reader.info,
        signals=tuple(signal.value for signal in Signal if reader.has(signal)),
        columns=column_sizes(reader),
        spreads={name: Spread.of(own) for name, own in values.items() if None not in own},
        episodes=facts,
        accuracy=accuracy([fact.correct for fact in facts]),
        policies=policy_fits(reader),
    )


def episode_facts(episode: Episode) -> EpisodeFacts:
    """Count what happened in one search."""
    kind, node = episode.kind, episode.node
    opened = np.unique(node, return_index=True)[1]
    children = np.bincount(episode.parent[opened[1:]]) if len(opened) > 1 else np.zeros(0, int)
    parents = children[children > 0]
    prompt = int((kind == Kind.PREFILL).sum())
    transitions, revisits = count_transitions(episode)
    answered = bool(kind[-1] == Kind.ANSWER)
    verdict = int(episode.correct[-1]) if answered else -1
    end = episode.end
    return EpisodeFacts(
        index=episode.index,
        prompt_tokens=prompt,
        generated_tokens=episode.num_tokens - prompt,
        longest_path_tokens=int(episode.position.max()) + 1,
        nodes=len(opened),
        depth=int(episode.depth.max()),
        branching=float(parents.mean()) if len(parents) else 0.0,
        transitions=transitions,
        revisits=revisits,
        prunes=int((kind == Kind.PRUNE).sum()),
        iterations=int(episode.iteration[-1]),
        finished=None if end is None else int((end == End.FINISHED).sum()),
        dead=None if end is None else int((end == End.DEAD).sum()),
        duration_s=float(episode.time_s[-1]) if episode.info.knows_times else None,
        answered=answered,
        correct=None if verdict < 0 else bool(verdict),
    )


def count_transitions(episode: Episode) -> tuple[int, int]:
    """Batches of leaves, and how many of their leaves go on from a block that was not active."""
    turns = episode.kind == Kind.TRANSITION
    before = np.concatenate([[False], turns[:-1]])
    group = np.cumsum(turns & ~before)[turns]
    leaf = episode.node[turns]
    if len(leaf) == 0:
        return 0, 0
    opens = leaf > np.concatenate([[0], np.maximum.accumulate(leaf)[:-1]])
    width = int(leaf.max()) + 1
    started = np.where(opens, episode.parent[turns], leaf)
    key = group.astype(np.int64) * width
    # The prompt, node 0, stands for what was active before the first group.
    goes_on = np.isin(key - width + started, np.append(key + leaf, 0))
    return int(group[-1]), int((~goes_on).sum())


def column_sizes(reader: TraceReader) -> tuple[ColumnSize, ...]:
    """Bytes per column from Parquet's metadata, largest first."""
    stored, unpacked = (dict.fromkeys(reader.columns, 0) for _ in range(2))
    for chunk in reader.chunks():
        stored[chunk.name] += chunk.stored_bytes
        unpacked[chunk.name] += chunk.decompressed_bytes
    sizes = (ColumnSize(name, stored[name], unpacked[name]) for name in reader.columns)
    return tuple(sorted(sizes, key=lambda size: -size.stored_bytes))


def accuracy(verdicts: Iterable[bool | None]) -> Accuracy | None:
    """Accuracy over the answers that were judged. None if none was."""
    judged = [verdict for verdict in verdicts if verdict is not None]
    if not judged:
        return None
    low, high = clopper_pearson(sum(judged), len(judged))
    return Accuracy(sum(judged), len(judged), low, high)


def policy_fits(reader: TraceReader) -> tuple[PolicyFit, ...]:
    """Every known policy, and what the trace lacks for it."""
    from arborsim.play.served import needed
    from arborsim.policies import registry  # imports every policy: only when asked

    held = frozenset(signal for signal in Signal if reader.has(signal))
    fits = []
    for name in sorted(registry.names()):
        missing = sorted(needed(registry.build(name)) - held)
        remedy = ""
        if missing:
            options = " ".join(recording_options(missing, reader.info))
            remedy = reader.info.unrecorded or f"record with {options}"
        fits.append(PolicyFit(name, tuple(signal.value for signal in missing), remedy))
    return tuple(fits)


_DEEPEST_INDENT = 36
_MOST_VISITS = 4
#: Before a child with later siblings, the last child, an only child; below these; a cut indent.
_UNICODE = ("├─ ", "└─ ", "↓  ", "│  ", "   ", "…")
_ASCII = ("|- ", "`- ", "v  ", "|  ", "   ", "~")


@dataclass
class _Block:
    """The line about a thought block. Visits are numbers of transitions, from 1."""

    number: int
    parent: int
    tokens: int
    reward: float = math.nan
    closed: bool = False
    pruned: bool = False
    on_answer_path: bool = False
    text: str | None = None
    visits: list[int] = field(default_factory=list)
    children: list[int] = field(default_factory=list)

    def label(self, unicode: bool) -> str:
        about = [f"{self.tokens} tok"]
        if self.number == 0:
            about.append("prompt")
        if not math.isnan(self.reward):
            about.append(f"reward {self.reward:.2f}")
        if self.visits:
            shown = ",".join(map(str, self.visits[:_MOST_VISITS]))
            about.append(f"visit {shown}" + (",.." if len(self.visits) > _MOST_VISITS else ""))
        if self.number and not self.closed:
            about.append("open")
        if self.pruned:
            about.append("pruned")
        star = " *" if self.on_answer_path else ""
        text = f" | {escaped(self.text, unicode)}" if self.text else ""
        return f"{self.number}{star} ({', '.join(about)}){text}"


def _blocks(episode: Episode) -> list[_Block]:
    """Every block of a search, by number."""
    kind, node = episode.kind, episode.node
    count = int(node.max()) + 1
    parent = np.full(count, -1)
    parent[node] = episode.parent
    tokens = np.bincount(node[episode.token_rows], minlength=count)
    blocks = [_Block(n, int(parent[n]), int(tokens[n])) for n in range(count)]
    for block in blocks[1:]:
        blocks[block.parent].children.append(block.number)
    batch = 0
    for row in np.flatnonzero(kind > Kind.TOKEN).tolist():
        block = blocks[node[row]]
        if kind[row] == Kind.TRANSITION:
            batch += int(kind[row - 1] != Kind.TRANSITION)
            block.visits.append(batch)
        elif kind[row] == Kind.BOUNDARY:
            block.closed, block.reward = True, float(episode.reward[row])
            block.text = episode.text[row] if episode.text else None
        elif kind[row] == Kind.PRUNE:
            block.pruned = True
    up = int(node[-1]) if kind[-1] == Kind.ANSWER else -1
    while up >= 0:
        blocks[up].on_answer_path = True
        up = blocks[up].parent
    return blocks


def draw_tree(episode: Episode, nodes: int = 24, unicode: bool = True) -> list[str]:
    """Lines of text, one per block, depth first.

    A block's only child is drawn below it in the same column, so a long chain does not drift to
    the right.  ``*`` marks the path to the answer.  At most `nodes` blocks are drawn, with snippets
    of text if they were read. A last line counts the others.  Without `unicode`, plain ASCII.
    """
    blocks = _blocks(episode)
    fork, last, only, down, blank, cut = _UNICODE if unicode else _ASCII
    lines: list[str] = []
    # A stack, not recursion: chains are thousands of blocks deep.
    # Entries: block, what stands before it, what stands before its children.
    waiting = [(0, "", "")]
    while waiting and len(lines) < nodes:
        number, before, below = waiting.pop()
        if len(before) > _DEEPEST_INDENT:
            before = cut + before[-_DEEPEST_INDENT + 1 :]
        lines.append(before + blocks[number].label(unicode))
        children = blocks[number].children
        if len(children) == 1:
            waiting.append((children[0], below + only, below))
            continue
        for child in reversed(children):
            stroke, rest = (last, blank) if child == children[-1] else (fork, down)
            waiting.append((child, below + stroke, below + rest))
    if len(blocks) > len(lines):
        lines.append(f"... {len(blocks) - len(lines)} more")
    return lines


def escaped(text: str, unicode: bool = True, longest: int = 200) -> str:
    """Text from a trace on one line, with everything escaped that could steer a terminal."""
    cut = text[:longest]
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in cut
    )
    if not unicode:
        shown = shown.encode("ascii", "backslashreplace").decode("ascii")
    return shown + ("..." if len(text) > longest else "")
