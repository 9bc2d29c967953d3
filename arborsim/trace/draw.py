"""Draw the tree of a recorded search as lines of text."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from arborsim.trace.episode import Episode
from arborsim.trace.schema import Kind

_DEEPEST_INDENT = 36
_MOST_VISITS = 4


@dataclass(frozen=True)
class Strokes:
    """The characters that make a tree."""

    fork: str
    last: str
    only: str
    down: str
    blank: str
    cut: str


UNICODE = Strokes(fork="├─ ", last="└─ ", only="↓  ", down="│  ", blank="   ", cut="…")
ASCII = Strokes(fork="|- ", last="`- ", only="v  ", down="|  ", blank="   ", cut="~")


@dataclass(frozen=True)
class DrawnNode:
    """What one line says about a block.

    Attributes
    ----------
    tokens : int
        Own tokens.
    reward : float
        NaN if there is none.
    closed, pruned, on_answer_path : bool
    visits : tuple of int
        The transitions, counted from 1, that turned to it.
    text : str or None
    """

    number: int
    parent: int
    tokens: int
    reward: float
    closed: bool
    pruned: bool
    on_answer_path: bool
    visits: tuple[int, ...]
    text: str | None

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
        text = f" | {plain(self.text, unicode)}" if self.text else ""
        return f"{self.number}{star} ({', '.join(about)}){text}"


def drawn_nodes(episode: Episode) -> list[DrawnNode]:
    """Every block of a search, by number."""
    kind, node = episode.kind, episode.node
    count = int(node.max()) + 1
    parent = np.full(count, -1)
    parent[node] = episode.parent
    tokens = np.bincount(node[episode.token_rows], minlength=count)
    visits: list[list[int]] = [[] for _ in range(count)]
    closed, pruned = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
    reward = np.full(count, math.nan)
    text: list[str | None] = [None] * count
    batch = 0
    for row in np.flatnonzero(kind > Kind.TOKEN).tolist():
        n = int(node[row])
        if kind[row] == Kind.TRANSITION:
            batch += kind[row - 1] != Kind.TRANSITION
            visits[n].append(int(batch))
        elif kind[row] == Kind.BOUNDARY:
            closed[n] = True
            reward[n] = episode.reward[row]
            text[n] = episode.text[row] if episode.text else None
        elif kind[row] == Kind.PRUNE:
            pruned[n] = True
    on_path = set()
    up = int(node[-1]) if kind[-1] == Kind.ANSWER else -1
    while up >= 0:
        on_path.add(up)
        up = int(parent[up])
    return [
        DrawnNode(
            n, int(parent[n]), int(tokens[n]), float(reward[n]), bool(closed[n]), bool(pruned[n]),
            n in on_path, tuple(visits[n]), text[n],
        )
        for n in range(count)
    ]  # fmt: skip


def draw_tree(episode: Episode, nodes: int = 24, unicode: bool = True) -> list[str]:
    """Lines of text, one per block, depth first.

    A block's only child is drawn below it in the same column, so a long chain does not drift to
    the right.  ``*`` marks the path to the answer.

    Parameters
    ----------
    episode : Episode
        Read with ``text=True`` for snippets of text.
    nodes : int
        Most blocks to draw; a last line counts the others.
    unicode : bool
        Box-drawing characters, or plain ASCII throughout.
    """
    drawn = drawn_nodes(episode)
    strokes = UNICODE if unicode else ASCII
    children: list[list[int]] = [[] for _ in drawn]
    for block in drawn[1:]:
        children[block.parent].append(block.number)
    lines: list[str] = []
    # A stack, not recursion: chains are thousands of blocks deep.
    # Entries: block, what stands before it, what stands before its children.
    waiting = [(0, "", "")]
    while waiting and len(lines) < nodes:
        number, before, below = waiting.pop()
        lines.append(_shorten(before, strokes) + drawn[number].label(unicode))
        below_own = children[number]
        if len(below_own) == 1:
            waiting.append((below_own[0], below + strokes.only, below))
            continue
        for child in reversed(below_own):
            last = child == below_own[-1]
            stroke, rest = (strokes.last, strokes.blank) if last else (strokes.fork, strokes.down)
            waiting.append((child, below + stroke, below + rest))
    if len(drawn) > len(lines):
        lines.append(f"... {len(drawn) - len(lines)} more")
    return lines


def _shorten(before: str, strokes: Strokes) -> str:
    """Cut the left part of a very deep indent."""
    if len(before) <= _DEEPEST_INDENT:
        return before
    return strokes.cut + before[-_DEEPEST_INDENT + 1 :]


def plain(text: str, unicode: bool = True, longest: int = 200) -> str:
    """Text from a trace on one line, with everything escaped that could steer a terminal."""
    cut = text[:longest]
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in cut
    )
    if not unicode:
        shown = shown.encode("ascii", "backslashreplace").decode("ascii")
    return shown + ("..." if len(text) > longest else "")
