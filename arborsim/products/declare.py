"""Options declared once: the Python call, the command line and the command kept in results.

A product's options are the fields of a frozen dataclass, described in its docstring::

    @dataclass(frozen=True)
    class ReplayOptions(PolicyOptions, MachineOptions):
        \"\"\"Replay recorded searches under KV-cache policies.

        Parameters
        ----------
        traces
            Trace files.
        full
            Also replay full retention, which others are compared with.
        \"\"\"

        traces: Files
        _: KW_ONLY
        full: bool = True

        def results(self) -> ReplayResults: ...

    replay = call("replay", ReplayOptions)

`call` makes the function that `arborsim` exports.  A command is a function with such a dataclass,
or options of its own, as parameters (`arborsim.cli.commands`).  `declared` reads both.  Help shows
the first paragraph of an option's description. What else it takes is an `Option` in the annotation.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import shlex
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from operator import or_
from pathlib import Path
from textwrap import indent
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.settings import MOST_COUNT, MOST_INT, setting_text
from arborsim.core.units import is_plain, measured, read

_KEYWORD = inspect.Parameter.KEYWORD_ONLY
P = ParamSpec("P")
T = TypeVar("T", covariant=True)


@dataclass(frozen=True)
class Option:
    """Facts that an annotation has of an option besides its type."""

    name: str = ""  #: on the command line, where it is not that of the keyword
    complete: str = ""  #: which names a shell offers (`arborsim.cli.complete`)
    shown: str = ""  #: what help says in place of an empty default
    panel: str = ""  #: the section of help
    least: float | None = None
    most: float | None = None
    many: bool = False  #: may be given several times
    named: bool = False  #: an option although Python takes it by position
    writes: bool = False  #: names a file that is written
    silent: bool = False  #: leaves the results alone, so their command does not name it
    python: bool = False  #: a keyword in Python only
    default: Any = None  #: of the command, where it differs from Python's

    def __or__(self, other: Option) -> Option:
        plain = Option()
        changed = {k: v for k, v in vars(other).items() if v != getattr(plain, k)}
        return Option(**{**vars(self), **changed})


Count: TypeAlias = Annotated[int, Option(least=0)]
Positive: TypeAlias = Annotated[int, Option(least=1)]
Seed: TypeAlias = Annotated[int, Option(least=0, most=MOST_INT)]
Share: TypeAlias = Annotated[float, Option(least=0.0, most=1.0)]
AnyPath: TypeAlias = str | os.PathLike[str]
#: A file that a command writes.
Written: TypeAlias = Annotated[Path, Option(writes=True, silent=True)]
#: A flag that leaves the results alone.
Silent: TypeAlias = Annotated[bool, Option(silent=True)]
#: A keyword that only Python has, and that leaves the results alone.
InPython: TypeAlias = Annotated[bool, Option(python=True, silent=True)]


@dataclass(frozen=True)
class Declared:
    """One option of a command or a call."""

    name: str
    group: str  #: the command's parameter that it is a field of
    type: Any  #: as it is annotated
    kind: Any  #: on the command line: bool, int, float, str, Path, or choices as a tuple
    option: Option
    about: str  #: its description
    default: Any  #: `MISSING` if it must be given
    positional: bool  #: by its place in Python

    @property
    def help(self) -> str:
        """The first paragraph of the description."""
        return " ".join(self.about.partition("\n\n")[0].replace("`", "").split())

    @property
    def argument(self) -> bool:
        """Whether the command takes it by its place, too."""
        return self.positional and not self.option.named

    @property
    def flag(self) -> str:
        """The option: ``"--policy"`` of ``policies``."""
        return f"--{self.option.name or self.name.strip('_').replace('_', '-')}"


class Options:
    """A dataclass of options. `panel` is the section of help that shows them."""

    panel: ClassVar[str] = ""

    def __init_subclass__(cls, panel: str = "") -> None:
        cls.panel = panel

    def __post_init__(self) -> None:
        for each in declared(type(self)):
            least, value = each.option.least, getattr(self, each.name)
            if each.kind in (int, float) and isinstance(value, str):
                value = written(each.name, value, each.kind)
                object.__setattr__(self, each.name, value)
            if each.kind is int and least is not None and value is not None:
                at_least(int(least), int(each.option.most or MOST_COUNT), **{each.name: value})


def written(name: str, text: str, kind: type) -> Any:
    """The number that an option's text is, which may have a unit; a `UsageError` if it is none."""
    try:
        number = float(text) if is_plain(text) else read(measured(name), text)
        if kind is float or number.is_integer():
            return kind(number)
    except ValueError:
        pass
    what = "a whole number" if kind is int else "a number"
    raise UsageError(f"{name} must be {what}, such as 8k or 50%, not {text!r:.40}")


