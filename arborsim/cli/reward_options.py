"""The options that say what scores and embeds the thoughts of a search."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from arborsim.live.backends import ModelUsage

_PANEL = "Search and rewards"

Reward = Annotated[
    str,
    typer.Option(
        "--reward",
        help="What scores thoughts: verifier, value (game24's own Y or N), or the folder of a "
        "reward model [default: chain: verifier; game24: value].",
        rich_help_panel=_PANEL,
    ),
]
RewardToken = Annotated[
    str,
    typer.Option(
        "--reward-token",
        help="Step-token model: the token after which it scores a step.",
        rich_help_panel=_PANEL,
    ),
]
RewardLabel = Annotated[
    str,
    typer.Option(
        "--reward-label",
        help="What is good: a class of a classifier [default: 1 of two], or the tokens good,bad of "
        "a step-token model [default: +,-].",
        rich_help_panel=_PANEL,
    ),
]
RewardAggregate = Annotated[
    str,
    typer.Option(
        "--reward-aggregate",
        help="Scores of steps: last, min or prod.",
        rich_help_panel=_PANEL,
    ),
]
Embed = Annotated[
    str,
    typer.Option(
        "--embed",
        help="Folder of a sentence-transformers model that embeds thoughts [default: mean last "
        "hidden states].",
        rich_help_panel=_PANEL,
    ),
]


def describe_usage(usage: ModelUsage) -> str:
    """What a reward or embedding model took, in words."""
    kind = {"reward": "reward model", "embed": "embedding model"}[usage.role]
    kv = f", KV up to {usage.peak_kv_bytes / 1e6:.3g} MB" if usage.peak_kv_bytes else ""
    return (
        f"{kind} {usage.name}: {usage.texts} thoughts, {usage.wall_s:.2f} s, weights "
        f"{usage.weight_bytes / 1e6:.3g} MB{kv}"
    )
