"""A literal, slow re-implementation of the replay loop, for oracles to decide in.

No arrays, no runs, no shared code with the package: rows are walked one at a time, every token is a
record, every score is a running Python sum.  An oracle is a class with methods `step` (after every
decode iteration), `prefill`, `transition`, `boundary` and `prune`, which changes `world.tier`.
"""

from __future__ import annotations

from typing import Any

from arborsim.trace.episode import Episode

HBM, HBM_Q, HBM_C, DDR, DDR_Q, DDR_C, EVICTED = range(7)
UNREAD = 16
PREFILL, TOKEN, TRANSITION, BOUNDARY, PRUNE, ANSWER = range(6)


class SlowWorld:
    """Tokens, nodes and tiers of one episode, rebuilt row by row."""

    def __init__(self, episode: Episode, budget: int, groups: int = 1) -> None:
        self.groups = groups
        self.episode = episode
        self.budget = budget
        self.vocab = episode.info.geometry.vocab
        self.layers = episode.info.geometry.layers
        self.tiers: list[list[int]] = [[] for _ in range(groups)]
        self.node: list[int] = []
        self.blocks: list[list[int]] = []
        self.parent: list[int] = []
        self.depth: list[int] = []
        self.reward: list[float] = []
        self.entropy: list[float] = []
        self.closed: list[bool] = []
        self.pruned: set[int] = set()
        self.last_active: list[int] = []
        self.leaves: tuple[int, ...] = ()
        self.transitions = 0
        self.iterations = 0
        self.prompt = 0
        self.attended: list[float] = []  # by every later query and itself
        self.attended_later: list[float] = []  # by queries of other blocks
        self.unread: list[set[int]] = [set() for _ in range(groups)]  # tokens that are not read
        self.snapshots: list[list[int]] = []

    @property
    def tier(self) -> list[int]:
        """Tiers of the first group (the only one of shared policies)."""
        return self.tiers[0]

    # --- geometry, all by brute force -------------------------------------------------

    def chain(self, node: int) -> list[int]:
        chain = []
        while node >= 0:
            chain.insert(0, node)
            node = self.parent[node]
        return chain

    def block(self, node: int) -> list[int]:
        return self.blocks[node]

    def path(self, leaf: int) -> list[int]:
        return [t for node in self.chain(leaf) for t in self.blocks[node]]

    def active_nodes(self) -> set[int]:
        return {node for leaf in self.leaves for node in self.chain(leaf)}

    def active_tokens(self) -> list[int]:
        return sorted(t for node in self.active_nodes() for t in self.blocks[node])

    def edges_between(self, a: int, b: int) -> int:
        above_a, above_b = self.chain(a), self.chain(b)
        shared = len(set(above_a) & set(above_b))
        return len(above_a) + len(above_b) - 2 * shared

    def in_hbm(self, group: int = 0) -> int:
        return sum(t in (HBM, HBM_Q, HBM_C) for t in self.tiers[group])

    def off_path_order(self) -> list[int]:
        off = [n for n in range(len(self.parent)) if n not in self.active_nodes()]
        return sorted(off, key=lambda n: (self.last_active[n], -self.depth[n], n))

    # --- the walk ----------------------------------------------------------------------

    def run(self, oracle: Any) -> list[list[int]]:
        """Snapshots of the tiers after each prefill, iteration, transition, boundary and prune.

        With several groups a snapshot is the first group's tiers, then the second's, and so on.
        Tokens that are not read have `UNREAD` added to their tier.
        """
        episode = self.episode
        kinds = [int(k) for k in episode.kind]
        rows = len(kinds)
        token = 0
        i = 0
        while i < rows:
            kind = kinds[i]
            if kind == PREFILL:
                self._open(0, -1)
                while i < rows and kinds[i] == PREFILL:
                    self._token(token, 0)
                    token, i = token + 1, i + 1
                self.prompt = token
                self.leaves = (0,)
                self._touch()
                oracle.prefill(self)
            elif kind == TOKEN:
                iteration = int(episode.iteration[i])
                batch = []
                while i < rows and kinds[i] == TOKEN and int(episode.iteration[i]) == iteration:
                    batch.append(int(episode.node[i]))
                    self._token(token, batch[-1])
                    token, i = token + 1, i + 1
                self.iterations += 1
                oracle.step(self)
            elif kind == TRANSITION:
                leaves = []
                while i < rows and kinds[i] == TRANSITION:
                    node = int(episode.node[i])
                    if node == len(self.parent):
                        self._open(node, int(episode.parent[i]))
                    leaves.append(node)
                    i += 1
                self.leaves = tuple(leaves)
                self._touch()
                oracle.transition(self)
            elif kind == BOUNDARY:
                node = int(episode.node[i])
                self.closed[node] = True
                self.reward[node] = float(episode.reward[i])
                self.entropy[node] = float(episode.entropy[i])
                i += 1
                oracle.boundary(self, node)
            elif kind == PRUNE:
                self.pruned.add(int(episode.node[i]))
                i += 1
                oracle.prune(self)
            else:
                i += 1
            self.snapshots.append([
                tier + UNREAD * (token in unread)
                for tiers, unread in zip(self.tiers, self.unread, strict=True)
                for token, tier in enumerate(tiers)
            ])  # fmt: skip
        return self.snapshots

    def _open(self, node: int, parent: int) -> None:
        self.parent.append(parent)
        self.blocks.append([])
        self.depth.append(0 if parent < 0 else self.depth[parent] + 1)
        self.reward.append(float("nan"))
        self.entropy.append(float("nan"))
        self.closed.append(False)
        self.last_active.append(0)

    def _touch(self) -> None:
        self.transitions += 1
        for node in self.active_nodes():
            self.last_active[node] = self.transitions

    def _token(self, number: int, node: int) -> None:
        for tier in self.tiers:
            tier.append(HBM)
        self.node.append(node)
        self.blocks[node].append(number)
        self.attended.append(0.0)
        self.attended_later.append(0.0)
        if self.episode.attention is not None:
            row = self.episode.attention.row(number)
            for weight, target in zip(row.tolist(), self.path(node), strict=True):
                self.attended[target] += weight
                if self.node[target] != node:
                    self.attended_later[target] += weight
