"""`arborsim validate`: the simulator held against a live model, in bytes, decisions and seconds."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from arborsim.core.errors import UnknownName, UsageError
from arborsim.search import search_names

if TYPE_CHECKING:
    from arborsim.live.request import LiveRequest

_SIMULATED_RECALLS = ("stage", "stream", "near")


def validate(
    gpu: Annotated[
        str,
        typer.Option(
            help="Profile of the device that runs it: a TOML file of `calibrate hardware`, or a "
            "name.",
            show_default=False,
        ),
    ],
    task: Annotated[str, typer.Option(help="chain or game24.")] = "",
    model: Annotated[str, typer.Option(help="As for `arborsim live` [default: the task's].")] = "",
    policy: Annotated[
        list[str],
        typer.Option(help="Policies by comma, or 'all'; repeatable; `full` is added to compare."),
    ] = ["all"],
    budget: Annotated[
        list[str],
        typer.Option(help="Tokens or share of the search under full retention; repeatable."),
    ] = ["0.5,0.7"],
    search: Annotated[
        str,
        typer.Option(help=", ".join(search_names()) + " [default: linear; game24: tot-bfs]."),
    ] = "",
    set_: Annotated[
        list[str],
        typer.Option("--set", help="name=value of the search or of policies; repeatable."),
    ] = [],
    episodes: Annotated[
        int, typer.Option(help="Problems; accuracies can be ranked from 40 on.", min=1)
    ] = 4,
    first: Annotated[int, typer.Option(help="Number of the first problem.", min=0)] = 0,
    lines: Annotated[int, typer.Option(min=0, help="chain: program lines; 0: 96.")] = 0,
    prompts: Annotated[
        Path | None, typer.Option(help='JSON lines, each {"prompt": "..."}.')
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=0, help="Per path; 0: the task's.")] = 0,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Default 0 for linear, else 0.7.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    recall: Annotated[
        str, typer.Option(help="How DDR tokens are read: stage, stream or near.")
    ] = "stage",
    overlap: Annotated[
        bool,
        typer.Option(
            help="Copy behind the computation; bytes at a moment then depend on how fast copies "
            "are."
        ),
    ] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder for results.parquet and index.html.")] = Path(
        "validation"
    ),
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the results in the folder.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the results in the folder.")
    ] = False,
) -> int:
    """Search live and simulated side by side, and say how far apart they are.

    For every policy, budget and problem: does a replay decide as the recorded run did; are the
    simulated bytes those of the live pools; how far off are the seconds; how do decisions drift
    once eviction is real; does the replay rank policies as live accuracy does.  Results are kept
    problem by problem: Ctrl-C loses one at most, --resume goes on.
    """
    from arborsim.cli import live_setup as setup
    from arborsim.cli.options import chosen_names
    from arborsim.cli.problem_options import given
    from arborsim.cli.validate_run import run
    from arborsim.live.request import LiveRequest
    from arborsim.machine.lookup import load_profile
    from arborsim.machine.machine import Machine

    if recall not in _SIMULATED_RECALLS:
        raise UnknownName("recall mode", recall, _SIMULATED_RECALLS)
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out}: expected a folder, but that is a file")
    if resume and overwrite:
        raise UsageError("--resume keeps the results and --overwrite replaces them: give one")
    chosen = setup.model_of(model, task)
    algorithm = setup.search_of(search, chosen, task)
    options, settings = setup.split_settings(set_, algorithm, chosen_names(",".join(policy)))
    request: LiveRequest = LiveRequest(
        model=chosen,
        task=task,
        prompts=prompts,
        search=algorithm,
        search_options=options,
        episodes=episodes,
        first=first,
        temperature=setup.temperature_of(temperature, algorithm),
        seed=seed,
        device=device,
        dtype=dtype,
        max_tokens=max_tokens,
        task_options=given(lines=lines),
        cells=setup.make_cells(policy, budget, settings, full=True),
        recall=recall,
        overlap=overlap,
        machine=Machine(load_profile(gpu), None, recall),
        command=shlex.join(["arborsim", *sys.argv[1:]]),
    )
    return run(request, out, resume=resume, overwrite=overwrite)
