"""The registry of model families: numbers of a model by formulas over its config.json.

``families.toml`` declares for each ``model_type`` what a layer is made of: how many layers keep
every token, a window of them, latent vectors or a recurrent state, and which matrices, gates,
biases and experts they have.  `Numbers` evaluates these formulas on one configuration; what the
configuration leaves out has the family's default (``defaults.toml``, the defaults of transformers).
"""

from __future__ import annotations

import ast
import difflib
import operator
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from typing import Any

from arborsim.core.errors import UsageError
from arborsim.core.records import parse_toml

_ROOT = "decoder"
#: Keys under which a model of several parts holds the configuration of its language model.
_NESTED = ("text_config", "thinker_config", "llm_config", "language_config", "llm", "decoder")
_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_LARGEST = 1 << 62
#: Keys of a mixture of experts, for families that have none.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@cache
def _table(name: str) -> dict[str, Any]:
    file = resources.files("arborsim.machine") / name
    return parse_toml(file.read_text(encoding="utf-8"), name)


def family_names() -> list[str]:
    """Each ``model_type`` that is declared."""
    return sorted(_table("defaults.toml"))


@cache
def _chain(family: str) -> tuple[dict[str, Any], ...]:
    """A family and those that it is like, the root last."""
    table = _table("families.toml")
    found = [table[table["same"].get(family, family)]]
    while found[-1] is not table[_ROOT]:
        found.append(table[found[-1].get("like", _ROOT)])
    return tuple(found)


@cache
def _parsed(formula: str) -> ast.expr:
    return ast.parse(formula, mode="eval").body


