"""Four tiny reference models whose reasoning depends on what their cache holds.

>>> from arborsim_torch import reference
>>> model, task = reference.load("chain")
>>> problem = task.problem("test", 0, lines=64)

`load` and `get_task` are all that most users need; importing this package
imports neither torch nor transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .chain import ChainTask
from .game24 import Game24Task
from .tail import TailTask
from .tasks import Problem, Task, ValueReadout, Verdict, Vocabulary, noisy_value

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM

__all__ = [
    "Problem",
    "Task",
    "ValueReadout",
    "Verdict",
    "get_task",
    "load",
    "noisy_value",
    "weights_path",
]

#: The task that each shipped model learnt.
MODELS = {"chain": "chain", "game24": "game24", "tail": "tail", "tail-deep": "tail"}
_FILES = ("config.json", "model.safetensors", "vocab.json")
_TASKS: dict[str, type[Task]] = {"chain": ChainTask, "game24": Game24Task, "tail": TailTask}


def get_task(name: str, **options: Any) -> Task:
    """Return the task called `name` ("chain", "game24" or "tail").

    Options are those of the task's class, e.g. ``lines_per_thought`` for
    `chain`.  Raises ValueError on an unknown name.
    """
    if name not in _TASKS:
        raise ValueError(f"unknown task {name!r}; known: {', '.join(sorted(_TASKS))}")
    return _TASKS[name](**options)


def weights_path(name: str) -> Path:
    """Return the folder of the shipped weights called `name`, present or not."""
    return Path(__file__).parent / "weights" / name


def load(
    name: str,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    folder: str | Path | None = None,
    attn_implementation: str = "sdpa",
    **options: Any,
) -> tuple[LlamaForCausalLM, Task]:
    """Load a reference model (float32 if no type is named) in evaluation mode, and its task.

    "tail-deep" is "tail" with 24 layers.  `folder` has other weights of the same task, e.g. of a
    training run; "eager" as `attn_implementation` gives attention weights.  Options are the task's,
    see `get_task`.  Raises ValueError on an unknown name, or weights whose vocabulary is not the
    task's, and FileNotFoundError if files of the model are missing.
    """
    if name not in MODELS:
        raise ValueError(f"unknown reference model {name!r}; known: {', '.join(MODELS)}")
    task = get_task(MODELS[name], **options)
    path = weights_path(name) if folder is None else Path(folder)
    missing = [file for file in _FILES if not (path / file).is_file()]
    if missing:
        raise FileNotFoundError(
            f"reference model {name!r}: {', '.join(missing)} missing in {path}: install arborsim "
            f"again, or in a checkout train it: python -m benchmarks.reference.train {name}"
        )
    # Here, not above: both take seconds, and tasks are used without them.
    import torch
    from transformers import LlamaForCausalLM

    if Vocabulary.load(path / "vocab.json").vocab != task.vocab.vocab:
        raise ValueError(f"the vocabulary in {path} is not that of task {name!r}")
    model = LlamaForCausalLM.from_pretrained(
        path,
        dtype=torch.float32 if dtype is None else dtype,
        attn_implementation=attn_implementation,
    )
    # transformers wraps `Module.to` in a decorator that loses `self` to type checkers.
    model.to(device)  # type: ignore[arg-type]
    model.eval()
    return model, task
