"""Given tokens under policies and masks, a window of them at a time.

What a policy has masked by then depends on what earlier tokens observed.  So the masks of a window
of known tokens are guessed, one forward pass computes them all, and the policy, on a copy of its
state, says from what was observed which masks there should have been.  Up to the first query whose
mask was another, everything is what token by token would have computed: it is kept, the window
moves on, and what the policy said is the next guess.  Quantised tokens are rounded between two
windows, so a window ends with the first that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arborsim.core.observations import Signal
from arborsim.core.row_uses import RowUse
from arborsim.play.episode import Cell
from arborsim.policies.base import row_uses
from arborsim.policies.methods.baselines import Full
from arborsim_torch.masked.executor import MaskedExecutor, Rounding
from arborsim_torch.masked.follower import Follower, ReadersOf, check
from arborsim_torch.masked.observed import Found, Observing

#: Takes the number of a cell, a position, and the logits after the tokens from there on, float32
#: ``[n, vocabulary]``.
Consume = Callable[[int, int, Tensor], None]
_TOGETHER = 8  # cells that share a pass of full retention: each has a table of its own
PROMPT_BLOCK = 256  # tokens of a prompt that are computed at once
LARGEST, _LEAST = 256, 4  # tokens of a window
_REACH = 2  # a window is larger by this than what windows of late have done


@dataclass
class ForcedRun:
    """One cell's run over given tokens.

    Attributes
    ----------
    read : list of float
        Tokens that the query at each decoded position read, itself included: mean of the groups.
    passes, computed
        Forward passes after the prompt, and tokens that they computed.
    infeasible
        Why the policy could not go on; empty if it could.
    """

    follower: Follower
    read: list[float] = field(default_factory=list)
    passes: int = 0
    computed: int = 0

    @property
    def infeasible(self) -> str:
        return self.follower.infeasible


class Windows(Observing):
    """A table of one chain whose newest queries read what a guess says."""

    guess: Tensor  #: bool ``[groups, count, tokens]``: what the window's queries leave out

    @contextmanager
    def guessing(self) -> Iterator[None]:
        """Meanwhile queries read what the guess says."""
        self._guessed = True
        yield
        self._guessed = False

    _guessed = False

    def unread(self, layer: int, count: int, end: int) -> Tensor:
        if not self._guessed:
            return super().unread(layer, count, end)
        each = len(self.guess) // self.layers
        own = self.guess[layer * each : (layer + 1) * each] if each else self.guess
        return own[None, :, None]

    def twin(self) -> Windows:
        """A table that goes on from here by itself."""
        twin = Windows(self.model, self.rows, self.keys[0].shape[2])
        for mine, its in zip((*self.keys, *self.values), (*twin.keys, *twin.values), strict=True):
            its[:, :, : self.length] = mine[:, :, : self.length]
        twin.return_to(self.mark())
        return twin


#: Of last hidden states ``[n, size]``, how many of these tokens stand: at least one.
Accept = Callable[[Tensor], int]


class Forcing:
    """A policy's way through given tokens, on a table of its own, from `follower`'s prompt on.

    `done` are the tokens that followed the prompt.
    """

    def __init__(self, table: Windows, follower: Follower, block: int) -> None:
        self.table, self.run = table, ForcedRun(follower)
        self._stood = block / _REACH  # tokens that were done by a window of late
        self.done: list[int] = []
        self._guess: Follower | None = None  # says what the next queries are to leave out

    @property
    def follower(self) -> Follower:
        return self.run.follower

    @property
    def window(self) -> int:
        """Tokens to try at once: some times what windows of late have done, `block` at first."""
        return min(LARGEST, max(_LEAST, int(_REACH * self._stood)))

    def advance(
        self, tokens: Sequence[int], full: Found | None = None, accept: Accept | None = None
    ) -> Tensor:
        """Compute the next tokens: hidden states ``[n, size]`` of those that are done now.

        `full` is what full retention observed of them, and maybe of later ones, of which masks are
        guessed that nothing else is known of.
        """
        table, first, count = self.table, self.follower.known, len(tokens)
        carry_out(table, 0, self.follower.executor)
        self.follower.executor.forget(first)
        said = [*self.done, *tokens]
        guess = self._guess or self.follower.copy()
        if full is not None and (ahead_by := guess.known - first) < count:
            rest = {name: each[ahead_by:count] for name, each in full.items()}
            guess.take(tokens[ahead_by:], seen_by(guess, rest), said)
        rounded = [each.first - first for each in guess.executor.roundings if each.first > first]
        count = min([count, *rounded])
        tokens, said = tokens[:count], [*self.done, *tokens[:count]]
        masks = guess.executor.unread(first, count)
        table.guess = torch.from_numpy(masks).to(table.model.device)
        mark = table.mark()
        with table.guessing():
            hidden = table.forward(torch.tensor([tokens], device=table.model.device))[0]
        (found,) = table.take(count)
        ahead = self.follower.copy()
        ahead.take(tokens, found, said)
        right = _right(ahead, masks, first, count)
        if accept is not None:
            right = accept(hidden[:right])
        self.done += tokens[:right]
        self._stood = (self._stood + right) / 2
        self.run.passes, self.run.computed = self.run.passes + 1, self.run.computed + count
        self.run.read += (~masks[:, :right]).sum(2).mean(0).tolist()
        if right == count:
            self.run.follower, self._guess = ahead, None
        else:
            part = {name: each[:right] for name, each in found.items()}
            self.follower.take(tokens[:right], part, self.done)
            table.rewind(mark, right)
            self._guess = None if ahead.infeasible else ahead
        return hidden[:right]


def carry_out(table: Observing, row: int, executor: MaskedExecutor) -> None:
    """Round what a search's executor has decided to round so far."""
    for each in executor.roundings:
        round_tokens(table, row, executor, each)
    executor.roundings.clear()