def at_least(least: int, most: int = MOST_COUNT, **given: int | None) -> None:
    """Refuse a number that is too small or too large, or no whole number."""
    for name, value in given.items():
        if value is None or (isinstance(value, int) and least <= value <= most):
            continue
        large = isinstance(value, int) and value > most
        rule = f"from {least} to {most:,}" if large else f"of {least} or more"
        raise UsageError(f"{name} must be a whole number {rule}, not {value!r:.40}")


def declared(made: Callable[..., Any]) -> tuple[Declared, ...]:
    """The options of a dataclass, or of a command's function and its groups, in help's order."""
    return _declared(made)


@functools.cache
def _declared(made: Callable[..., Any]) -> tuple[Declared, ...]:
    return tuple(_of_class(made) if isinstance(made, type) else _of_function(made))


def _groups(kind: type) -> list[type[Options]]:
    """The classes that declare its options: bases from left to right, then itself."""
    found = [each for base in kind.__bases__ for each in _groups(base)]
    own = [kind] if issubclass(kind, Options) and kind is not Options else []
    return list(dict.fromkeys([*found, *own]))


def _of_class(kind: type) -> Iterator[Declared]:
    """Those without a panel first, then panel by panel."""
    classes = _groups(kind)
    order = ["", *(each.panel for each in classes)]
    known = {each.name: each for each in fields(kind)}
    types = {n: t for c in classes for n, t in _annotations(c).items() if n in known}
    help = {n: text for c in classes for n, text in described(c).items()}
    # A field that a class declares anew keeps its place.
    place = {name: each for each in reversed(classes) for name in _annotations(each)}
    for each in sorted(classes, key=lambda each: order.index(each.panel)):
        for name in _annotations(each):
            if name not in known or place[name] is not each:
                continue
            field = known[name]
            kinds, option = _shape(types[name])
            option = Option(panel=each.panel) | option
            factory = field.default_factory
            default = field.default if factory is MISSING else factory()
            yield Declared(
                name,
                "",
                types[name],
                kinds,
                option,
                help.get(name, ""),
                default,
                not field.kw_only,
            )


def _of_function(function: Callable[..., Any]) -> Iterator[Declared]:
    types, help = _annotations(function), described(function)
    for each in inspect.signature(function).parameters.values():
        kind = types[each.name]
        if isinstance(kind, type) and issubclass(kind, Options):
            for one in declared(kind):
                yield Declared(**{**vars(one), "group": each.name})
            continue
        kinds, option = _shape(kind)
        default = MISSING if each.default is each.empty else each.default
        positional = each.kind is not each.KEYWORD_ONLY
        yield Declared(
            each.name, "", kind, kinds, option, help.get(each.name, ""), default, positional
        )


def _annotations(made: Any) -> dict[str, Any]:
    return inspect.get_annotations(made, eval_str=True)


def _shape(annotation: Any) -> tuple[Any, Option]:
    """The kind of a type on the command line, and the options in it."""
    leaves: list[Any] = []
    option = _walk(annotation, leaves)
    kinds = [each for each in leaves if isinstance(each, tuple)]
    return next((k for k in (*kinds, Path, str, float, int, bool) if k in leaves), str), option


def _walk(annotation: Any, leaves: list[Any]) -> Option:
    """Collects the plain types that an annotation is made of."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return functools.reduce(or_, annotation.__metadata__, _walk(inner[0], leaves))
    if origin is Literal:
        leaves.append(inner)
    elif origin in (Union, types.UnionType):
        return functools.reduce(or_, [_walk(each, leaves) for each in inner])
    elif origin in (list, Sequence):  # of texts: given several times; of numbers: by comma
        of: list[Any] = []
        option = functools.reduce(or_, [_walk(each, of) for each in inner])
        leaves += of
        return option | Option(many=bool({str, Path} & set(of)))
    elif origin is os.PathLike:
        leaves.append(Path)
    elif origin is None:  # a forward reference is to a class that only Python can give
        leaves.append(annotation if isinstance(annotation, type) else str)
    return Option()


def described(made: Any) -> dict[str, str]:
    """The entries of a docstring's "Parameters", by name."""
    _, found, section = inspect.cleandoc(made.__doc__ or "").partition("Parameters\n----------\n")
    entries = re.split(r"^(?=\S)", re.split(r"\n\w+\n---+\n", section)[0], flags=re.M)
    parts = (entry.partition("\n") for entry in entries if found and entry.strip())
    return {name.strip(): _named(inspect.cleandoc(f"\n{text}")).strip() for name, _, text in parts}


