"""How a bank is grown: so many children per node, or just what some searches ask for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from arborsim.bank.arms import Arm, arms_of, chosen_algorithms, split_settings
from arborsim.core.errors import UsageError
from arborsim.search import Search, search_options
from arborsim.search.growing import Dense, SharedTree

BATCH = 256  #: thoughts that are drawn at once


@dataclass(frozen=True)
class Recipe:
    """What to grow for every problem; either `children` or `arms`.

    Attributes
    ----------
    children : tuple of int
        Children per node at depth 0, 1, ...; see `arborsim.search.growing.Dense`.
    depth : int
        0: as many levels as `children` has entries.
    arms : tuple of Arm
        Searches that find all that they ask for.
    dedupe : bool
        For `arms`: whether they will give up thoughts that repeat a sibling.
    batch : int
        Thoughts that are drawn at once.
    """

    children: tuple[int, ...] = ()
    depth: int = 0
    arms: tuple[Arm, ...] = ()
    dedupe: bool = True
    batch: int = BATCH

    def make(self) -> Search:
        """What grows one problem's tree.

        Raises
        ------
        UsageError
            The tree would be too large, or a number is out of range.
        """
        if self.arms:
            return SharedTree([arm.make() for arm in self.arms], self.batch, self.dedupe)
        return Dense(self.children, self.depth, self.batch)

    def parameters(self) -> dict[str, Any]:
        """For a trace's metadata."""
        if not self.arms:
            depth = self.depth or len(self.children)
            return {"children": list(self.children), "depth": depth, "batch": self.batch}
        return {
            "for": [_spelled(arm) for arm in self.arms],
            "for_dedupe": self.dedupe,
            "batch": self.batch,
        }


def recipe_for(
    algorithms: Sequence[str],
    widths: Sequence[int],
    given: Iterable[str] = (),
    dedupe: bool = True,
    batch: int = BATCH,
) -> Recipe:
    """A bank for `arborsim search` with these algorithms, widths and settings.

    A search that goes on for a number of thoughts, or keeps a number of states, is served at its
    own width, too.

    Parameters
    ----------
    algorithms : sequence of str
        ``all`` is every one.
    widths : sequence of int
    given : iterable of str
        ``name=value`` or ``algorithm.name=value``.

    Raises
    ------
    UnknownName, UsageError
    """
    chosen = chosen_algorithms(algorithms)
    options, rest = split_settings(chosen, given)
    if rest:
        raise UsageError(f"--set {rest[0]}: none of {', '.join(chosen)} has that option")
    arms: dict[tuple[str, tuple[tuple[str, Any], ...]], Arm] = {}
    for name in chosen:
        own = [Arm(name, 0, tuple(sorted(options[name].items())))] if _has_own_width(name) else []
        for arm in (*arms_of(name, widths, options[name]), *own):
            arms.setdefault((arm.algorithm, arm.options), arm)
    return Recipe(arms=tuple(arms.values()), dedupe=dedupe, batch=batch)


def _has_own_width(name: str) -> bool:
    return bool({"steps", "keep"} & set(search_options(name))) and not name.startswith("beam")


def _spelled(arm: Arm) -> str:
    return " ".join([arm.algorithm, *(f"{key}={value}" for key, value in arm.options)])
