"""The options that say which problems are searched, on which model, and how thoughts are judged.

The commands that run a live model share them; the rewards themselves are in `reward_options`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

BASE = "Problems and model"
SEARCH = "Search and rewards"

Prompts = Annotated[
    Path | None,
    typer.Option("--prompts", help='JSON lines, each {"prompt": "..."}.', rich_help_panel=BASE),
]
Episodes = Annotated[
    int,
    typer.Option("--episodes", min=0, help="Problems; 0: 8, or all prompts.", rich_help_panel=BASE),
]
First = Annotated[
    int, typer.Option("--first", min=0, help="Number of the first problem.", rich_help_panel=BASE)
]
Split = Annotated[str, typer.Option("--split", help="test or train.", rich_help_panel=BASE)]
Lines = Annotated[
    int, typer.Option("--lines", min=0, help="chain: program lines; 0: 96.", rich_help_panel=BASE)
]
LinesPerThought = Annotated[
    int,
    typer.Option(
        "--lines-per-thought", min=0, help="chain: lines per thought; 0: 4.", rich_help_panel=BASE
    ),
]
MaxTokens = Annotated[
    int, typer.Option("--max-tokens", min=0, help="Per path; 0: the task's.", rich_help_panel=BASE)
]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda.", rich_help_panel=BASE)]
Dtype = Annotated[
    str,
    typer.Option("--dtype", help="auto, float32, bfloat16 or float16.", rich_help_panel=BASE),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run code that comes with a model.", rich_help_panel=BASE
    ),
]
Seed = Annotated[int, typer.Option("--seed", min=0, rich_help_panel=SEARCH)]
Noise = Annotated[
    float,
    typer.Option(
        "--noise", min=0.0, help="Verifier: noise of rewards (std).", rich_help_panel=SEARCH
    ),
]
DeadPenalty = Annotated[
    float,
    typer.Option(
        "--dead-penalty",
        min=0.0,
        max=1.0,
        help="Verifier: how well rewards see a dead path.",
        rich_help_panel=SEARCH,
    ),
]
ValueFloor = Annotated[
    float,
    typer.Option(
        "--value-floor",
        min=0.0,
        max=1.0,
        help="chain: value of a living state without progress.",
        rich_help_panel=SEARCH,
    ),
]
ThoughtTokens = Annotated[
    int,
    typer.Option(
        "--thought-tokens",
        min=1,
        help="Prompts: longest thought (it also ends at a newline).",
        rich_help_panel=SEARCH,
    ),
]
KeepDuplicates = Annotated[
    bool,
    typer.Option(
        "--keep-duplicates",
        help="Go on with thoughts that repeat a sibling.",
        rich_help_panel=SEARCH,
    ),
]


def given(**options: int) -> dict[str, int]:
    """The options that were given (0 stands for the default)."""
    return {name: value for name, value in options.items() if value}