def round_tokens(table: Observing, row: int, executor: MaskedExecutor, each: Rounding) -> None:
    """Round tokens of one search's cache to a format."""
    layers, heads = table.layers, table.kv_heads
    cells = layers * heads // len(executor.tier)
    for group in np.unique(each.group).tolist():
        token = torch.from_numpy(each.token[each.group == group])
        for cell in range(group * cells, (group + 1) * cells):
            layer, head = divmod(cell, heads)
            kept = table.keys[layer][row, head], table.values[layer][row, head]
            both = torch.stack([own[token] for own in kept])[:, None]  # [2, 1, tokens, head_dim]
            for own, rounded in zip(kept, executor.rounded(each.codec, both), strict=True):
                own[token] = rounded[0]


def _right(ahead: Follower, masks: np.ndarray, first: int, count: int) -> int:
    """How many of a window's queries left out what they should have, at least one."""
    if ahead.infeasible:
        return 1
    wrong = (ahead.executor.unread(first, count) != masks).any((0, 2))
    right = int(wrong.argmax()) if wrong.any() else count
    rounded = [each.first - first for each in ahead.executor.roundings if each.first > first]
    return max(1, min([right, *rounded]))


@torch.inference_mode()
def forced(
    model: Any,
    tokens: Sequence[int],
    prompt_tokens: int,
    cells: Sequence[Cell],
    consume: Consume,
    block: int = 64,
    readers: ReadersOf | None = None,
) -> list[ForcedRun]:
    """Run policies over given tokens, of which the first `prompt_tokens` are the prompt.

    Each cell's logits are those of decoding the tokens one by one and really removing what its
    policy removes.  They come in order of positions, from `prompt_tokens` on: what is expected
    after the token there.  A budget that is a share is one of all tokens.  Full retention is
    computed along, for the first guesses and for cells that are full retention themselves.  Raises
    `UsageError`: a policy that masks cannot serve, before anything is computed.

    Parameters
    ----------
    block
        Tokens of the first window; how many later ones have follows from what these have done.
    readers
        Gives what reads each token, for policies that ask.
    """
    for cell in cells:
        check(cell.policy)
    runs = list[ForcedRun]()
    for start in range(0, len(cells), _TOGETHER):
        own = cells[start : start + _TOGETHER]

        def take(number: int, first: int, logits: Tensor, start: int = start) -> None:
            consume(start + number, first, logits)

        runs += _together(model, list(tokens), prompt_tokens, own, take, block, readers)
    return runs


def _together(
    model: Any,
    tokens: list[int],
    prompt: int,
    cells: Sequence[Cell],
    consume: Consume,
    block: int,
    readers: ReadersOf | None,
) -> list[ForcedRun]:
    full = Windows(model, 1, len(tokens))
    policies = [cell.policy for cell in cells]
    full.observe(
        frozenset[Signal]().union(*(policy.reads() for policy in policies)),
        frozenset[RowUse]().union(*(row_uses(policy) for policy in policies)),
    )
    ids = torch.tensor([tokens], device=model.device)
    _, (found,) = full.prompt(ids[:, :prompt], PROMPT_BLOCK)
    ways = []
    for cell in cells:
        budget = cell.budget.in_tokens(len(tokens))
        follower = Follower(model, cell.policy, budget, len(tokens), readers)
        follower.prompt(tokens[:prompt], seen_by(follower, found))
        table = full
        if not isinstance(cell.policy, Full):
            table = full.twin()
            table.observe(follower.needs, follower.uses)
        ways.append(Forcing(table, follower, block))
    for first in range(prompt, len(tokens), LARGEST):
        last = min(first + LARGEST, len(tokens))
        logits = model.lm_head(full.forward(ids[:, first:last])[0]).float()
        (found,) = full.take(last - first)
        for number, way in enumerate(ways):
            if way.table is full:
                way.follower.take(tokens[first:last], {})
                consume(number, first, logits)
                continue
            while not way.follower.infeasible and (at := way.follower.known) < last:
                stop = min(last, at + way.window)
                guess = {name: each[at - first :] for name, each in found.items()}
                hidden = way.advance(tokens[at:stop], guess)
                consume(number, at, model.lm_head(hidden).float())
    return [way.run for way in ways]


def seen_by(follower: Follower, found: Found) -> Found:
    """The part that one policy reads of what was observed for several."""
    names = {each.value for each in follower.needs} | {"groups", *follower.uses}
    names |= {"rows"} if Signal.ATTENTION in follower.needs else set()
    names |= {Signal.KEYS.value} if Signal.HEAD_ATTENTION in follower.needs else set()
    return {name: each for name, each in found.items() if name in names}
