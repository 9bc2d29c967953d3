"""Policies put together from blocks, in a TOML file or in Python.

::

    name = "my-policy"                # and, if you like: summary, paper, formula, deviations
    [score]
    use = "hidden-contrast"           # the other keys are the block's settings
    window = 32
    [allocate]
    use = "tree"                      # or "pool"
    [place]
    ddr = 1.0
    [schedule]
    use = "tree-events"               # or "every-step", "interval", "only-every", "after-prefill"
    [protect]
    recent = 64
    [recover]
    use = "fetch"                     # or "never", "recompute"

A section that is left out, or has no `use`, takes the block that `Composition` has by default.  In
Python, a subclass of `Composition` gives the blocks as defaults of its fields.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, make_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, get_type_hints

from arborsim.core.documents import to_toml
from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.records import convert, located, parse_toml, read_text
from arborsim.core.settings import check_settings
from arborsim.policies.base import Method
from arborsim.policies.blocks import (
    AfterPrefill,
    Allocation,
    EveryStep,
    Fetch,
    Interval,
    Never,
    OnlyEvery,
    Protect,
    Recompute,
    TreeEvents,
)
from arborsim.policies.placement import Ladder, Pool
from arborsim.policies.stream import Composed
from arborsim.policies.tree import Tree
from arborsim.signals.attention import CumulativeAttention, NewestAttention, ValueWeightedAttention
from arborsim.signals.rolling import HiddenChangeContrast
from arborsim.signals.scores import Position, Score, SeededUniform
from arborsim.signals.vectors import LagVariance

SCORES: dict[str, type[Score]] = {
    "cumulative-attention": CumulativeAttention,
    "hidden-contrast": HiddenChangeContrast,
    "lag-variance": LagVariance,
    "newest-attention": NewestAttention,
    "position": Position,
    "random": SeededUniform,
    "value-weighted-attention": ValueWeightedAttention,
}
BLOCKS: dict[str, dict[str, type[Any]]] = {
    "score": dict(SCORES),
    "allocate": {"pool": Pool, "tree": Tree},
    "place": {"ladder": Ladder},
    "schedule": {
        "every-step": EveryStep,
        "interval": Interval,
        "only-every": OnlyEvery,
        "tree-events": TreeEvents,
        "after-prefill": AfterPrefill,
    },
    "protect": {"tokens": Protect},
    "recover": {"never": Never, "fetch": Fetch, "recompute": Recompute},
}
TEXTS = ("name", "summary", "paper", "formula")


@dataclass(frozen=True)
class Composition(Composed):
    """A policy whose fields are its blocks."""

    score: Score = CumulativeAttention()  # noqa: RUF009 - frozen
    allocate: Allocation = Pool()  # noqa: RUF009 - frozen
    place: Ladder = Ladder()  # noqa: RUF009 - frozen
    schedule: EveryStep = EveryStep()  # noqa: RUF009 - frozen
    protect: Protect = Protect()  # noqa: RUF009 - frozen
    recover: Never = Never()  # noqa: RUF009 - frozen

    name = ""
    formula = ""
    # Of those read from a file:
    source: ClassVar[str] = ""
    text: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            block = getattr(self, field.name)
            if is_dataclass(block):
                check_settings(block, f"{self.name}: [{field.name}]")
        if isinstance(self.allocate, Tree) and self.score.grouping != "shared":
            raise UsageError(
                f"{self.name}: [allocate] tree has one plan for the whole model: leave out "
                f'[score] grouping, which is "{self.score.grouping}"'
            )

    @property
    def method(self) -> Method:
        method = super().method
        return method if method.formula else replace(method, formula=f"tokens by {method.score}")


def read_composition(path: Path | str) -> type[Composition]:
    """The policy class that a TOML file describes.

    Raises `UsageError`, one line that begins with the file, if it is missing or no TOML, or names
    something that does not exist, has the wrong type or is out of range.
    """
    path = Path(path)
    if not path.exists():
        raise UsageError(f"{path}: no such policy file")
    return _class_of(read_text(path), str(path))


def composition_toml(policy: Composition, name: str, summary: str) -> str:
    """The text of a file that describes a policy under another name: what it has, and no more."""
    kind = type(policy)
    about: dict[str, Any] = {
        "name": name,
        "summary": summary,
        "paper": kind.paper,
        "formula": kind.formula,
    }
    about["deviations"] = list(kind.deviations)
    blocks = {}
    for each in fields(policy):
        block = getattr(policy, each.name)
        use = next(use for use, made in BLOCKS[each.name].items() if made is type(block))
        blocks[each.name] = {"use": use} | {f.name: getattr(block, f.name) for f in fields(block)}
    return to_toml({key: value for key, value in about.items() if value} | blocks)


@cache
def _class_of(text: str, path: str) -> type[Composition]:
    """The class for a file's text: the same text gives the same class."""
    table = parse_toml(text, path)
    with located(path):
        return _made(table, text, path)


def _made(table: dict[str, Any], text: str, path: str) -> type[Composition]:
    about: dict[str, Any] = {
        key: convert(str, table.pop(key), key) for key in TEXTS if key in table
    }
    if not about.get("name", "").strip():
        raise UsageError('a name is missing: name = "my-policy"')
    about["deviations"] = convert(tuple[str, ...], table.pop("deviations", []), "deviations")
    for key in table:
        if key not in BLOCKS:
            raise UnknownName("section or key", key, [*BLOCKS, *TEXTS, "deviations"])
    blocks = {name: _block(name, section) for name, section in table.items()}
    hints = get_type_hints(Composition)
    made = make_dataclass(
        "".join(part.capitalize() for part in about["name"].split("-")),
        [(name, hints[name], block) for name, block in blocks.items()],
        bases=(Composition,),
        frozen=True,
        namespace={
            **about,
            "source": path,
            "text": text,
            "__doc__": f"Composed in {Path(path).name}.",
            "__reduce__": _reduce,
        },
    )
    assert issubclass(made, Composition)
    made()  # blocks that do not go together are refused now
    return made


def _block(name: str, section: Any) -> Any:
    """One block from its section."""
    place = f"[{name}]"
    if not isinstance(section, dict):
        raise UsageError(f"{place} must be a section, not a value")
    section = dict(section)
    kind = type(getattr(Composition, name))
    if "use" in section:
        use = convert(str, section.pop("use"), f"{place} use")
        if use not in BLOCKS[name]:
            raise UnknownName(f"{place} use", use, BLOCKS[name])
        kind = BLOCKS[name][use]
    block = convert(kind, section, place, finite=False)
    check_settings(block, place)
    return block


def _reduce(policy: Composition) -> tuple[Any, ...]:
    """Let other processes make the same policy: they have the text, not the class."""
    blocks = {each.name: getattr(policy, each.name) for each in fields(policy)}
    return _restore, (policy.text, policy.source, blocks)


def _restore(text: str, path: str, blocks: dict[str, Any]) -> Composition:
    return _class_of(text, path)(**blocks)
