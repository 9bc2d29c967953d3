"""Which problems a live model solves, and how: the keywords that `live` and `record` share."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.settings import MOST_INT
from arborsim.products import choices

if TYPE_CHECKING:
    from arborsim.products.choices import Budgets, Policies, Settings

#: Reference tasks that are searched as a tree unless asked otherwise.
_TREES = {"game24": "tot-bfs"}


class Problems(TypedDict, total=False):
    """Problems, the model that solves them, the search, and what scores its thoughts.

    Attributes
    ----------
    task : str
        ``"chain"``, ``"game24"`` or ``"tail"``; "" for that of the model.
    model : str
        ``"chain"``, ``"game24"``, ``"tail"``, ``"tail-deep"`` (shipped), a folder with
        safetensors, a model id, or ``"config:llama-3.1-8b"``: random weights.
    prompts : path
        JSON lines, each ``{"prompt": "..."}``.
    chat : bool
        Put each prompt into the tokeniser's chat template.
    stop : sequence of str
        Texts that end a thought of a prompt; a newline if there are none.
    episodes, first : int
        How many problems (0: 8, or all prompts), and the first one.
    split : {"test", "train"}
    lines, lines_per_thought : int
        Of `chain` and `tail`: program lines, and lines per thought.
    max_tokens : int
        Per path; 0 for the task's.
    prompt_tokens : int
        Random weights: tokens per prompt.
    device, dtype : str
        ``"cpu"`` or ``"cuda"``; ``"auto"``, ``"float32"``, ``"bfloat16"`` or ``"float16"``.
    search : str
        Search algorithm; "" for the task's.
    temperature, top_p : float
        How tokens are drawn; temperature 0 is greedy, None is 0 for a line and 0.7 for trees.
    seed : int
        Of what is drawn.
    reward : str
        What scores thoughts: ``"verifier"``, ``"value"``, or the folder of a reward model.
    reward_token, reward_label, reward_aggregate : str
        Of a reward model: see `arborsim.play.backends.RewardChoice`.
    noise, dead_penalty, value_floor : float
        Of the verifier's rewards.
    embed : str
        Folder of a model that embeds thoughts; "" for mean last hidden states.
    thought_tokens : int
        Longest thought of a prompt.
    keep_duplicates, trust_remote_code : bool
    """

    task: str
    model: str
    prompts: str | os.PathLike[str] | None
    chat: bool
    stop: Sequence[str]
    episodes: int
    first: int
    split: str
    lines: int
    lines_per_thought: int
    max_tokens: int
    prompt_tokens: int
    device: str
    dtype: str
    search: str
    temperature: float | None
    top_p: float
    seed: int
    reward: str
    reward_token: str
    reward_label: str
    reward_aggregate: str
    noise: float
    dead_penalty: float
    value_floor: float
    embed: str
    thought_tokens: int
    keep_duplicates: bool
    trust_remote_code: bool


DEFAULTS: Problems = {
    "task": "", "model": "", "prompts": None, "chat": False, "stop": (), "episodes": 0, "first": 0,
    "split": "test", "lines": 0, "lines_per_thought": 0, "max_tokens": 0, "prompt_tokens": 0,
    "device": "cpu", "dtype": "auto", "search": "", "temperature": None, "top_p": 1.0, "seed": 0,
    "reward": "", "reward_token": "", "reward_label": "", "reward_aggregate": "last", "noise": 0.1,
    "dead_penalty": 1.0, "value_floor": 0.3, "embed": "", "thought_tokens": 64,
    "keep_duplicates": False, "trust_remote_code": False,
}  # fmt: skip
_COUNTS = (
    "episodes", "first", "lines", "lines_per_thought", "max_tokens", "prompt_tokens",
)  # fmt: skip


def algorithm(given: Mapping[str, Any]) -> str:
    """The search: that of the task unless one was named."""
    task = given.get("task") or given.get("model") or ""
    return str(given.get("search") or _TREES.get(task, "linear"))


def search_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """As the fields of a `SearchRequest`; what is not given has its default.

    Raises
    ------
    UsageError
        A keyword is unknown or a number out of range.
    """
    from arborsim.play.backends import RewardChoice, SearchRequest

    for name in given:
        if name not in DEFAULTS:
            raise UnknownName("keyword", name, DEFAULTS)
    values: dict[str, Any] = {**DEFAULTS, **given}
    choices.at_least(0, **{name: values[name] for name in _COUNTS})
    choices.at_least(0, MOST_INT, seed=values["seed"])
    choices.at_least(1, thought_tokens=values["thought_tokens"])
    search, temperature = algorithm(values), values["temperature"]
    if temperature is None:  # branches must differ; a line need not
        temperature = 0.0 if search == "linear" else 0.7
    if temperature < 0 or not 0 <= values["top_p"] <= 1:
        raise UsageError(
            f"temperature must be 0 or more and top_p in [0, 1], not {temperature} and "
            f"{values['top_p']}"
        )
    prompts = values["prompts"]
    reward = (values[f"reward{part}"] for part in ("", "_token", "_label", "_aggregate"))
    options = {name: values[name] for name in ("lines", "lines_per_thought")}
    same = [each.name for each in fields(SearchRequest) if each.name in values]
    return {name: values[name] for name in same} | {
        "model": values["model"] or values["task"] or "chain",
        "prompts": None if prompts is None else Path(prompts),
        "search": search,
        "temperature": temperature,
        "task_options": {name: value for name, value in options.items() if value},
        "stop": stop_strings(values["stop"]),
        "reward": RewardChoice(*reward),
        "dedupe": not values["keep_duplicates"],
    }


def stop_strings(given: Sequence[str]) -> tuple[str, ...]:
    """Those that were given, or a newline; a backslash and an n is a newline, too."""
    texts = choices.listed(given)
    if "" in texts:
        raise UsageError("--stop is empty: give the text that ends a thought, or leave it out")
    return tuple(text.replace("\\n", "\n").replace("\\t", "\t") for text in texts) or ("\n",)


def split_settings(
    given: Sequence[str], search: str, policies: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """What of ``--set`` is for the search, and what for policies.

    ``search.name=value`` and ``tot-bfs.name=value`` are for the search; one given by its
    class also goes by the class's `name`.  So is ``name=value`` if the search has that option; a
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


def live_fields(
    problems: Mapping[str, Any],
    *,
    policies: Policies,
    budgets: Budgets,
    settings: Settings,
    full: bool = True,
) -> dict[str, Any]:
    """As the fields of a `LiveRequest`; `full` retention leads even if it was not named."""
    from arborsim.core.observations import Signal
    from arborsim.play.episode import cells_of
    from arborsim.play.results import BASELINE
    from arborsim.policies.registry import build

    chosen = choices.ChosenPolicies(policies, oracle=False)
    given = choices.setting_texts(settings)
    options, rest = split_settings(given, algorithm(problems), chosen.names)
    made = chosen.build(choices.policy_settings(chosen.names, rest))
    for policy in made:
        if Signal.EVICTION_TIME in policy.reads():
            raise UsageError(
                f"--policy {policy.name}: the offline optimum needs the future, which no live "
                "search has: replay a trace instead"
            )
    if full:
        made = [build(BASELINE), *(policy for policy in made if policy.name != BASELINE)]
    cells = tuple(cells_of(made, choices.budgets(budgets)))
    return search_fields(problems) | {"search_options": options, "cells": cells}
