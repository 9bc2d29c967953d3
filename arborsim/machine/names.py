"""Names as people paste them: what drivers, engines and papers call a GPU, a model or a type.

``aliases.toml`` has a table of other names for each kind.  Capital letters, the maker's words and
what stands between words do not count: ``NVIDIA H100 80GB HBM3`` is ``h100-80gb-hbm3``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import cache
from importlib import resources

from msgspec import Meta

from arborsim.core.errors import UnknownName
from arborsim.core.records import parse_toml, parsed

_WORD = re.compile(r"[a-z0-9.+]+")
_MAKERS = ("nvidia", "geforce", "tesla")


@cache
def _aliases() -> dict[str, dict[str, str]]:
    file = resources.files("arborsim.machine") / "aliases.toml"
    return parse_toml(file.read_text(encoding="utf-8"), "aliases.toml")


def aliases(kind: str) -> dict[str, str]:
    """Names of a kind (a table of ``aliases.toml``) by other names for the same."""
    return _aliases().get(kind, {})


def plain(name: str) -> str:
    """A name without capital letters and the maker's words, its words joined by hyphens."""
    return "-".join(word for word in _WORD.findall(name.lower()) if word not in _MAKERS)


_CARD = re.compile(r"(rtx|[a-z]{1,2}(?=\d))(\d\w*)((?:-\w+)*)")


def title(profile: str) -> str:
    """A GPU's profile as people write it: ``"RTX 4090"`` of ``rtx4090``; other names stay."""
    card = _CARD.fullmatch(profile)
    if card is None:
        return profile
    maker, number, more = (part.upper() for part in card.groups())
    return f"{maker}{' ' * (maker == 'RTX')}{number}{more.replace('-', ' ')}"


def known_as(kind: str, given: str, known: Iterable[str]) -> str | None:
    """The one of the `known` names that a name of a kind means; None if none is meant."""
    others = {plain(other): name for other, name in aliases(kind).items()}
    return {**others, **{plain(name): name for name in known}}.get(plain(given))


def type_name(what: str, known: Collection[str], given: str) -> str:
    """The type of `what` ("weights", or "a KV cache") that a name means.

    Empty for what means the model's own (``auto``).  Raises `UnknownName` if none is meant.
    """
    found = known_as(f"types of {what}", given, known)
    if found is None and given:
        raise UnknownName(f"type of {what}", given, [*known, *aliases(f"types of {what}")])
    return found or ""


def a_type(what: str, known: Collection[str]) -> Meta:
    """How files give such a type: ``Annotated[str, a_type("weights", WEIGHTS)]``."""

    def parse(value: object) -> str:
        if not isinstance(value, str):
            raise ValueError(f"must be one of {', '.join(known)}")
        return type_name(what, known, value)

    return parsed(parse)