def _named(text: str) -> str:
    """A description in which ``{algorithms}`` are the searches that come with arborsim."""
    if "{algorithms}" not in text:
        return text
    from arborsim.searches import SHIPPED

    return text.replace("{algorithms}", ", ".join(SHIPPED))


class _Runs(Protocol[T]):
    def results(self) -> T: ...


def call(name: str, kind: Callable[P, _Runs[T]]) -> Callable[P, T]:
    """The function that takes the options of a dataclass, and returns its `results`."""
    options = declared(kind)
    known = [each.name for each in options]

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        for each in kwargs:
            if each not in known:
                raise UnknownName("keyword", each, known)
        return kind(*args, **kwargs).results()

    made: Any = run
    by_place = sorted(options, key=lambda each: not each.positional)
    made.__signature__ = inspect.Signature([_parameter(each) for each in by_place])
    made.__name__ = made.__qualname__ = name
    made.__module__, made.options = kind.__module__, kind
    made.__doc__ = _documented(kind)
    return run


def _parameter(made: Declared) -> inspect.Parameter:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if made.positional else _KEYWORD
    default = inspect.Parameter.empty if made.default is MISSING else made.default
    return inspect.Parameter(made.name, kind, default=default, annotation=_bare(made.type))


def _bare(annotation: Any) -> Any:
    """A type without what it says of an option."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return Union[tuple(map(_bare, get_args(annotation)))]  # noqa: UP007 - names may be texts
    return getattr(annotation, "__forward_arg__", annotation)


def _documented(kind: Any) -> str:
    """The docstring, with the options of the groups that the class takes part in."""
    text = _named(inspect.cleandoc(kind.__doc__ or ""))
    own = described(kind)
    more = [each for each in declared(kind) if each.name not in own]
    shared = "".join(f"{each.name}\n{indent(each.about, '    ')}\n" for each in more)
    head, mark, rest = text.partition("\nReturns\n")
    return f"{head.rstrip()}\n{shared}{mark}{rest}"


def equivalent(name: str, given: Options) -> str:
    """``"arborsim replay t.parquet --policy h2o"``, or where options cannot say it the Python call.

    It names what differs from the defaults, and nothing that leaves the results alone, so that the
    command and the call that do the same write the same bytes.
    """
    spoken = [each for each in declared(type(given)) if not each.option.silent]
    values = {each.name: getattr(given, each.name) for each in spoken}
    inputs = [one for each in spoken if each.argument
              for one in listed(values[each.name]) if one is not None]  # fmt: skip
    changed = [
        each
        for each in spoken
        if not each.argument and _texts(values[each.name]) != _texts(each.default)
    ]
    if not all(map(_is_plain, (inputs, *(values[each.name] for each in changed)))):
        shown = [
            repr(_text(each)) if _is_plain(each) else f"<{getattr(each, 'name', each)}>"
            for each in inputs
        ]
        positional = shown if len(shown) < 2 else [f"[{', '.join(shown)}]"]
        keywords = [f"{each.name}={values[each.name]!r}" for each in changed]
        return f"arborsim.{name}({', '.join([*positional, *keywords])})"
    words = ["arborsim", name, *map(_text, inputs)]
    for each in changed:
        words += _words(each, values[each.name])
    return shlex.join(words)


def _words(each: Declared, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [each.flag if value else each.flag.replace("--", "--no-", 1)]
    texts = setting_texts(value) if each.name in ("settings", "vary") else _texts(value)
    if each.name in _REPEATED:
        return [word for text in texts for word in (each.flag, text)]
    return [each.flag, ",".join(texts)]


#: Given several times rather than by comma.
_REPEATED = {"settings", "calibration", "stop", "answers", "vary", "where"}


def setting_texts(given: Any) -> list[str]:
    """``name=value`` texts, as ``--set`` takes them."""
    if not isinstance(given, Mapping):
        return [str(each) for each in listed(given)]
    return [f"{name}={setting_text(value)}" for name, value in given.items()]


def _texts(value: Any) -> list[str]:
    """The texts that an option would be given."""
    if isinstance(value, Mapping):
        return setting_texts(value)
    return [part for each in listed(value) for part in _text(each).split(",")]


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.12g}"
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)


def _is_plain(value: Any) -> bool:
    """Whether an option can say it."""
    if isinstance(value, Mapping):
        return True
    plain = (str, int, float, bool, os.PathLike)
    return all(isinstance(each, plain) or hasattr(each, "__index__") for each in listed(value))


def listed(given: Any) -> list[Any]:
    """One thing, or a sequence of things, as a list. Texts and paths are one thing."""
    if isinstance(given, str | os.PathLike) or not isinstance(given, Iterable):
        return [given]
    return list(given)
