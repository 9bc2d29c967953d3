"""How a bank is grown: dense, or just what some searches ask for.

`Dense` opens a fixed number of children per node, whatever they are worth: a bank for any search.

`SharedTree` runs several searches over one tree.  A search that asks for children gets those that
are recorded and that it has not had, in order of opening.  Only what is missing is opened.  Every
search sees nothing but what it was handed out, in the order and at the iterations at which it would
see it alone.  So the tree, as a bank, has every thought that each of the searches asks for when it
is run on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from arborsim.core.errors import UsageError
from arborsim.searches import base

MOST_NODES = 1_000_000  #: a tree that may grow larger is refused


@dataclass
class Dense(base.Search):
    """Every node that can be continued gets the children of its depth.

    The deepest nodes come first, and a node is given up as soon as everything below it is complete:
    the keys and values of few paths are held at once.  Raises `UsageError` if a number is below 1,
    or the tree may have more than `MOST_NODES` nodes.
    """

    name = "dense"
    synchronous = False
    keeps_duplicates = True
    #: Children per node at depth 0, 1, ...; the last entry holds for deeper nodes, too
    children: tuple[int, ...] = (8,)
    depth: int = 0  # of the last level; 0 for as many as `children` has entries
    slots: int = 256  # thoughts that may run at once
    _known: dict[int, base.Leaf] = field(default_factory=dict, init=False, repr=False)
    _opened: dict[int, int] = field(default_factory=dict, init=False, repr=False)
    _open_below: dict[int, int] = field(default_factory=dict, init=False, repr=False)
    _finished: list[base.Leaf] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.children or min(*self.children, self.slots) < 1 or self.depth < 0:
            raise UsageError("children per node are 1 or more, and so are the thoughts at once")
        self.depth = self.depth or len(self.children)
        if self.largest > MOST_NODES:
            raise UsageError(
                f"{','.join(map(str, self.children))} children to depth {self.depth} may be "
                f"{self.largest:.3g} thoughts per problem, more than {MOST_NODES}: ask for fewer "
                "children per depth, or for less depth"
            )

    @property
    def largest(self) -> int:
        """Most thoughts that the tree can have."""
        level, total = 1, 0
        for depth in range(self.depth):
            level *= self._children_at(depth)
            total += level
            if total > MOST_NODES:  # how much more does not matter
                break
        return total

    def _children_at(self, depth: int) -> int:
        return self.children[min(depth, len(self.children) - 1)]

    def expand(self, frontier: base.Leaves, width: int) -> base.Expansion:
        dropped: list[base.Leaf] = []
        for leaf in base.newest(frontier, self._known):
            self._enter(leaf, dropped)
        children: dict[int, int] = {}
        waiting = sorted(self._opened, key=lambda n: (-self._known[n].depth, n))
        for node in waiting:
            now = min(width, self._children_at(self._known[node].depth) - self._opened[node])
            if now == 0:
                break
            children[node] = now
            width -= now
            self._opened[node] += now
            self._open_below[node] += now
            if self._opened[node] == self._children_at(self._known[node].depth):
                del self._opened[node]
        over = not children and not any(self._open_below.values())
        return base.Expansion(children, base.deepest_first(dropped), done=over)

    def _enter(self, leaf: base.Leaf, dropped: list[base.Leaf]) -> None:
        """A thought is complete: it waits for children, or is given up with what is above it."""
        self._known[leaf.node] = leaf
        if leaf.expandable and leaf.depth < self.depth:
            self._opened[leaf.node] = self._open_below[leaf.node] = 0
            return
        if leaf.finished:
            self._finished.append(leaf)
        dropped.append(leaf)
        node = leaf.parent
        while node in self._open_below:
            self._open_below[node] -= 1
            if self._open_below[node] or node in self._opened:
                return
            del self._open_below[node]
            if node != base.ROOT:
                dropped.append(self._known[node])
            node = self._known[node].parent

    def answers(self, frontier: base.Leaves) -> tuple[int, ...]:
        """All finished thoughts: whether any is right bounds what a search can find."""
        return tuple(leaf.node for leaf in base.best_first(self._finished)) or (base.ROOT,)


@dataclass
class SharedTree(base.Search):
    """Runs `searches` together on the thoughts that one driver grows.

    The driver must not mark duplicates as dead, but give every leaf its `twin`.
    """

    name = "shared-tree"
    synchronous = False
    keeps_duplicates = True
    searches: Sequence[base.Search]  # new objects
    slots: int = 256  # thoughts that may run at once, of all searches together
    #: A thought that repeats one of its siblings is dead, for each search that does not keep
    #: duplicates
    dedupe: bool = True
    _tree: _Tree = field(init=False, repr=False)
    _walks: list[Iterator[None]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise UsageError("at least one thought must be able to run at once")
        self._tree = _Tree()
        self._walks = [_Walk(search, self._tree, self.dedupe).run() for search in self.searches]

    @property
    def uses_embeddings(self) -> bool:
        return any(search.uses_embeddings for search in self.searches)

    def expand(self, frontier: base.Leaves, width: int) -> base.Expansion:
        self._tree.note(frontier)
        self._walks = [walk for walk in self._walks if next(walk, _OVER) is not _OVER]
        children = self._tree.open(width)
        return base.Expansion(children, done=not (self._walks or children or self._tree.running))

    def answers(self, frontier: base.Leaves) -> tuple[int, ...]:
        """All finished thoughts: whether any is right bounds what each of the searches can find."""
        return tuple(x.node for x in base.best_first(x for x in frontier if x.finished)) or (
            base.ROOT,
        )


_OVER = object()


class _Tree:
    """The thoughts that are open or asked for."""

    def __init__(self) -> None:
        self.leaf: list[base.Leaf | None] = [None]  # of each node, once it is complete
        self.children: list[list[int]] = [[]]  # of each node, in order of opening
        self.running = 1  # open nodes that are not complete: the prompt, until the driver shows it
        self._wanted = [0]  # children of each node, those to be opened included
        self._queue: dict[int, int] = {}  # node -> children to be opened, in order of asking

    def note(self, frontier: base.Leaves) -> None:
        """Take in the leaves that are new: the last ones of a frontier in order of completion."""
        for leaf in reversed(frontier):
            if self.leaf[leaf.node] is not None:
                return
            self.leaf[leaf.node] = leaf
            self.running -= 1

    def want(self, node: int, count: int) -> None:
        """`count` children of `node` are needed in all."""
        more = count - self._wanted[node]
        if more > 0:
            self._wanted[node] = count
            self._queue[node] = self._queue.get(node, 0) + more

    def open(self, width: int) -> dict[int, int]:
        """Open what was asked for, at most `width` children, which the driver numbers alike."""
        opened: dict[int, int] = {}
        while self._queue and width > 0:
            node, count = next(iter(self._queue.items()))
            now = min(count, width)
            opened[node] = now
            width -= now
            if now == count:
                del self._queue[node]
            else:
                self._queue[node] = count - now
            for _ in range(now):
                self.children[node].append(len(self.leaf))
                self.leaf.append(None)
                self.children.append([])
                self._wanted.append(0)
            self.running += now
        return opened


class _Walk:
    """One search, with node numbers of its own: in order of opening, as if it were alone."""

    def __init__(self, search: base.Search, tree: _Tree, dedupe: bool) -> None:
        self.search, self.tree = search, tree
        self._dedupe = dedupe and not search.keeps_duplicates
        self._of = [base.ROOT]  # node of the tree
        self._parent = [-1]
        self._visits = [0]
        self._ends = [0]  # iteration of the last token
        self._frontier: dict[int, base.Leaf] = {}
        self._said: dict[tuple[int, int], int] = {}  # (parent, twin) -> complete, not given up
        self._active: list[int] = []
        self._iteration = 0

    def run(self) -> Iterator[None]:
        """The search as a coroutine that waits, by yielding, for thoughts of the tree."""
        while self.tree.leaf[base.ROOT] is None:
            yield
        self._frontier[base.ROOT] = self._leaf(base.ROOT)
        while True:
            if not self._active or not self.search.synchronous:
                free = self.search.slots - len(self._active)
                wish = base.ask(self.search, self._frontier, free)
                for node in wish.dropped:
                    del self._frontier[node]
                    self._said[self._content(node)] -= 1
                if wish.done:
                    return
                yield from self._open(wish)
            if not self._active:
                return
            yield from self._decode()

    def _open(self, wish: base.Expansion) -> Iterator[None]:
        for node, count in wish.children.items():
            self.tree.want(self._of[node], self._visits[node] + count)
        for node, count in wish.children.items():
            first = self._visits[node]
            recorded = self.tree.children[self._of[node]]
            while len(recorded) < first + count:
                yield
            for child in recorded[first : first + count]:
                self._active.append(len(self._of))
                self._of.append(child)
                self._parent.append(node)
                self._visits.append(0)
                self._ends.append(-1)  # as long as it is not known
            self._visits[node] += count
            self._frontier[node] = replace(self._frontier[node], visits=self._visits[node])

    def _decode(self) -> Iterator[None]:
        """Go on to the next iteration in which a thought ends."""
        for node in self._active:
            if self._ends[node] < 0:
                while self.tree.leaf[self._of[node]] is None:
                    yield
                above = self._leaf(self._parent[node]).tokens
                self._ends[node] = self._iteration + self._leaf(node).tokens - above
        self._iteration = min(self._ends[node] for node in self._active)
        ended = [n for n in self._active if self._ends[n] == self._iteration]
        self._active = [n for n in self._active if self._ends[n] > self._iteration]
        for node in ended:
            self._close(node)

    def _leaf(self, node: int) -> base.Leaf:
        leaf = self.tree.leaf[self._of[node]]
        assert leaf is not None, "a walk goes on once its thoughts are complete"
        return leaf

    def _close(self, node: int) -> None:
        leaf, content = self._leaf(node), self._content(node)
        repeats = self._said.get(content, 0) > 0 and self._dedupe
        self._said[content] = self._said.get(content, 0) + 1
        own = replace(leaf, node=node, parent=self._parent[node], visits=0, twin=None)
        finished, dead = leaf.finished and not repeats, leaf.dead or repeats
        self._frontier[node] = replace(own, finished=finished, dead=dead)

    def _content(self, node: int) -> tuple[int, int]:
        """The same for siblings that say the same."""
        leaf = self._leaf(node)
        return self._parent[node], leaf.node if leaf.twin is None else leaf.twin
