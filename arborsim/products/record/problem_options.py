"""Options of the commands that run a model: which problems are searched, how, and with what."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arborsim.products.command import panel
from arborsim.products.options import expert_option, search_help

problem_option, search_option = panel("Problems and model"), panel("Search and rewards")


@dataclass(frozen=True)
class ProblemOptions:
    """Problems, the model that solves them, and the search."""

    task: str = problem_option(
        "", "chain, game24 or tail; with --model FOLDER, whose weights those are."
    )
    model: str = problem_option(
        "",
        "chain, game24, tail or tail-deep (shipped), a folder with safetensors, a model id, or "
        "config:llama-3.1-8b: random weights.",
        shown="the task's",
    )
    prompts: Path | None = problem_option(None, 'JSON lines, each {"prompt": "..."}.')
    episodes: int = problem_option(0, "Problems.", shown="8, or all prompts", min=0)
    first: int = problem_option(0, "Number of the first problem.", min=0)
    lines: int = problem_option(0, "chain, tail: program lines.", shown="96, 16", min=0)
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

    def fields(self) -> dict[str, Any]:
        """As arguments of `arborsim.live` and `arborsim.record`."""
        return dict(vars(self))


@dataclass(frozen=True)
class RewardedProblems(ProblemOptions):
    """Problems, and what scores and embeds the thoughts of their search."""

    split: str = problem_option("test", "test or train.")
    lines_per_thought: int = problem_option(
        0, "chain, tail: lines per thought.", shown="4, 1", min=0
    )
    trust_remote_code: bool = problem_option(
        False, "Run code that comes with a model.", "--trust-remote-code"
    )
    reward: str = search_option(
        "",
        "What scores thoughts: verifier, value (game24's own Y or N), or the folder of a "
        "reward model.",
        shown="chain, tail: verifier; game24: value",
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
