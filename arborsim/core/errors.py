"""Every error a user can cause, as one small tree.

::

    ArborsimError             base: the command line prints it as one line and exits with code 2
    ├── UsageError            a name, number or combination of options that cannot work
    │   └── UnknownName       no policy, GPU, model, ... of that name (carries the nearest names)
    ├── TraceError            a trace file is missing, damaged, or not what was asked for
    │   └── MissingSignal     the trace lacks what a policy reads
    ├── ResultError           figures that no search can have: a damaged file, or a fault
    ├── PlanError             a policy or search asked for something that cannot be done
    └── BudgetInfeasible      protected tokens and floors alone exceed the budget

Messages say what is wrong, where, and what to do about it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ArborsimError(Exception):
    """Base of all errors that a user's input can cause."""


class UsageError(ArborsimError):
    """A name, number or combination of options that cannot work."""


class UnknownName(UsageError):
    """There is no `what`, e.g. ``"policy"``, called `name`. The message has the nearest known.

    `added` says how to add one.  `alike` is the name that is compared, if it is another.
    """

    def __init__(
        self, what: str, name: str, known: Iterable[str], added: str = "", alike: str = ""
    ) -> None:
        self.what = what
        self.name = name
        self.known = sorted(known)
        self.added, self.alike = added, alike
        self.nearest: list[str] = []
        if not self.known:
            super().__init__(f"unknown {what} '{name}': there are none")
            return
        self.nearest = difflib.get_close_matches(alike or name, self.known, n=3, cutoff=0.5)
        meant = f"did you mean {' or '.join(self.nearest)}?"
        hint = meant if self.nearest else f"known: {', '.join(self.known)}"
        more = f" ({added})" if added else ""
        super().__init__(f"unknown {what} '{name}': {hint}{more}")

    def __reduce__(self) -> tuple[type[UnknownName], tuple[str, str, list[str], str, str]]:
        # so that workers can raise it
        return UnknownName, (self.what, self.name, self.known, self.added, self.alike)


class TraceError(ArborsimError):
    """A trace file is missing, damaged, or not what was asked for."""


class MissingSignal(TraceError):
    """The trace lacks an observation that a policy reads."""


class ResultError(ArborsimError):
    """Figures that no search can have: of a damaged file, or by a fault of arborsim's."""


class PlanError(ArborsimError):
    """A policy or search asked for something that cannot be done (a bug in it)."""


class BudgetInfeasible(ArborsimError):
    """Protected tokens and floors alone exceed the budget.

    `made_of` says how `needed_tokens` comes about, e.g. ``"prompt 440 + recent 128"``.
    """

    def __init__(self, policy: str, needed_tokens: int, budget_tokens: int, made_of: str) -> None:
        self.policy = policy
        self.needed_tokens = needed_tokens
        self.budget_tokens = budget_tokens
        self.made_of = made_of
        super().__init__(
            f"budget infeasible for {policy}: {made_of} = {needed_tokens} tokens "
            f"> budget {budget_tokens} tokens"
        )

    def __reduce__(self) -> tuple[type[BudgetInfeasible], tuple[str, int, int, str]]:
        arguments = (self.policy, self.needed_tokens, self.budget_tokens, self.made_of)
        return BudgetInfeasible, arguments  # so that workers can raise it


def more_room(why: Iterable[str]) -> str:
    """The remedy where budgets are infeasible, for these reasons (`BudgetInfeasible`)."""
    if any("prompt " in each for each in why):
        return "give a larger --budget, or let the prompt be evicted: --set pin_prompt=false"
    return "give a larger --budget"
