"""The options of ``arborsim record --bank``, checked and turned into a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from arborsim.core.errors import UsageError

if TYPE_CHECKING:
    from arborsim.bank.arms import Recipe


def recipe_of(
    bank: bool,
    children: str,
    depth: int,
    searches: str,
    width: str,
    batch: int,
    *,
    settings: Sequence[str] = (),
    search: str = "linear",
    temperature: float | None = None,
    dedupe: bool = True,
) -> Recipe | None:
    """What a bank is to hold; None if none was asked for.

    Raises
    ------
    UnknownName, UsageError
        Options exclude each other, a search or an option is unknown, or the tree is too large.
    """
    from arborsim.bank.arms import BATCH, Recipe, recipe_for
    from arborsim.cli.options import names
    from arborsim.cli.search import widths_of

    given = {"--children": children, "--depth": depth, "--for": searches, "--width": width,
             "--batch": batch}  # fmt: skip
    lone = [option for option, value in given.items() if value]
    if not bank:
        if lone:
            raise UsageError(f"{lone[0]} is about banks: add --bank, or leave it out")
        return None
    if search != "linear":
        raise UsageError(f"--bank serves searches later: --for {search} instead of --search")
    if temperature == 0:
        raise UsageError("--bank at --temperature 0 would draw the same thought again and again")
    if bool(children) == bool(searches):
        raise UsageError(
            "--bank needs either --children (e.g. 8 with --depth 3, or 64,16,8) or --for with "
            "--width (e.g. --for rebase,ets --width 16,64)"
        )
    batch = batch or BATCH
    if searches:
        if depth:
            raise UsageError("--depth goes with --children: searches go as deep as they like")
        widths = widths_of(width or "16")
        return recipe_for(names(searches), widths, settings, dedupe, batch)
    for option, value in (("--width", width), ("--set", settings)):
        if value:
            raise UsageError(f"{option} goes with --for: --children serves any search")
    counts = _counts(children)
    if len(counts) == 1 and depth == 0:
        raise UsageError(f"--children {children} needs --depth, e.g. --depth 3")
    recipe = Recipe(children=counts, depth=depth, batch=batch)
    recipe.make()  # refuses a tree that is too large
    return recipe


def _counts(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"--children {text}: expected whole numbers of 1 or more, by comma")
    return tuple(map(int, parts))
