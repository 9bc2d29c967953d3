"""A search walked over a bank: the driver of `arborsim.searches.base`, on recorded thoughts.

Every thought that runs takes one token per decode iteration, so thoughts end in the order in which
they would end live.  Those that end in one iteration are in the order of the batch.

The *KV size* of a search (Hooper et al. 2025, "ETS", figure 3 and tables 1 and 2) is summed over
its selections: at each, the unique tokens of all unfinished candidates and their ancestors, an
ancestor that several share counted once.

A *candidate* of a selection is a thought that was completed since the selection before and that can
be continued.  In a search by levels (beam search, DVTS, REBASE, ETS, tree of thoughts breadth
first) those are all states that it chooses among.  In a search that is asked whenever a thought
ends, or that comes back to older states, this counts each thought once, when it is complete: what
else is kept shows in peak bytes and byte-seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from arborsim.searches import ROOT, Leaf, Search, ask, handed_in
from arborsim.searches.bank import Thoughts
from arborsim.trace.schema import End


@dataclass(frozen=True)
class DecodeRun:
    """Decode iterations in which the same leaves took one token each."""

    leaves: tuple[int, ...]  #: in the order of the batch
    iterations: int  #: 0 if it only states that `broken` thoughts could not go on
    ended: tuple[int, ...] = ()  #: thoughts that are complete after the last iteration, in order
    broken: tuple[int, ...] = ()  #: thoughts whose recording stopped before they were complete


@dataclass(frozen=True)
class Step:
    """One selection: the search was shown the frontier, and answered."""

    iteration: int  #: decode iterations done before
    completed: tuple[int, ...]  #: thoughts completed since the step before, in order
    candidates: tuple[int, ...]  #: those of them that can be continued
    dropped: tuple[int, ...]  #: nodes given up, deepest first
    opened: tuple[int, ...]  #: nodes opened, in order
    misses: int  #: children that were asked for and not recorded
    kv_tokens: int  #: unique tokens of the candidates and their ancestors, without the prompt
    runs: tuple[DecodeRun, ...] = ()  #: what was decoded until the next step


@dataclass(frozen=True, eq=False)
class Walk:
    """A search's run on a bank.  Nodes are numbered in order of opening, and 0 is the prompt."""

    search: str
    bank_node: tuple[int, ...]  #: number of each node in the bank
    #: Of each node, as in `Thoughts`.
    parent: tuple[int, ...]
    depth: tuple[int, ...]
    tokens: tuple[int, ...]  #: decoded: fewer than recorded for a thought that still ran at the end
    score: tuple[float, ...]
    #: As the search saw them at last (a repeated thought is dead).
    finished: tuple[bool, ...]
    dead: tuple[bool, ...]
    steps: tuple[Step, ...]
    candidates: tuple[int, ...]  #: the answers that the search handed in, best first
    answer: int  #: the first right one of them, or else the first
    correct: bool | None  #: None: not judged
    #: Children that were asked for and not recorded, and thoughts whose end was not.
    bank_misses: int
    prompt_tokens: int

    @property
    def model_calls(self) -> int:
        """Thoughts opened: each is one request to the model."""
        return len(self.bank_node) - 1

    @property
    def iterations(self) -> int:
        """Decode iterations: forward passes over a batch of thoughts."""
        return sum(run.iterations for step in self.steps for run in step.runs)

    @property
    def generated_tokens(self) -> int:
        return sum(self.tokens[1:])

    @property
    def selections(self) -> int:
        """Steps that had candidates."""
        return sum(1 for step in self.steps if step.candidates)

    @property
    def kv_tokens(self) -> int:
        """KV size, in tokens, without the prompt."""
        return sum(step.kv_tokens for step in self.steps)

    @property
    def kv_tokens_with_prompt(self) -> int:
        """The same, with the prompt counted once per selection."""
        return self.kv_tokens + self.prompt_tokens * self.selections


