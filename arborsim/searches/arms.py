"""Which searches are compared: algorithms, widths and settings, as one list of arms.

And how a bank is grown for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arborsim.core.errors import UnknownName, UsageError
from arborsim.searches import Search, find_search, make_search, search_names, search_options
from arborsim.searches.growing import Dense, SharedTree

#: What the others are compared with: ETS's tables 1 and 2 do.
REFERENCE = "rebase"
BATCH = 256  #: thoughts that are drawn at once while a bank is grown


@dataclass(frozen=True)
class Arm:
    """One search algorithm at one width."""

    algorithm: str  #: as it was asked for
    width: int  #: as it was asked for; of an algorithm without a width, what it runs at once
    options: tuple[tuple[str, Any], ...] = ()  #: all that is not the algorithm's default
    swept: str = ""  #: ``"lambda_b=1.25"`` of a sweep

    @property
    def label(self) -> str:
        return f"{self.name} {self.swept}".strip()

    @property
    def kind(self) -> type[Search]:
        return find_search(self.algorithm)

    @property
    def name(self) -> str:
        """The algorithm in tables: if it is given by its class, the class's `name`."""
        return self.kind.name

    @property
    def uses_embeddings(self) -> bool:
        """Whether the search clusters thoughts by their embeddings."""
        return self.make().uses_embeddings

    def make(self) -> Search:
        """A new search for one problem."""
        return make_search(self.algorithm, **dict(self.options))


def chosen_algorithms(names: Sequence[str]) -> list[str]:
    """The algorithms of these names, if all exist, where ``all`` is every one."""
    if not names:
        raise UsageError("--algorithm names no search")
    # All that were named: each must exist, whatever "all" are
    chosen = [name for name in names if name != "all"]
    if "all" in names:
        chosen = list(dict.fromkeys((*search_names(), *chosen)))
    called: dict[str, str] = {}
    for name in chosen:
        other = called.setdefault(find_search(name).name, name)
        if other != name:
            raise UsageError(f"--algorithm {name}: {other} has the same name: leave one out")
    return chosen


def split_settings(
    algorithms: Sequence[str], given: Iterable[str]
) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Settings of ``--set`` for the searches, and those left for the policies.

    Each is ``name=value``, for every chosen algorithm that has the option, or
    ``algorithm.name=value``.  An algorithm given by its class also goes by the class's `name`.
    """
    options: dict[str, dict[str, str]] = {name: {} for name in algorithms}
    called = {find_search(name).name: name for name in algorithms} | {a: a for a in algorithms}
    rest = []
    for setting in given:
        key, equals, value = setting.partition("=")
        if not equals:
            raise UsageError(f"--set {setting}: expected name=value, or algorithm.name=value")
        name, _, option = key.rpartition(".")
        if name in (*search_names(), *called):
            name = called.get(name, name)
            if name not in options:
                raise UsageError(f"--set {setting}: {name} is not among {', '.join(algorithms)}")
            if option not in search_options(name):
                raise UnknownName(f"option of {name}", option, search_options(name))
            targets = [name]
        else:
            targets = [a for a in algorithms if key in search_options(a)]
        for algorithm in targets:
            options[algorithm][option if name in targets else key] = value.strip()
        if not targets:
            rest.append(setting)
    return options, rest


def arms_of(
    algorithm: str, widths: Sequence[int], given: Mapping[str, str], swept: str = ""
) -> list[Arm]:
    """One arm per width, or a single one for an algorithm that has none.

    `width` is the number of thoughts that run together at first (`Search.at_width`): N chains, the
    width of a search by levels.  ToT-BFS keeps its b states and gives each N // b children.
    Searches that spend a number of thoughts one after the other (DPTS, MCTS, ToT-DFS) are as large
    as that number: they run once, as published, and so does ``linear``.  Options in `given` win.
    Refuses a width that the algorithm cannot use.
    """
    kind = find_search(algorithm)
    found: dict[tuple[tuple[str, Any], ...], Arm] = {}
    for width in widths:
        options = {**kind.at_width(width, given), **given}
        search = make_search(algorithm, **options)
        if not kind.width_option or kind.width_option in given:
            width = search.slots
        key = tuple(sorted(options.items()))
        found.setdefault(key, Arm(algorithm, width, key, swept))
    return list(found.values())


@dataclass(frozen=True)
class Sweep:
    """``lambda_b=1,1.25,1.5``: one option, several values."""

    option: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str, algorithms: Sequence[str]) -> Sweep:
        """Raises `UsageError` if it is none, or no chosen algorithm has the option."""
        option, equals, values = (part.strip() for part in text.partition("="))
        listed = tuple(dict.fromkeys(v.strip() for v in values.split(",") if v.strip()))
        if not equals or not listed:
            raise UsageError(f"--sweep {text}: expected name=value,value,...")
        known = {name for a in algorithms for name in search_options(a)}
        if option not in known:
            raise UnknownName(f"option of {', '.join(algorithms)}", option, known)
        return cls(option, listed)


@dataclass(frozen=True)
class Recipe:
    """The tree to grow for every problem, by either `children` or `arms`."""

    children: tuple[int, ...] = ()  #: children per node at depth 0, 1, ...; see `Dense`
    depth: int = 0  #: 0: as many levels as `children` has entries
    arms: tuple[Arm, ...] = ()  #: searches that find all that they ask for
    dedupe: bool = True  #: for `arms`: whether they will give up thoughts that repeat a sibling
    batch: int = BATCH  #: thoughts that are drawn at once

    def make(self) -> Search:
        """The search that grows one problem's tree.  Refuses one that would be too large."""
        if self.arms:
            return SharedTree([arm.make() for arm in self.arms], self.batch, self.dedupe)
        return Dense(self.children, self.depth, self.batch)

    def parameters(self) -> dict[str, Any]:
        """For a trace's metadata."""
        if not self.arms:
            depth = self.depth or len(self.children)
            return {"children": list(self.children), "depth": depth, "batch": self.batch}
        spelled = [
            " ".join([arm.algorithm, *(f"{key}={value}" for key, value in arm.options)])
            for arm in self.arms
        ]
        return {"for": spelled, "for_dedupe": self.dedupe, "batch": self.batch}


def recipe_for(
    algorithms: Sequence[str],
    widths: Sequence[int],
    given: Iterable[str] = (),
    dedupe: bool = True,
    batch: int = BATCH,
) -> Recipe:
    """A bank for `arborsim search` with these algorithms, widths and settings.

    A search whose defaults are a paper's also finds what it asks for at these.  ``all`` algorithms
    are every one.  `given` settings are ``name=value`` or ``algorithm.name=value``.
    """
    chosen = chosen_algorithms(algorithms)
    options, rest = split_settings(chosen, given)
    if rest:
        raise UsageError(f"--set {rest[0]}: none of {', '.join(chosen)} has that option")
    arms: dict[tuple[str, tuple[tuple[str, Any], ...]], Arm] = {}
    for name in chosen:
        published = find_search(name).as_published
        own = [Arm(name, 0, tuple(sorted(options[name].items())))] if published else []
        for arm in (*arms_of(name, widths, options[name]), *own):
            arms.setdefault((arm.algorithm, arm.options), arm)
    return Recipe(arms=tuple(arms.values()), dedupe=dedupe, batch=batch)
