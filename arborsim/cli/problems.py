"""Options of the commands that run a model: which problems are searched, how, and with what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborsim.api.choices import ChosenPolicies, budgets, policy_settings
from arborsim.cli.command import panel
from arborsim.cli.options import PolicyOptions, expert_option, search_help
from arborsim.core.errors import UsageError

if TYPE_CHECKING:
    from arborsim.live.backends import ModelUsage

problem_option, search_option = panel("Problems and model"), panel("Search and rewards")
#: Reference tasks that are searched as a tree unless asked otherwise.
_TREES = {"game24": "tot-bfs"}


@dataclass(frozen=True)
class ProblemOptions:
    """Problems, the model that solves them, and the search."""

    task: str = problem_option("", "chain or game24; with --model FOLDER, whose weights those are.")
    model: str = problem_option(
        "",
        "chain or game24 (shipped), a folder with safetensors, a model id, or "
        "config:llama-3.1-8b: random weights.",
        shown="the task's",
    )
    prompts: Path | None = problem_option(None, 'JSON lines, each {"prompt": "..."}.')
    episodes: int = problem_option(0, "Problems.", shown="8, or all prompts", min=0)
    first: int = problem_option(0, "Number of the first problem.", min=0)
    lines: int = problem_option(0, "chain: program lines.", shown="96", min=0)
    max_tokens: int = problem_option(0, "Per path.", shown="the task's", min=0)
    device: str = problem_option("cpu", "cpu or cuda.")
    dtype: str = problem_option("auto", "auto, float32, bfloat16 or float16.")
    search: str = search_option(
        "", search_help(), complete="algorithm", shown="linear; game24: tot-bfs"
    )
    temperature: float | None = search_option(
        None, "0 is greedy.", shown="0 for linear, 1 for banks, else 0.7", min=0.0
    )
    top_p: float = search_option(
        1.0, "Draw from the most probable tokens that make this much.", min=0.0, max=1.0
    )
    seed: int = search_option(0, "Of what is drawn.", min=0)
    chat: bool = problem_option(
        False, "Put each prompt into the tokeniser's chat template.", "--chat"
    )
    stop: list[str] = problem_option(
        [], "Prompts: a thought ends with this text; repeatable.", shown="a newline"
    )

    @property
    def algorithm(self) -> str:
        """The search: that of the task unless one was named."""
        return self.search or _TREES.get(self.task or self.model, "linear")

    def request(self) -> dict[str, Any]:
        """As the fields of a `SearchRequest`."""
        from arborsim.live.backends import SearchRequest

        same = [each.name for each in fields(SearchRequest) if hasattr(self, each.name)]
        temperature = self.temperature
        if temperature is None:  # branches must differ; a line need not
            temperature = 0.0 if self.algorithm == "linear" else 0.7
        options = {name: getattr(self, name, 0) for name in ("lines", "lines_per_thought")}
        return {name: getattr(self, name) for name in same} | {
            "model": self.model or self.task or "chain",
            "search": self.algorithm,
            "temperature": temperature,
            "task_options": {name: value for name, value in options.items() if value},
            "stop": stop_strings(self.stop),
        }


def stop_strings(given: Sequence[str]) -> tuple[str, ...]:
    """Those that were given, or a newline; a backslash and an n is a newline, too."""
    if "" in given:
        raise UsageError("--stop is empty: give the text that ends a thought, or leave it out")
    return tuple(text.replace("\\n", "\n").replace("\\t", "\t") for text in given) or ("\n",)


@dataclass(frozen=True)
class RewardedProblems(ProblemOptions):
    """Problems, and what scores and embeds the thoughts of their search."""

    split: str = problem_option("test", "test or train.")
    lines_per_thought: int = problem_option(0, "chain: lines per thought.", shown="4", min=0)
    trust_remote_code: bool = problem_option(
        False, "Run code that comes with a model.", "--trust-remote-code"
    )
    reward: str = search_option(
        "",
        "What scores thoughts: verifier, value (game24's own Y or N), or the folder of a "
        "reward model.",
        shown="chain: verifier; game24: value",
    )
    embed: str = search_option(
        "",
        "Folder of a sentence-transformers model that embeds thoughts.",
        shown="mean last hidden states",
    )
    keep_duplicates: bool = search_option(
        False, "Go on with thoughts that repeat a sibling.", "--keep-duplicates"
    )
    reward_token: str = expert_option(
        "", "Step-token model: the token after which it scores a step."
    )
    reward_label: str = expert_option(
        "",
        "What is good: a class of a classifier [default: 1 of two], or the tokens good,bad "
        "of a step-token model [default: +,-].",
    )
    reward_aggregate: str = expert_option("last", "Scores of steps: last, min, prod or mean.")
    noise: float = expert_option(0.1, "Verifier: noise of rewards (std).", min=0.0)
    dead_penalty: float = expert_option(
        1.0, "Verifier: how well rewards see a dead path.", min=0.0, max=1.0
    )
    value_floor: float = expert_option(
        0.3, "chain: value of a living state without progress.", min=0.0, max=1.0
    )
    thought_tokens: int = expert_option(
        64, "Prompts: longest thought (it also ends with --stop).", min=1
    )

    def request(self) -> dict[str, Any]:
        from arborsim.live.backends import RewardChoice

        given = self.reward, self.reward_token, self.reward_label, self.reward_aggregate
        more = {"reward": RewardChoice(*given), "dedupe": not self.keep_duplicates}
        return super().request() | more


def split_settings(
    given: Sequence[str], search: str, policies: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """What of ``--set`` is for the search, and what for policies.

    ``search.name=value`` and ``tot-bfs.name=value`` are for the search; one given by its
    class also goes by the class's `name`.  So is ``name=value`` if the search has that option; a
    `UsageError` if a chosen policy has it as well.
    """
    from arborsim.policies.registry import find, parameter_name
    from arborsim.search import find_search, search_options

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


def settled(
    problems: ProblemOptions, policies: PolicyOptions, *, full: bool = True
) -> dict[str, Any]:
    """As the fields of a `LiveRequest`; `full` retention leads even if it was not named."""
    from arborsim.core.observations import Signal
    from arborsim.policies.registry import build
    from arborsim.run.episode import cells_of
    from arborsim.run.results import BASELINE

    chosen = ChosenPolicies(policies.policy, oracle=False)
    options, rest = split_settings(policies.set_, problems.algorithm, chosen.names)
    made = chosen.build(policy_settings(chosen.names, rest))
    for policy in made:
        if Signal.EVICTION_TIME in policy.reads():
            raise UsageError(
                f"--policy {policy.name}: the offline optimum needs the future, which no live "
                "search has: replay a trace instead"
            )
    if full:
        made = [build(BASELINE), *(policy for policy in made if policy.name != BASELINE)]
    cells = tuple(cells_of(made, budgets(policies.budget)))
    return problems.request() | {"search_options": options, "cells": cells}


def describe_usage(usage: ModelUsage) -> str:
    """What a reward or embedding model took, in words."""
    kind = {"reward": "reward model", "embed": "embedding model"}[usage.role]
    kv = f", KV up to {usage.peak_kv_bytes / 1e6:.3g} MB" if usage.peak_kv_bytes else ""
    return (
        f"{kind} {usage.name}: {usage.texts} thoughts, {usage.wall_s:.2f} s, weights "
        f"{usage.weight_bytes / 1e6:.3g} MB{kv}"
    )