def walk(search: Search, bank: Thoughts, dedupe: bool = True) -> Walk:
    """Run `search`, a new object, on `bank`.

    Expanding a node hands out its next recorded children that this search has not seen.  A node
    that has run out of them is dead from then on.  The search is asked again if nothing runs.  With
    `dedupe` a thought that repeats a complete sibling is dead, as in a live run, unless the
    search's `keeps_duplicates` says that they count.
    """
    return _Driver(search, bank, dedupe).run()


@dataclass
class _Node:
    recorded: int  # its number in the bank
    parent: int
    depth: int
    tokens: int  # own, as far as decoded once the walk is over
    path_tokens: int
    began: int  # decode iterations done when it was opened
    leaf: Leaf | None = None  # once it is complete
    visits: int = 0  # children handed out


class _Driver:
    def __init__(self, search: Search, bank: Thoughts, dedupe: bool) -> None:
        self.search, self.bank = search, bank
        self._dedupe = dedupe and not search.keeps_duplicates
        root = Leaf(ROOT, -1, 0, float("nan"))
        self._nodes = [_Node(ROOT, -1, 0, bank.prompt_tokens, 0, 0, root)]
        self._frontier = {ROOT: root}
        self._said: dict[tuple[int, int], int] = {}  # content -> complete in the frontier
        self._first: dict[tuple[int, int], int] = {}  # content -> first complete node
        self._active: list[int] = []
        self._ends: dict[int, int] = {}  # running node -> iteration of its last recorded token
        self._iteration = 0
        self._late_misses = 0
        self._steps: list[Step] = []
        self._completed: list[int] = []
        self._runs: list[DecodeRun] = []

    def run(self) -> Walk:
        while True:
            if not self._active or not self.search.synchronous:
                done, ran_out = self._select()
                if done:
                    break
                if ran_out and not (self._active and self.search.synchronous):
                    continue  # it may want something else instead
            if not self._active:
                break
            while self._active and not self._decode():
                pass
        return self._result()

    def _select(self) -> tuple[bool, bool]:
        """Ask the search once, and return whether it is over, and whether a node has run out."""
        self._end_step()
        wish = ask(self.search, self._frontier, self.search.slots - len(self._active))
        completed = tuple(self._completed)
        candidates = tuple(n for n in completed if self._frontier[n].expandable)
        self._completed.clear()
        for node in wish.dropped:
            del self._frontier[node]
            self._said[self._content(node)] -= 1
        opened, misses, ran_out = ((), 0, False) if wish.done else self._open(wish.children)
        kv_tokens = self._unique_tokens(candidates)
        self._steps.append(
            Step(self._iteration, completed, candidates, wish.dropped, opened, misses, kv_tokens)
        )
        return wish.done, ran_out

    def _end_step(self) -> None:
        if self._runs:
            self._steps[-1] = replace(self._steps[-1], runs=tuple(self._runs))
            self._runs.clear()

    def _unique_tokens(self, nodes: Iterable[int]) -> int:
        """Tokens on the paths from below the prompt to `nodes`, each counted once."""
        seen = {ROOT}
        total = 0
        for node in nodes:
            while node not in seen:
                seen.add(node)
                total += self._nodes[node].tokens
                node = self._nodes[node].parent
        return total

    def _open(self, wanted: Mapping[int, int]) -> tuple[tuple[int, ...], int, bool]:
        """Hand out children, and return the new nodes, the misses, and whether a node ran out."""
        opened, misses, ran_out = [], 0, False
        for number, count in wanted.items():
            node = self._nodes[number]
            given = self.bank.below(node.recorded, node.visits, count)
            node.visits += len(given)
            for recorded in given:
                child, own = len(self._nodes), self.bank.tokens[recorded]
                path_tokens = node.path_tokens + own
                self._nodes.append(
                    _Node(recorded, number, node.depth + 1, own, path_tokens, self._iteration)
                )
                self._ends[child] = self._iteration + own
                opened.append(child)
            leaf = replace(self._frontier[number], visits=node.visits)
            if len(given) < count:
                misses += count - len(given)
                ran_out = ran_out or not leaf.dead
                leaf = replace(leaf, dead=True)
            self._frontier[number] = leaf
        self._active += opened
        return tuple(opened), misses, ran_out

    def _decode(self) -> bool:
        """Decode until a thought's last recorded token, and return whether any is complete."""
        leaves = tuple(self._active)
        broken = tuple(n for n in leaves if self._ends[n] == self._iteration)
        if broken:  # the search goes on for longer than the recording of these did
            self._late_misses += len(broken)
            self._runs.append(DecodeRun(leaves, 0, broken=broken))
            self._leave(broken)
            return True
        until = min(self._ends[n] for n in leaves)
        taken, self._iteration = until - self._iteration, until
        complete = self.bank.complete
        over = (n for n in leaves if self._ends[n] == until)
        ended = tuple(n for n in over if complete[self._nodes[n].recorded])
        self._runs.append(DecodeRun(leaves, taken, ended))
        self._leave(ended)
        return bool(ended)

    def _leave(self, nodes: tuple[int, ...]) -> None:
        for node in nodes:
            self._close(node)
            del self._ends[node]
        self._active = [n for n in self._active if n in self._ends]
        self._completed += nodes

    def _close(self, number: int) -> None:
        bank, node = self.bank, self._nodes[number]
        end = bank.end[node.recorded]
        finished = end == End.FINISHED
        dead = end == End.DEAD or not bank.complete[node.recorded]
        content = self._content(number)
        same = self._said.get(content, 0)
        if same and self._dedupe:
            finished, dead = False, True
        self._said[content] = same + 1
        at = node.recorded
        node.leaf = self._frontier[number] = Leaf(
            number, node.parent, node.depth, bank.score[at], finished, dead, 0, node.path_tokens,
            bank.embedding.get(at), bank.answer[at], bank.text[at], bank.entropy[at],
            bank.logprob[at], self._first.setdefault(content, number),
        )  # fmt: skip

    def _content(self, number: int) -> tuple[int, int]:
        """The same for siblings that say the same."""
        node = self._nodes[number]
        return node.parent, self.bank.twin[node.recorded]

    def _result(self) -> Walk:
        self._end_step()
        nodes = self._nodes
        for number in self._ends:  # still running: only what was decoded counts
            nodes[number].tokens = self._iteration - nodes[number].began
        candidates = handed_in(self.search, self._frontier, len(nodes))
        verdicts = [self._verdict(nodes[number].recorded) for number in candidates]
        right = [number for number, verdict in zip(candidates, verdicts, strict=True) if verdict]
        unknown = None in verdicts and not right
        # The frontier has the last word on a leaf: a state that has run out of children is dead.
        leaves = [self._frontier.get(number, node.leaf) for number, node in enumerate(nodes)]
        return Walk(
            search=self.search.name,
            bank_node=tuple(node.recorded for node in nodes),
            parent=tuple(node.parent for node in nodes),
            depth=tuple(node.depth for node in nodes),
            tokens=tuple(node.tokens for node in nodes),
            score=tuple(float("nan") if leaf is None else leaf.score for leaf in leaves),
            finished=tuple(leaf is not None and leaf.finished for leaf in leaves),
            dead=tuple(leaf is not None and leaf.dead for leaf in leaves),
            steps=tuple(self._steps),
            candidates=tuple(candidates),
            answer=right[0] if right else candidates[0],
            correct=True if right else None if unknown else False,
            bank_misses=self._late_misses + sum(step.misses for step in self._steps),
            prompt_tokens=self.bank.prompt_tokens,
        )

    def _verdict(self, recorded: int) -> bool | None:
        """Whether a candidate answer is right.  One that holds no answer is wrong."""
        verdict = self.bank.verdict[recorded]
        if verdict is None and self.bank.judged and self.bank.end[recorded] != End.FINISHED:
            return False
        return verdict
