"""``arborsim record``: run a search on a live model and store what happened as a trace."""

from __future__ import annotations

import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arborsim.cli.problem_options import (
    BASE,
    SEARCH,
    DeadPenalty,
    Device,
    Dtype,
    Episodes,
    First,
    KeepDuplicates,
    Lines,
    LinesPerThought,
    MaxTokens,
    Noise,
    Prompts,
    Seed,
    Split,
    ThoughtTokens,
    TrustRemoteCode,
    ValueFloor,
    given,
)
from arborsim.cli.reward_options import (
    Embed,
    Reward,
    RewardAggregate,
    RewardLabel,
    RewardToken,
)
from arborsim.core.errors import UsageError
from arborsim.search import search_names

if TYPE_CHECKING:
    from arborsim.live.backends import LayerChoice

_WHAT = "What is stored"
_BANK = "Banks (for arborsim search)"


class _Capture(StrEnum):
    tree = "tree"
    signals = "signals"
    qkv = "qkv"


class _Attention(StrEnum):
    auto = "auto"
    dense = "dense"
    sparse = "sparse"


def record(
    out: Annotated[Path, typer.Option(help="The trace to make.", rich_help_panel=BASE)],
    model: Annotated[
        str,
        typer.Option(
            help="chain or game24 (shipped), a folder with safetensors, or a model id.",
            rich_help_panel=BASE,
        ),
    ] = "chain",
    task: Annotated[
        str,
        typer.Option(help="Task of a folder with own reference weights.", rich_help_panel=BASE),
    ] = "",
    prompts: Prompts = None,
    search: Annotated[
        str, typer.Option(help=", ".join(search_names()) + ".", rich_help_panel=SEARCH)
    ] = "linear",
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="An option of the search, name=value; repeatable.",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    episodes: Episodes = 0,
    first: First = 0,
    split: Split = "test",
    lines: Lines = 0,
    lines_per_thought: LinesPerThought = 0,
    bank: Annotated[
        bool,
        typer.Option(
            "--bank",
            help="Grow a tree that searches can be run on later, instead of running --search.",
            rich_help_panel=_BANK,
        ),
    ] = False,
    children: Annotated[
        str,
        typer.Option(help="Per node, or per depth: 8 or 64,16,8.", rich_help_panel=_BANK),
    ] = "",
    depth: Annotated[
        int,
        typer.Option(min=0, help="Levels; 0: one per entry of --children.", rich_help_panel=_BANK),
    ] = 0,
    for_: Annotated[
        str,
        typer.Option(
            "--for",
            help="Grow only what these searches ask for, e.g. rebase,ets or all.",
            rich_help_panel=_BANK,
        ),
    ] = "",
    width: Annotated[
        str, typer.Option(help="Widths of --for [default: 16].", rich_help_panel=_BANK)
    ] = "",
    batch: Annotated[
        int,
        typer.Option(min=0, help="Thoughts that are drawn at once; 0: 256.", rich_help_panel=_BANK),
    ] = 0,
    capture: Annotated[
        _Capture | None,
        typer.Option(
            help="tree, signals or qkv [default: signals; of a bank: tree and embeddings].",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    attention: Annotated[
        _Attention,
        typer.Option(help="auto: whole rows for paths up to 4096 tokens.", rich_help_panel=_WHAT),
    ] = _Attention.auto,
    attention_top: Annotated[
        int, typer.Option(min=1, help="Positions per sparse row.", rich_help_panel=_WHAT)
    ] = 256,
    qkv_layers: Annotated[
        str,
        typer.Option(help="Layers of --capture qkv, e.g. 2,3, or all.", rich_help_panel=_WHAT),
    ] = "",
    attention_layers: Annotated[
        str,
        typer.Option(
            help="Also store these layers' own rows, mean and variance over heads: 2,3 or all.",
            rich_help_panel=_WHAT,
        ),
    ] = "",
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="0 is greedy; default 0 for linear, 1 for banks, else 0.7.",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    reward: Reward = "",
    reward_token: RewardToken = "",
    reward_label: RewardLabel = "",
    reward_aggregate: RewardAggregate = "last",
    embed: Embed = "",
    noise: Noise = 0.1,
    dead_penalty: DeadPenalty = 1.0,
    value_floor: ValueFloor = 0.3,
    thought_tokens: ThoughtTokens = 64,
    keep_duplicates: KeepDuplicates = False,
    max_tokens: MaxTokens = 0,
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file.", rich_help_panel=BASE)
    ] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on after an interruption.", rich_help_panel=BASE),
    ] = False,
) -> int:
    """Run searches on a live model and record them.

    Ctrl-C stops after the last whole episode, leaves a valid trace, and exits with code 130.
    """
    from arborsim.cli.options import check_output
    from arborsim.cli.record_bank import recipe_of
    from arborsim.cli.record_run import run
    from arborsim.live.backends import RecordRequest, RewardChoice, get_backend
    from arborsim.trace.schema import Capture

    check_output(out, "--out")
    recipe = recipe_of(
        bank, children, depth, for_, width, batch,
        settings=set_ or (), search=search, temperature=temperature, dedupe=not keep_duplicates,
    )  # fmt: skip
    if temperature is None:
        temperature = 1.0 if bank else 0.0 if search == "linear" else 0.7
    if capture is None:
        capture = _Capture.tree if bank else _Capture.signals
    request = RecordRequest(
        model=model,
        out=out,
        task=task,
        prompts=prompts,
        search=search,
        search_options={} if bank else _settings(set_ or []),
        episodes=episodes,
        first=first,
        split=split,
        capture=Capture(capture.value),
        bank=recipe,
        attention=attention.value,
        attention_top=attention_top,
        qkv_layers=_layers("--qkv-layers", qkv_layers),
        attention_layers=_layers("--attention-layers", attention_layers),
        temperature=temperature,
        seed=seed,
        device=device,
        dtype=dtype,
        max_tokens=max_tokens,
        noise=noise,
        dead_penalty=dead_penalty,
        value_floor=value_floor,
        thought_tokens=thought_tokens,
        task_options=given(lines=lines, lines_per_thought=lines_per_thought),
        reward=RewardChoice(reward, reward_token, reward_label, reward_aggregate),
        embed=embed,
        dedupe=not keep_duplicates,
        trust_remote_code=trust_remote_code,
        overwrite=overwrite,
        resume=resume,
        command=shlex.join(["arborsim", *sys.argv[1:]]),
    )
    return run(request, get_backend("torch"))


def _settings(given: list[str]) -> dict[str, str]:
    options = {}
    for setting in given:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise UsageError(f"--set {setting}: expected name=value")
        options[name.strip()] = value.strip()
    return options


def _layers(option: str, text: str) -> LayerChoice:
    if not text:
        return ()
    if text == "all":
        return "all"
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise UsageError(f"{option} {text}: expected numbers, e.g. 2,3, or all") from None
