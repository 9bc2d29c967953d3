"""A score as one function, and the policy that keeps what it ranks highest.

::

    @arborsim.score(reads="attention", per="layer")
    def highest(now, row):
        return np.maximum(now, row)

`highest` is a policy then: ``--policy my_scores:highest``.  Its score alone, for a policy of other
blocks, is ``highest().score``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, make_dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np

from arborsim.core.errors import PlanError, UnknownName, UsageError
from arborsim.core.events import TokenRun
from arborsim.core.observations import Signal
from arborsim.core.row_uses import RowUse
from arborsim.core.settings import setting
from arborsim.policies.blocks import Protect
from arborsim.policies.stream import StreamPolicy
from arborsim.signals.rows import RowState, TokenIds, row_signal
from arborsim.signals.scores import GROUPINGS, AtBirth, Changes, Score, ScoreState
from arborsim.signals.vectors import vectors_per_group
from arborsim.trace.schema import PER_LAYER

_VECTORS = {"keys": Signal.KEYS, "values": Signal.VALUES}
_OF_LAYERS = {signal.value: signal for signal in PER_LAYER}
READS = ("attention", *_VECTORS, *_OF_LAYERS)
Function = Callable[..., Any]


def score(
    reads: str = "attention", *, per: str = "shared", recent: int = 32, name: str = ""
) -> Callable[[Function], type[FunctionPolicy]]:
    """Make a policy of a function: it keeps the tokens with the highest values.

    What the function takes depends on what it `reads`:

    - ``"attention"``: ``f(now, row)``, called for every query and group.  `row` is what the query
      pays the tokens on its path, float64 ``[positions]``, `now` their values before, 0 at birth.
      It returns their values from now on.
    - ``"keys"`` or ``"values"``: ``f(vectors)``, with those of new tokens ``[tokens, size]``, one
      group at a time.  It returns their values, which stay as they are.
    - ``"hidden_change"`` and the other signals with a number for each layer: ``f(change)``, with
      ``[tokens, layers]``, for the whole model.

    Further arguments with defaults are the policy's settings.

    Parameters
    ----------
    per
        What has values, and keeps tokens, of its own: "shared" (the whole model), "layer" or "head"
        (every KV head).
    recent
        The newest tokens that stay whatever their value, by default.
    name
        The policy's name; by default the function's.

    Raises
    ------
    UsageError
        There is no such signal or grouping, or the function takes other arguments.
    """
    if reads not in READS:
        raise UnknownName("signal", reads, READS)
    if per not in GROUPINGS:
        raise UnknownName("grouping", per, GROUPINGS)
    if reads in _OF_LAYERS and per != "shared":
        raise UsageError(f"score of {reads}: one value serves the whole model: leave out per")

    def decorate(function: Function) -> type[FunctionPolicy]:
        own = function.__name__
        label = name or own.replace("_", "-")
        said = inspect.getdoc(function) or f"keep the tokens that {own} ranks highest"
        summary = said.split("\n")[0]
        body = {
            "__module__": function.__module__,
            "__qualname__": function.__qualname__,
            "__doc__": said,
            "name": label,
            "summary": summary.rstrip("."),
            "formula": f"s = {own}({', '.join(inspect.signature(function).parameters)})",
            "function": staticmethod(function),
            "signal": reads,
            "per": per,
        }
        fields = [
            *_settings(function, 2 if reads == "attention" else 1),
            ("recent", int, setting(recent, "protected newest tokens", unit="tokens", low=0)),
        ]
        return make_dataclass(own, fields, bases=(FunctionPolicy,), namespace=body, frozen=True)

    return decorate


def _settings(function: Function, taken: int) -> list[tuple[str, type, Any]]:
    """The fields of a function's further arguments."""
    rest = list(inspect.signature(function).parameters.values())
    plain = [each for each in rest if each.default is inspect.Parameter.empty]
    named = rest[len(plain) :]
    if len(plain) != taken or not all(
        isinstance(each.default, bool | int | float | str) for each in named
    ):
        raise UsageError(
            f"score {function.__name__}: expected {taken} arguments, and settings with a number, a "
            "text, true or false as their default"
        )
    return [(n.name, type(n.default), setting(n.default, f"argument {n.name}")) for n in named]


@dataclass(frozen=True)
class FunctionPolicy(StreamPolicy):
    """A policy that `score` has made of a function."""

    recent: int = setting(32, "protected newest tokens", unit="tokens", low=0)

    function: ClassVar[Function]
    signal: ClassVar[str]
    per: ClassVar[str]

    @cached_property
    def score(self) -> Score:
        return FunctionScore(type(self), tuple((n, getattr(self, n)) for n in self._arguments()))

    @classmethod
    def _arguments(cls) -> list[str]:
        known = inspect.signature(cls.function).parameters.values()
        return [each.name for each in known if each.default is not inspect.Parameter.empty]

    @cached_property
    def protect(self) -> Protect:
        return Protect(self.pin_prompt, recent=self.recent)


@dataclass(frozen=True)
class FunctionScore(Score):
    """The score of a `kind` of `FunctionPolicy`, whose function gets these `arguments`."""

    kind: type[FunctionPolicy]  # not the function: pickle finds the policy by its name
    arguments: tuple[tuple[str, Any], ...] = ()

    @property
    def about(self) -> str:
        return f"{self.kind.name} of {self.kind.signal.replace('_', ' ')}"

    @property
    def needs(self) -> frozenset[Signal]:
        if self.kind.signal == "attention":
            return row_signal(self.grouping)
        return frozenset({(_VECTORS | _OF_LAYERS)[self.kind.signal]})

    @property
    def changes(self) -> Changes:
        return "freely" if self.kind.signal == "attention" else "never"

    @property
    def grouping(self) -> str:
        return self.kind.per

    def start(self, layers: int) -> ScoreState:
        call = partial(self.kind.function, **dict(self.arguments))
        if self.kind.signal == "attention":
            return _RowFunction(RowUse(self.grouping, "rows"), call, self.kind.name)
        return AtBirth(partial(self._at_birth, call))

    def _at_birth(self, call: Function, run: TokenRun) -> np.ndarray:
        (signal,) = self.needs
        if self.kind.signal in _VECTORS:
            groups = vectors_per_group(run.observed, signal, self.grouping)
        else:
            groups = run.observed.per_layer[signal][None]
        given = groups.astype(np.float64)
        return np.stack([_checked(call(own), run.num_tokens, self.kind.name) for own in given])


class _RowFunction(RowState):
    """Values that a function makes anew of every row."""

    def __init__(self, use: RowUse, call: Function, name: str) -> None:
        super().__init__(use)
        self._call, self._name = call, name

    def _take(self, now: np.ndarray, at: TokenIds, row: np.ndarray) -> None:
        now[at] = _checked(self._call(now[at], row), len(row), self._name)


def _checked(found: Any, count: int, name: str) -> np.ndarray:
    """The values that a function returned, if they can be ranked."""
    values = np.asarray(found)
    if values.shape != (count,):
        raise PlanError(f"score {name} returned {values.shape} values for {count} tokens")
    if np.isnan(values.min(initial=np.inf)):
        raise PlanError(f"score {name} returned values that are no numbers")
    return values