def nested(config: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """The configuration of the language model, which may lie inside of another's.

    What is said of the whole model holds for it, too, where it says nothing itself.
    """
    found = dict(config)
    while inside := [key for key in _NESTED if found.get(key)]:
        part = found[inside[0]]
        if not isinstance(part, dict):
            raise UsageError(f"{origin}: {inside[0]} must be an object, not {part!r:.40}")
        outer = {key: found[key] for key in ("tie_word_embeddings",) if key in found}
        kind = _table("families.toml")["inside"].get(found.get("model_type"))
        found = {**({"model_type": kind} if kind else {}), **part, **outer}
    return found


class Numbers:
    """The formulas of a family, evaluated on one configuration.

    ``numbers["head_dim"]`` is the value of that name, ``numbers.count("layers")`` a number that
    must be whole and not negative.  Both raise `UsageError` if a key is missing or senseless.
    """

    def __init__(self, config: Mapping[str, Any], family: str, origin: str) -> None:
        defaults = _table("defaults.toml")
        if family not in defaults:
            raise UsageError(
                f"{origin}: model_type '{family}' is not known{_like(family, family_names())}; "
                f"give it as '{origin} as llama' to read it as a family whose layers it shares"
            )
        self._defaults = defaults[family]
        self._chain = _chain(family)
        self.config, self.family, self._origin = config, family, origin
        self._known: dict[str, Any] = {}
        self._refuse_other_forms()

    def _refuse_other_forms(self) -> None:
        """Refuse what the configuration says and the family does not declare."""
        declared = " ".join(str(value) for each in self._chain for value in each.values())
        kinds = self.config.get("layer_types")
        if isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds):
            known = {*re.findall(r"\w+", declared)}
            if others := sorted(set(kinds) - known - {"full_attention"}):
                raise self.error(f"it has layers of other kinds ({', '.join(others)})")
        if self.config.get("kv_lora_rank") and not self["latent"]:
            raise self.error(f"it describes latent attention, which {self.family} has not")
        unmixed = all(isinstance(each.get("experts", 0), int) for each in self._chain)
        if unmixed and (said := [key for key in _EXPERTS if self.config.get(key)]):
            raise self.error(
                f"it describes a mixture of experts ({said[0]}), which {self.family} has not"
            )

    def error(self, why: str) -> UsageError:
        return UsageError(f"{self._origin}: {why}")

    def _lacks(self, name: str) -> UsageError:
        return self.error(f"it lacks {self._key_of(name)}: is it a model's config.json?")

    def count(self, name: str, least: int = 0) -> int:
        """A whole number of at least `least`."""
        value = self[name]
        if value is None:
            raise self._lacks(name)
        if isinstance(value, bool) and not least:
            value = int(value)
        if type(value) is int and value >= _LARGEST:
            raise self.error(f"{self._key_of(name)} is {value!r:.40}: no model is so large")
        if type(value) is not int or value < least:
            rule = "a positive whole number" if least else "a whole number"
            raise self.error(f"{self._key_of(name)} must be {rule}, not {value!r:.40}")
        return value

    def signed(self, name: str) -> int:
        """A whole number that may be negative."""
        value = self[name]
        return int(value) if isinstance(value, int) else self.count(name)

    def __getitem__(self, name: str) -> Any:
        if name not in self._known:
            self._known[name] = self._value(name, 0)
        return self._known[name]

    def _value(self, name: str, level: int) -> Any:
        """The value of a name, defined at this level of the chain or below."""
        for at, declared in enumerate(self._chain[level:], level):
            formula = declared.get(name)
            if isinstance(formula, str):
                return self._formula(name, formula, at + 1)
            if formula is not None:
                return formula
        return self._key(name)

    def _formula(self, name: str, formula: str, below: int) -> Any:
        read: list[str] = []

        def find(other: str) -> Any:
            read.append(other)
            return self._value(other, below) if other == name else self[other]

        try:
            return self._evaluate(_parsed(formula), find)
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError):
            missing = [key for key in tuple(read) if find(key) is None]
            if missing:
                raise self._lacks(missing[-1]) from None
            raise self.error(
                f"{name} cannot be computed: one of {', '.join(dict.fromkeys(read))} is no number "
                "that a model can have"
            ) from None

    def _key_of(self, name: str) -> str:
        """The key of the configuration that a name stands for."""
        while isinstance(formula := next((d[name] for d in self._chain if name in d), None), str):
            nodes = list(ast.walk(_parsed(formula)))
            functions = [node.func for node in nodes if isinstance(node, ast.Call)]
            called = {each.id for each in functions if isinstance(each, ast.Name)}
            named = (
                node.id if isinstance(node, ast.Name) else node.value
                for node in nodes
                if isinstance(node, ast.Name | ast.Constant)
            )
            found = [each for each in named if isinstance(each, str) and each not in called]
            if found[0] == name:
                break
            name = found[0]
        return name

    def _key(self, key: str) -> Any:
        """The value in the configuration, or the default of the family, or None."""
        default = self._defaults.get(key)
        value = self.config.get(key, default)
        if value is None or default is None:
            return value
        number = isinstance(default, int | float) and isinstance(value, int | float)
        if not number and type(value) is not type(default):
            kinds = {bool: "true or false", int: "a whole number", float: "a number"}
            wanted = kinds.get(type(default), f"a {type(default).__name__}")
            raise self.error(f"{key} must be {wanted}, not {value!r:.40}")
        if isinstance(value, int | float) and value < 0 <= default:
            raise self.error(f"{key} must not be negative, and is {value!r:.40}")
        return value

    def _evaluate(self, node: ast.expr, find: Callable[[str], Any]) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return find(node.id)
            case ast.BinOp():
                left, right = self._evaluate(node.left, find), self._evaluate(node.right, find)
                return _OPERATORS[type(node.op)](left, right)
            case ast.UnaryOp():
                return _OPERATORS[type(node.op)](self._evaluate(node.operand, find))
            case ast.BoolOp():
                wanted = isinstance(node.op, ast.Or)
                for each in node.values:
                    value = self._evaluate(each, find)
                    if bool(value) is wanted:
                        break
                return value
            case ast.IfExp():
                taken = node.body if self._evaluate(node.test, find) else node.orelse
                return self._evaluate(taken, find)
            case ast.Compare():
                sides = [self._evaluate(each, find) for each in (node.left, *node.comparators)]
                pairs = zip(node.ops, sides, sides[1:], strict=False)
                return all(_OPERATORS[type(op)](left, right) for op, left, right in pairs)
            case ast.Attribute():
                return self._evaluate(node.value, find)[node.attr]
            case ast.Call(func=ast.Name(id=name)):
                given = [self._evaluate(each, find) for each in node.args]
                return getattr(self, f"_{name}")(*given)
        raise AssertionError(f"a formula has no {ast.dump(node)}")

    # What formulas call.

    _int, _min, _max, _len = int, min, max, len

    def _refuse(self, form: str) -> None:
        raise self.error(f"it describes {form}, which is not supported for {self.family}")

    def _given(self, *keys: str) -> Any:
        """The first of these keys that the configuration has, or that has a default."""
        found = [key for key in keys if key in self.config]
        values = [self._key(key) for key in found]
        if found:
            return next((value for value in values if value is not None), None)
        return next((self._defaults[key] for key in keys if key in self._defaults), None)

    def _first(self, value: Any) -> Any:
        return value[0] if isinstance(value, list) else value

    def _exact(self, hidden: int, heads: int) -> int:
        if hidden % heads:
            raise self.error(f"hidden_size {hidden} is no multiple of {heads} heads")
        return hidden // heads

    def _round_up(self, number: int, step: int) -> int:
        return -(-number // step) * step

    def _kinds(self, key: str) -> list[Any]:
        """A list with an entry for each layer."""
        kinds, layers = self[key], self["layers"]
        if not isinstance(kinds, list) or not all(isinstance(each, str) for each in kinds):
            raise self.error(f"{key} must be a list of names, not {kinds!r:.40}")
        if len(kinds) != layers:
            raise self.error(f"{key} names {len(kinds)} of {layers} layers")
        return kinds

    def _listed(self, *kinds: str) -> int:
        return sum(each in kinds for each in self._kinds("layer_types"))

    def _listed_mlp(self, *kinds: str) -> int:
        return sum(each in kinds for each in self._kinds("mlp_layer_types"))

    def _listed_in(self, found: list[str], *kinds: str) -> int:
        return sum(each in kinds for each in found)

    def _listed_flags(self, flags: list[int]) -> int:
        return sum(map(bool, flags))

    def _marks(self, pattern: str, mark: str) -> int:
        return pattern.count(mark)

    def _cached(self, kind: str, sharing: int) -> int:
        """Layers of a kind before the last `sharing` ones, which read the cache of others."""
        kinds = self._kinds("layer_types")
        return sum(each == kind for each in kinds[: len(kinds) - (sharing or 0)])

    def _every(self, period: int, offset: int) -> int:
        return len(range(offset, self["layers"], period))

    def _sparse_steps(self, step: int, dense: list[int] | None) -> int:
        """Layers with experts: every `step`-th, but for those that are listed as dense."""
        step, layers = step or 1, self["layers"]
        if not all(isinstance(each, int) for each in dense or ()):
            raise self.error(f"mlp_only_layers must be a list of numbers, not {dense!r:.40}")
        listed = sum(0 <= layer < layers and (layer + 1) % step == 0 for layer in set(dense or ()))
        return int(layers // step - listed)

    def _per_layer(self, key: str, default: Any) -> Any:
        """The value of a key that some layers have, the same for all of them."""
        layers = self.config.get("per_layer_config") or {}
        found = {each[key] for each in layers.values() if key in each}
        if len(found) > 1:
            raise self.error(f"per_layer_config has layers with several {key}: not supported")
        return found.pop() if found else default

    def _without_window(self) -> int:
        used = self["layer_types"] and self["use_sliding_window"] is not False
        if used and self._listed("sliding_attention"):
            raise self.error("it has layers with a sliding window and lacks sliding_window")
        return 0

    def _undeclared_window(self) -> int:
        raise self.error(
            f"it has sliding_window {self['window']} and does not say which layers: add "
            "layer_types, one of full_attention and sliding_attention per layer"
        )


def _like(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f" (the nearest is {near[0]})" if near else ""
