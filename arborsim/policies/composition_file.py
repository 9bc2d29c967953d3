"""Compositions in TOML files.

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
    use = "tree-events"               # or "every-step", "interval", "after-prefill"
    [protect]
    recent = 64
    [recover]
    use = "fetch"                     # or "never", "recompute"

A section that is left out, or has no `use`, takes the block that `Composition` has by default.
"""

from __future__ import annotations

import tomllib
from dataclasses import fields, make_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from arborsim.core.errors import ArborsimError, UnknownName, UsageError
from arborsim.core.settings import check_settings
from arborsim.policies.composition import Composition
from arborsim.policies.composition_allocate import ALLOCATIONS
from arborsim.policies.composition_blocks import PLACES, PROTECTIONS, RECOVERIES, SCHEDULES, SCORES

BLOCKS: dict[str, dict[str, Any]] = {
    "score": SCORES,
    "allocate": ALLOCATIONS,
    "place": PLACES,
    "schedule": SCHEDULES,
    "protect": PROTECTIONS,
    "recover": RECOVERIES,
}
TEXTS = ("name", "summary", "paper", "formula")
_IN_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def read_composition(path: Path | str) -> type[Composition]:
    """The policy class that a TOML file describes.

    Raises
    ------
    UsageError
        The file is missing or no TOML, or names what does not exist, has the wrong type or is out
        of range; one line that begins with the file.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{path}: no such policy file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read as text: {error}") from None
    try:
        return _class_of(text, str(path))
    except ArborsimError as error:
        raise UsageError(f"{path}: {error}") from None


@cache
def _class_of(text: str, path: str) -> type[Composition]:
    """The class for a file's text; the same text gives the same class."""
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"not valid TOML: {error}") from None
    about = {key: _typed(key, str, found.pop(key)) for key in TEXTS if key in found}
    if not about.get("name", "").strip():
        raise UsageError('a name is missing: name = "my-policy"')
    deviations = found.pop("deviations", [])
    if not isinstance(deviations, list) or not all(isinstance(d, str) for d in deviations):
        raise UsageError("deviations must be a list of texts")
    for key in found:
        if key not in BLOCKS:
            raise UnknownName("section or key", key, [*BLOCKS, *TEXTS, "deviations"])
    blocks = {name: _block(name, section) for name, section in found.items()}
    hints = get_type_hints(Composition)
    made = make_dataclass(
        "".join(part.capitalize() for part in about["name"].split("-")),
        [(name, hints[name], block) for name, block in blocks.items()],
        bases=(Composition,),
        frozen=True,
        namespace={
            **about,
            "deviations": tuple(deviations),
            "source": path,
            "text": text,
            "__doc__": f"Composed in {Path(path).name}.",
            "__reduce__": _reduce,
        },
    )
    assert issubclass(made, Composition)
    return made


def _reduce(policy: Any) -> tuple[Any, ...]:
    """Let other processes make the same policy: they have the text, not the class."""
    blocks = {each.name: getattr(policy, each.name) for each in fields(policy)}
    return _restore, (policy.text, policy.source, blocks)


def _restore(text: str, path: str, blocks: dict[str, Any]) -> Composition:
    return _class_of(text, path)(**blocks)


def _block(name: str, section: Any) -> Any:
    """One block from its section."""
    if not isinstance(section, dict):
        raise UsageError(f"[{name}] must be a section, not a value")
    section = dict(section)
    kind = type(getattr(Composition, name))
    if "use" in section:
        use = _typed(f"[{name}] use", str, section.pop("use"))
        if use not in BLOCKS[name]:
            raise UnknownName(f"[{name}] use", use, BLOCKS[name])
        kind = BLOCKS[name][use]
    types = get_type_hints(kind)
    known = {each.name: types[each.name] for each in fields(kind)}
    values = {}
    for key, value in section.items():
        if key not in known:
            raise UnknownName(f"[{name}] setting", key, [*known, "use"])
        values[key] = _typed(f"[{name}] {key}", known[key], value)
    block = kind(**values)
    check_settings(block, f"[{name}]")
    return block


def _typed(what: str, kind: Any, value: Any) -> Any:
    """`value` as `kind`; a whole number is a number too."""
    options = getattr(kind, "__args__", (kind,))
    for option in options:
        if type(value) is option:
            return value
        if option is float and type(value) is int:
            return float(value)
    wanted = " or ".join(_IN_WORDS.get(option, str(option)) for option in options)
    raise UsageError(f"{what} must be {wanted}, not {value!r}")
