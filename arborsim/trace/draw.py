"""Draw the tree of a recorded search as lines of text."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from arborsim.trace.episode import Episode
from arborsim.trace.schema import Kind

_DEEPEST_INDENT = 36
_MOST_VISITS = 4


#: Before a child with later siblings, the last child, an only child; below these; a cut indent.
_UNICODE = ("├─ ", "└─ ", "↓  ", "│  ", "   ", "…")
_ASCII = ("|- ", "`- ", "v  ", "|  ", "   ", "~")


@dataclass
class _Block:
    """What one line says about a thought block; visits are numbers of transitions, from 1."""

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
    of text if they were read; a last line counts the others.  Without `unicode`, plain ASCII.
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
