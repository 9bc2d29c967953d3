"""`arborsim live`: policies on a live model, with tokens really removed."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

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
)
from arborsim.cli.reward_options import Embed, Reward, RewardAggregate, RewardLabel, RewardToken
from arborsim.search import search_names

_POLICY = "Policies and machine"
_OUTPUT = "Output"


def live(
    policy: Annotated[
        list[str],
        typer.Option(help="Policies by comma, or 'all'; repeatable.", rich_help_panel=_POLICY),
    ] = ["full"],
    budget: Annotated[
        list[str],
        typer.Option(
            help="Tokens (2048) or share of the search under full retention (0.25), by comma; "
            "repeatable.",
            rich_help_panel=_POLICY,
        ),
    ] = ["0.5"],
    full: Annotated[
        bool, typer.Option(help="Also run full retention, to compare.", rich_help_panel=_POLICY)
    ] = True,
    task: Annotated[
        str,
        typer.Option(
            help="chain or game24; with --model FOLDER, whose weights those are.",
            rich_help_panel=BASE,
        ),
    ] = "",
    model: Annotated[
        str,
        typer.Option(
            help="chain or game24 (shipped), a folder with safetensors, a model id, or "
            "config:llama-3.1-8b: random weights [default: the task's].",
            rich_help_panel=BASE,
        ),
    ] = "",
    prompts: Prompts = None,
    episodes: Episodes = 0,
    first: First = 0,
    split: Split = "test",
    lines: Lines = 0,
    lines_per_thought: LinesPerThought = 0,
    max_tokens: MaxTokens = 0,
    prompt_tokens: Annotated[
        int,
        typer.Option(
            min=0, help="Random weights: tokens per prompt; 0: 512.", rich_help_panel=BASE
        ),
    ] = 0,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    search: Annotated[
        str,
        typer.Option(
            help=", ".join(search_names()) + " [default: linear; game24: tot-bfs].",
            rich_help_panel=SEARCH,
        ),
    ] = "",
    set_: Annotated[
        list[str],
        typer.Option(
            "--set",
            help="name=value of the search or of policies; search.name or policy.name says whose; "
            "repeatable.",
            rich_help_panel=SEARCH,
        ),
    ] = [],
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="0 is greedy; default 0 for linear, else 0.7.", rich_help_panel=SEARCH
        ),
    ] = None,
    seed: Seed = 0,
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
    recall: Annotated[
        str,
        typer.Option(
            help="How DDR tokens are read: stage, stream, near or ondemand.",
            rich_help_panel=_POLICY,
        ),
    ] = "stage",
    overlap: Annotated[
        bool, typer.Option(help="Let copies run behind computation.", rich_help_panel=_POLICY)
    ] = True,
    page_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            help="Pools grow by so many slots; 0: 16, with --shadow 1.",
            rich_help_panel=_POLICY,
        ),
    ] = 0,
    batch: Annotated[
        int,
        typer.Option(
            min=1,
            help="Searches computed together: more tokens per second, times that overlap.",
            rich_help_panel=_POLICY,
        ),
    ] = 1,
    attention_top: Annotated[
        int,
        typer.Option(
            min=0,
            help="Positions kept per attention row that policies see; 0: all, "
            "256 for paths above 4096 tokens.",
            rich_help_panel=_POLICY,
        ),
    ] = 0,
    shadow: Annotated[
        bool,
        typer.Option(
            "--shadow",
            help="Policies decide, nothing is removed; bytes and seconds are simulated.",
            rich_help_panel=_POLICY,
        ),
    ] = False,
    gpu: Annotated[
        str,
        typer.Option(
            help="--shadow: GPU profile, a name or a TOML file [default: h100].",
            rich_help_panel=_POLICY,
        ),
    ] = "",
    trace: Annotated[
        Path | None,
        typer.Option(help="--shadow: also record this trace.", rich_help_panel=_OUTPUT),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Log of all results, JSON lines.", rich_help_panel=_OUTPUT),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the log.", rich_help_panel=_OUTPUT)
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace log and trace.", rich_help_panel=_OUTPUT),
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(help="Write a self-contained HTML page.", rich_help_panel=_OUTPUT),
    ] = None,
    json: Annotated[
        bool,
        typer.Option("--json", help="Print JSON instead of tables.", rich_help_panel=_OUTPUT),
    ] = False,
) -> int:
    """Search live under KV-cache policies that really remove tokens, and count what is right.

    Every policy searches the same problems. Shows accuracy with its interval, memory by tier, and
    where the time went, all against full retention. Ctrl-C keeps the log; exit code 130.
    """
    from arborsim.cli import live_setup as setup
    from arborsim.cli.live_run import run
    from arborsim.cli.options import chosen_names
    from arborsim.cli.problem_options import given
    from arborsim.live.backends import RewardChoice
    from arborsim.live.request import LiveRequest

    setup.check_files(out, trace, report, resume=resume, overwrite=overwrite, shadow=shadow)
    chosen = setup.model_of(model, task)
    algorithm = setup.search_of(search, chosen, task)
    options, settings = setup.split_settings(set_, algorithm, chosen_names(",".join(policy)))
    request = LiveRequest(
        model=chosen,
        task=task,
        prompts=prompts,
        search=algorithm,
        search_options=options,
        episodes=episodes,
        first=first,
        split=split,
        temperature=setup.temperature_of(temperature, algorithm),
        seed=seed,
        device=device,
        dtype=dtype,
        max_tokens=max_tokens,
        prompt_tokens=prompt_tokens,
        noise=noise,
        dead_penalty=dead_penalty,
        value_floor=value_floor,
        thought_tokens=thought_tokens,
        task_options=given(lines=lines, lines_per_thought=lines_per_thought),
        reward=RewardChoice(reward, reward_token, reward_label, reward_aggregate),
        embed=embed,
        dedupe=not keep_duplicates,
        trust_remote_code=trust_remote_code,
        cells=setup.make_cells(policy, budget, settings, full=full),
        recall=recall,
        overlap=overlap,
        page_tokens=setup.page_size(page_tokens, shadow=shadow),
        batch=batch,
        attention_top=attention_top,
        shadow=shadow,
        machine=setup.make_machine(
            shadow=shadow, gpu=gpu, recall=recall, overlap=overlap, page_tokens=page_tokens
        ),
        trace=trace,
        command=shlex.join(["arborsim", *sys.argv[1:]]),
    )
    return run(request, out, report, resume=resume, overwrite=overwrite, json=json)
