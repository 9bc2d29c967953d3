"""Turn a training run's checkpoint into a folder of weights.

::

    python -m arborsim_torch.reference.export runs/chain
    python -m arborsim_torch.reference.export runs/chain --out elsewhere --dtype float16

writes `config.json`, `model.safetensors`, `vocab.json` and `training.json`, by
default where `load` looks for them.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from . import weights_path
from .train import CHECKPOINT, CURVE, model_of

CURVE_POINTS = 100


def export(run: Path, out: Path | None = None, dtype: torch.dtype = torch.float32) -> Path:
    """Export the checkpoint of `run` to `out` (default: the package's weights).

    `dtype` is that of the file; models are loaded as float32 unless told otherwise.  Returns the
    folder written to.
    """
    model, task, state = model_of(run / CHECKPOINT)
    # transformers wraps `Module.to` in a decorator that loses `self` to type checkers.
    model.to(dtype)  # type: ignore[arg-type]
    folder = weights_path(state["name"]) if out is None else out
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    # Generation settings would only repeat the configuration's token ids.
    (folder / "generation_config.json").unlink(missing_ok=True)
    task.vocab.save(folder / "vocab.json")
    record = training_record(state, run / CURVE)
    (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    return folder


def training_record(state: dict[str, Any], curve: Path) -> dict[str, Any]:
    """Return what is worth knowing of a run: command, seed, effort, curriculum, curve."""
    at = state["progress"]
    points = [json.loads(line) for line in curve.read_text().splitlines()]
    every = max(1, len(points) // CURVE_POINTS)
    return {
        "task": state["task"],
        "command": f"python -m arborsim_torch.reference.train {state['name']} "
        f"--out RUN --seed {state['seed']}",
        "seed": state["seed"],
        "steps": at["step"],
        "tokens": at["tokens"],
        "minutes": round(at["seconds"] / 60, 1),
        "final": at["averages"],
        "starts": at["starts"],
        "machine": platform.machine(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "stages": state["stages"],
        "curve": points[::-every][::-1],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="arborsim_torch.reference.export", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of the training run")
    parser.add_argument("--out", type=Path, help="default: the package's weights")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16"))
    options = parser.parse_args(arguments)
    print(export(options.run, options.out, getattr(torch, options.dtype)))


if __name__ == "__main__":
    main()
