"""The quick question: a workload from a handful of numbers, without a file.

::

    QuickOptions(model="llama-3.1-8b", rate="20/min", p95="60 s",
                 tree="depth=6,width=16,thought=80").tables("l40s,h100")

The answers become the tables of a workload file and are read as one, so both are checked by the
same rules.  `quick_toml` is that file, to go on from.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from arborsim.core.documents import to_toml
from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.records import duration_s, is_number, located
from arborsim.core.settings import MOST_COUNT, whole_number
from arborsim.core.units import is_plain, read
from arborsim.products import choices
from arborsim.products.declare import AnyPath, Option, Options, declared, listed

#: What can be said of a tree and of a chain.
TREE, CHAIN = ("depth", "width", "thought", "branch"), ("tokens",)
#: Options that say what arrives.
_MIX = ("tree", "chain", "trace", "log", "prompt", "solved")
#: Policies that read no signals, so that they can serve searches which are only stated.
POLICIES = ("full", "kivi", "streaming-llm")
#: Length and number of runs with `quick`, and how far loads that are tried lie apart.
QUICK: dict[str, Any] = {"searches": 200, "warm_up": 20, "runs": 2, "resolution": 0.06}
#: Distinct searches that are drawn; an even number of them can meet most stated solve rates.
_DISTINCT = 40
_PERCENTILES = {"p50": 50, "p95": 95, "p99": 99}
_RANGE = re.compile(r"(\S+)\s*\.\.\s*(\S+)")


@dataclass(frozen=True, kw_only=True)
class QuestionOptions(Options, panel="The question, or what replaces parts of a workload file"):
    """Settings that a workload file has, too, given here in its place.

    Parameters
    ----------
    model
        Geometry to charge for: a name, or a config.json.
    rate
        What arrives: 20/min, 0.5/s, 1200/h, or a number per second.
    ttft
        Time to the first token, at most: 500ms.
    tpot
        Time per output token after the first, at most: 40ms.
    p95
        Time from arrival to answer that 95% must meet: 60s, 2min.
    p50
        The same for 50%.
    p99
        The same for 99%.
    percentile
        Share of the requests, in %, that must meet --ttft and --tpot: 99, or ttft=99,tpot=90.
    tp
        GPUs that share the model (tensor parallelism), by comma; auto takes the fewest that hold
        it.
    dp
        Replicas that share the load, each of --tp GPUs.
    prices
        Prices of a GPU for an hour: h100=2.5,h200=2.9..3.5.
    policies
        Policies by comma.
    budgets
        Shares (0.5) or tokens (2048), by comma.
    kv_dtype
        Type of the KV cache: fp8, bf16.
    weights
        Type of the weights: fp8, int4, bf16.
    quick
        Two runs of 200 searches, loads 6% apart, in place of three of 1,000, 2% apart: under a
        minute on two cores. Where compared, largest loads were 12% lower to 9% higher.
    """

    model: Annotated[str | None, Option(complete="model")] = None
    rate: Annotated[str | float | None, Option(shown="seek the largest")] = None
    ttft: str | float | None = None
    tpot: str | float | None = None
    p95: str | float | None = None
    p50: str | float | None = None
    p99: str | float | None = None
    percentile: Annotated[str | float | Mapping[str, float] | None, Option(shown="95")] = None
    tp: Annotated[str | int | Sequence[int] | None, Option(shown="auto; the workload's")] = None
    dp: Annotated[int | None, Option(shown="as many as the load needs", least=1)] = None
    prices: Annotated[str | Mapping[str, Any] | None, Option("price", shown="a list's")] = None
    policies: Annotated[
        str | Sequence[str] | None,
        Option("policy", complete="policy", shown="full, kivi, streaming-llm"),
    ] = None
    budgets: Annotated[
        str | float | Sequence[str | float] | None, Option("budget", shown="0.5")
    ] = None
    kv_dtype: Annotated[str | None, Option(shown="the model's")] = None
    weights: Annotated[str | None, Option(shown="the model's")] = None
    quick: bool = False

    def given(self, kind: type[Options]) -> dict[str, Any]:
        """The options of a class that were given, by keyword."""
        found = {each.name: getattr(self, each.name) for each in declared(kind)}
        for name in {"policies", "budgets"} & found.keys():
            texts = listed(found[name] or ())
            if all(isinstance(each, str) for each in texts):
                found[name] = choices.names(texts)
        return {name: value for name, value in found.items() if value not in (None, [], False)}

    def replaced(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The tables of a workload file with what is given here in their place."""
        given = self.given(QuestionOptions)
        model = {key: given[key] for key in ("kv_dtype", "weights") if key in given}
        candidates: dict[str, Any] = {
            key: _listed(given[key]) for key in ("policies", "budgets") if key in given
        }
        if self.tp is not None:
            candidates["tensor_parallel"] = _groups(self.tp)
        if self.dp is not None:
            candidates["replicas"] = self.dp
        arrivals = {} if self.rate is None else {"rate_per_s": parse_rate(self.rate)}
        changes: dict[str, dict[str, Any]] = {
            "model": ({"name": str(self.model)} if self.model else {}) | model,
            "arrivals": arrivals,
            "candidates": candidates,
            "target": self._target(raw.get("target", {})),
        }
        found: dict[str, Any] = {**raw}
        if self.quick:
            found |= QUICK
        for name, table in changes.items():
            known: Any = raw.get(name, {})
            if table and isinstance(known, Mapping):
                found[name] = {**known, **table}
        if self.tpot is not None:
            found["target"].pop("token", None)
        if self.prices is not None:
            shown: dict[str, Any] = {**raw.get("prices", {})}
            own = {**shown.get("per_hour", {}), **_prices(self.prices)}
            found["prices"] = {**shown, "per_hour": own}
        return found

    def _target(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """Limits with their percentiles, in place of those of a file."""
        named = {key: each for key in _PERCENTILES if (each := getattr(self, key)) is not None}
        if len(named) > 1:
            raise UsageError(f"{' and '.join(named)} are given: keep one")
        found: dict[str, Any] = {}
        for key, each in named.items():
            found["search"] = _limit(key, each)
        found |= {
            key: _limit(key, each)
            for key in ("ttft", "tpot")
            if (each := getattr(self, key)) is not None
        }
        ranks = _ranks(self.percentile)
        for key in named:
            ranks["search"] = _PERCENTILES[key]
        if not ranks:
            return found
        usual = before.get("percentile", {})
        if not isinstance(usual, Mapping):
            usual = dict.fromkeys(("search", "ttft", "tpot"), usual)
        return found | {"percentile": {**usual, **ranks}}


@dataclass(frozen=True, kw_only=True)
class QuickOptions(QuestionOptions, panel="Instead of a workload file"):
    """The arrivals, in place of a workload file.

    Parameters
    ----------
    tree
        depth=6,width=16,thought=80: levels, thoughts on each, tokens of each. branch=4 are the
        children of a thought. 40..160 is a uniform range.

        In Python also a mapping: ``{"depth": 6, "width": 16, "thought": 80}``.
    chain
        tokens=8000: one chain of thought.
    trace
        Recorded searches instead.
    log
        A log of requests instead, of any format that arborsim import requests knows: they arrive
        as recorded, at --rate if it is given.
    prompt
        Tokens of the prompt.
    solved
        Share of correct answers.
    """

    tree: str | Mapping[str, Any] | None = None
    chain: str | int | Mapping[str, Any] | None = None
    trace: Annotated[AnyPath | None, Option(complete="trace")] = None
    log: AnyPath | None = None
    prompt: Annotated[str | int | None, Option("prompt-tokens", shown="500")] = None
    solved: Annotated[float | None, Option(shown="unknown")] = None

    @property
    def asked(self) -> dict[str, Any]:
        """Options given in place of a workload file's mix."""
        return {k: v for k, v in vars(self).items() if k in _MIX and v is not None}

    def tables(self, gpus: str | Sequence[str]) -> dict[str, Any]:
        """The tables of a workload file that asks the same of these GPUs.

        Raises
        ------
        UsageError
            Something is missing or cannot be read, or there is more than one of a kind.
        """
        mix, name = self._mix()
        tables = self.replaced(
            {
                "name": f"{Path(str(self.model)).name}: {name}",
                "model": {},
                "mix": [mix],
                "arrivals": {"kind": "poisson" if self.log is None else "recorded"},
                "candidates": {
                    "gpus": _listed(gpus),
                    "policies": _listed(POLICIES),
                    "budgets": [0.5],
                    "tensor_parallel": "auto",
                },
                "target": {},
            }
        )
        if not tables["target"].keys() - {"percentile"}:
            raise UsageError(
                "the latency target is missing: ttft (500ms), tpot (40ms), p95 (60s), p50 or p99"
            )
        return tables

    def _mix(self) -> tuple[dict[str, Any], str]:
        """The one entry of the mix, and what it is called."""
        named = {name: getattr(self, name) for name in ("tree", "chain", "trace", "log")}
        given = [name for name, each in named.items() if each is not None]
        if not given:
            raise UsageError(
                "what is searched is missing: a tree (depth=6,width=16,thought=80), a chain "
                "(tokens=8000), a trace, or a log of requests"
            )
        if len(given) > 1:
            raise UsageError(f"{' and '.join(given)} are given: keep one")
        (kind,), solved = given, self.solved
        if kind in ("trace", "log"):
            for name, each in (("prompt", self.prompt), ("solved", solved)):
                if each is not None:
                    raise UsageError(f"{name} belongs to a tree or chain: the {kind} has its own")
            return {kind: str(named[kind])}, Path(named[kind]).stem
        counts: dict[str, Any]
        if kind == "chain":
            plain = is_number(self.chain) or (isinstance(self.chain, str) and "=" not in self.chain)
            tokens = {"tokens": self.chain} if plain else self.chain
            said = _numbers("chain", CHAIN, tokens)
            name = f"chains of {said['tokens']} tokens"
            counts = {"thought_tokens": said["tokens"]}
        else:
            said = _numbers("tree", TREE, self.tree)
            name = f"trees, {', '.join(f'{key} {value}' for key, value in said.items())}"
            counts = _tree(said)
        with located("prompt"):
            prompt = _count(500 if self.prompt is None else self.prompt)
        made = {"prompt_tokens": prompt, **counts}
        if solved is not None:
            made["solved"] = solved
        return {"name": kind, "generated": {**made, "searches": _DISTINCT}}, name


def quick_toml(tables: Mapping[str, Any]) -> str:
    """A workload file with these tables (`QuickOptions.tables`)."""
    head = "# Written by arborsim plan. `arborsim plan --example` explains every key.\n"
    return head + to_toml(tables)


def parse_rate(given: str | float) -> float:
    """Searches per second: of ``"20/min"``, ``"20rps"``, ``"1200 per hour"``, or the number."""
    number = math.nan
    if isinstance(given, str):
        with suppress(ValueError):
            number = float(given) if is_plain(given) else read("rate", given)
        if math.isnan(number):
            raise UsageError(
                "rate must be searches per time, such as 20/min, 0.5/s, 20rps or 1200/h, "
                f"not '{given:.40}'"
            )
    else:
        number = given
    if not is_number(number) or number <= 0:
        raise UsageError(f"rate must be above 0 and finite, not {given!r:.40}")
    return float(number)


def _limit(name: str, limit: object) -> str:
    """A time as a workload file has it; a number is in seconds."""
    if is_number(limit):
        limit = f"{limit!r} s"
    with located(name):
        try:
            duration_s(limit)
        except ValueError as error:
            raise UsageError(f"{error}, not {limit!r:.40}") from None
    return str(limit)


def _ranks(given: object) -> dict[str, float]:
    """Percentiles by kind of limit: of ``99`` or ``"ttft=99,tpot=90"``."""
    if given is None:
        return {}
    said = _pairs("percentile", given) if not is_number(given) else {}
    with suppress(ValueError):
        if not isinstance(given, Mapping) and not said:
            rank = float(str(given).removesuffix("%"))
            return {"ttft": rank, "tpot": rank}
        return {kind: float(str(rank).removesuffix("%")) for kind, rank in said.items()}
    raise UsageError(f"percentile must be a number such as 99, or ttft=99,tpot=90, not {given!r}")


def _groups(given: object) -> list[int] | str:
    """GPUs that share the model: ``"1,2,4"``, or ``"auto"``."""
    each = _listed(given)
    if each == ["auto"]:
        return "auto"
    with suppress(ValueError):
        return [whole_number(str(one)) for one in each]
    raise UsageError(f"tp must be whole numbers by comma (1,2,4), or auto, not {given!r:.40}")


def _prices(given: object) -> dict[str, Any]:
    """Prices by GPU: of ``"h100=2.5,h200=2.9..3.5"``, or a mapping."""
    if isinstance(given, Mapping):
        return dict(given)
    found: dict[str, Any] = {}
    for gpu, text in _pairs("price", given).items():
        try:
            ends = [float(end) for end in text.removeprefix("$").split("..")]
        except ValueError:
            raise UsageError(
                f"price: {gpu} must cost a number an hour, or a range such as 2.5..3.1, not "
                f"'{text:.40}'"
            ) from None
        found[gpu] = ends[0] if len(ends) == 1 else ends
    return found


def _pairs(what: str, given: object) -> dict[str, Any]:
    """``"a=1,b=2"`` as a mapping; empty where there is no equals sign at all."""
    if isinstance(given, Mapping):
        return dict(given)
    pairs = [each.partition("=") for each in _listed(given)]
    if not any(equals for _, equals, _ in pairs) and what == "percentile":
        return {}
    for name, equals, value in pairs:
        if not equals or not name.strip() or not value.strip():
            raise UsageError(f"{what}: '{name:.40}' should be name=number")
    return {name.strip(): value.strip() for name, _, value in pairs}


def _tree(said: Mapping[str, Any]) -> dict[str, Any]:
    """A tree as `generated` has it: levels of equal width."""
    width = said["width"]
    if not isinstance(width, int) or width < 1:
        raise UsageError(f"tree: width must be a whole number of at least 1, not {width}")
    branch = said.get("branch") or next((n for n in (4, 3, 2) if width % n == 0), width)
    if not isinstance(branch, int) or width % branch:
        raise UsageError(f"tree: branch must divide the width, {width}; {branch} does not")
    found = {"thought_tokens": said["thought"], "depth": said["depth"], "first": width}
    return found | {"branching": branch, "pruned": 1 - 1 / branch}


def _numbers(what: str, keys: Sequence[str], given: object) -> dict[str, Any]:
    """``"depth=6,width=16"``, or a mapping, as numbers. What is missing is named."""
    if isinstance(given, Mapping):
        said = {str(key): value for key, value in given.items()}
    else:
        # A distribution has commas and equal signs of its own.
        pieces = re.split(r",(?!\s*(?:low|high|median|sigma|most)\s*=)", str(given))
        said = {}
        for piece in pieces:
            key, equals, value = (part.strip() for part in piece.partition("="))
            if not equals:
                names = ", ".join(keys)
                raise UsageError(f"{what}: '{piece:.40}' should be name=number, of {names}")
            if key in said:
                raise UsageError(f"{what} has {key} twice")
            said[key] = value
    for key in said:
        if key not in keys:
            raise UnknownName(f"part of {what}", key, keys)
    missing = [key for key in keys if key not in said and key != "branch"]
    if missing:
        raise UsageError(f"{what}: {' and '.join(missing)} must be given, {missing[0]}=N")
    found = {}
    for key in (key for key in keys if key in said):
        with located(f"{what}: {key}"):
            found[key] = _count(said[key])
    return found


def _count(given: object) -> Any:
    """A number, or the text of a distribution as workload files have it."""
    if not isinstance(given, str):
        return given
    with suppress(ValueError):
        if match := _RANGE.fullmatch(given.strip()):
            low, high = map(whole_number, match.groups())
            return f"uniform:low={low},high={high}"
        return whole_number(given)
    if ":" not in given:
        raise UsageError(
            f"it must be a whole number up to {MOST_COUNT:,} or a range such as 40..160, not "
            f"'{given:.40}'"
        )
    return given.strip()


def _listed(given: object) -> list[Any]:
    """The parts between commas, or of a sequence."""
    if isinstance(given, str):
        return [each.strip() for each in given.split(",") if each.strip()]
    return list(given) if isinstance(given, Sequence) else [given]
