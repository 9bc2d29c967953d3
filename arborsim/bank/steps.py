"""What a search did on a bank, step by step: the record that a walk leaves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stretch:
    """Decode iterations in which the same leaves took one token each.

    Attributes
    ----------
    leaves : tuple of int
        In the order of the batch.
    iterations : int
        0 if the stretch only says that `broken` thoughts could not go on.
    ended : tuple of int
        Thoughts that are complete after the last iteration, in order.
    broken : tuple of int
        Thoughts whose recording stopped here, before they were complete.
    """

    leaves: tuple[int, ...]
    iterations: int
    ended: tuple[int, ...] = ()
    broken: tuple[int, ...] = ()


@dataclass(frozen=True)
class Step:
    """One selection: the search was shown the frontier, and answered.

    Attributes
    ----------
    iteration : int
        Decode iterations done before.
    completed : tuple of int
        Thoughts completed since the step before, in order.
    candidates : tuple of int
        Those of them that can be continued.
    dropped : tuple of int
        Nodes given up, deepest first.
    opened : tuple of int
        Nodes opened, in order.
    misses : int
        Children that were asked for and not recorded.
    kv_tokens : int
        Unique tokens of the candidates and their ancestors, without the prompt.
    stretches : tuple of Stretch
        What was decoded until the next step.
    """

    iteration: int
    completed: tuple[int, ...]
    candidates: tuple[int, ...]
    dropped: tuple[int, ...]
    opened: tuple[int, ...]
    misses: int
    kv_tokens: int
    stretches: tuple[Stretch, ...] = ()


@dataclass(frozen=True, eq=False)
class Walk:
    """What a search did on a bank.  Nodes are numbered in order of opening; 0 is the prompt.

    Attributes
    ----------
    search : str
    bank_node, parent, depth, tokens : tuple of int
        Per node: its number in the bank, and as in `Bank` (`tokens` are those that were decoded:
        fewer than recorded for a thought that still ran at the end).
    score : tuple of float
    finished, dead : tuple of bool
        As the search saw them at last (a repeated thought is dead).
    steps : tuple of Step
    candidates : tuple of int
        The answers that the search handed in, best first.
    answer : int
        The first right one of them, or else the first.
    correct : bool or None
        None: not judged.
    bank_misses : int
        Children that were asked for and not recorded, and thoughts whose end was not.
    prompt_tokens : int
    """

    search: str
    bank_node: tuple[int, ...]
    parent: tuple[int, ...]
    depth: tuple[int, ...]
    tokens: tuple[int, ...]
    score: tuple[float, ...]
    finished: tuple[bool, ...]
    dead: tuple[bool, ...]
    steps: tuple[Step, ...]
    candidates: tuple[int, ...]
    answer: int
    correct: bool | None
    bank_misses: int
    prompt_tokens: int

    @property
    def model_calls(self) -> int:
        """Thoughts opened: each is one request to the model."""
        return len(self.bank_node) - 1

    @property
    def iterations(self) -> int:
        """Decode iterations: forward passes over a batch of thoughts."""
        return sum(s.iterations for step in self.steps for s in step.stretches)

    @property
    def generated_tokens(self) -> int:
        return sum(self.tokens[1:])

    @property
    def selections(self) -> int:
        """Steps that had candidates."""
        return sum(1 for step in self.steps if step.candidates)

    @property
    def kv_tokens(self) -> int:
        """KV size (`arborsim.bank.kv`), in tokens, without the prompt."""
        return sum(step.kv_tokens for step in self.steps)

    @property
    def kv_tokens_with_prompt(self) -> int:
        """The same, with the prompt counted once per selection."""
        return self.kv_tokens + self.prompt_tokens * self.selections
