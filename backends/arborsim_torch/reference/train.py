"""Train a reference model.

::

    python -m arborsim_torch.reference.train chain --out runs/chain --seed 1
    python -m arborsim_torch.reference.train chain --out runs/chain --resume

The run is a deterministic function of its arguments: data come from the seed,
the stage and a counter, and a checkpoint holds all the rest.  A run that is
stopped and resumed ends in the same weights as one that is not (on the same
machine, with the same number of threads).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from . import load
from .curriculum import KINDS, RECIPES, Recipe, Stage, TrainingBatch, make_pool
from .model import grow, make_config, make_model
from .muon import Muon
from .tasks import Task, get_task

CHECKPOINT = "checkpoint.pt"
CURVE = "curve.jsonl"
WARMUP_STEPS = 20  #: of each stage
SMOOTHING = 0.95  #: of the running averages


@dataclass
class Progress:
    """Where a run stands; everything but weights and optimiser state."""

    stage: int = 0
    step_in_stage: int = 0
    pool: int = 0
    batch_in_pool: int = 0
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    averages: dict[str, float] = field(default_factory=dict)
    starts: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """Model, optimisers and position in the curriculum.

    Parameters
    ----------
    recipe
        What to learn, how, and from which weights.
    seed
        Of weights and data.
    device
        "cpu" or "cuda".
    bf16
        Autocast to bfloat16.  Pays on GPUs and on CPUs with native bfloat16;
        others emulate it, far slower than float32.
    """

    def __init__(
        self,
        recipe: Recipe,
        seed: int,
        device: str = "cpu",
        bf16: bool = False,
    ) -> None:
        self.recipe, self.task = recipe, get_task(recipe.task)
        self.stages, self.seed = recipe.stages, seed
        self.device, self.bf16 = torch.device(device), bf16
        config = make_config(self.task, **recipe.config)
        if recipe.start is None:
            self.model = make_model(config, seed, recipe.look_back)
        else:
            self.model = grow(load(recipe.start)[0], config, seed)
        # transformers wraps `Module.to` in a decorator that loses `self` to type checkers.
        self.model.to(self.device)  # type: ignore[arg-type]
        self.progress = Progress()
        matrices: list[torch.nn.Parameter] = []
        others: list[torch.nn.Parameter] = []
        for name, p in self.model.named_parameters():
            hidden = p.ndim == 2 and "layers" in name
            (matrices if hidden else others).append(p)
        self.optimisers = (
            Muon(matrices),
            torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0),
        )
        self._pool: list[TrainingBatch] = []
        self._pool_key: tuple[int, int] | None = None

    @property
    def stage(self) -> Stage | None:
        """The current stage; None at the end."""
        index = self.progress.stage
        return self.stages[index] if index < len(self.stages) else None

    def step(self) -> None:
        """Take one optimiser step, and move on to the next stage when one is due."""
        stage = self.stage
        if stage is None:
            raise RuntimeError("the curriculum is finished")
        began = time.perf_counter()
        batch = self._next_batch(stage)
        share = self.progress.step_in_stage / stage.steps
        warm = min(1.0, (self.progress.step_in_stage + 1) / WARMUP_STEPS)
        for optimiser, (start, end) in zip(
            self.optimisers, (stage.muon_lr, stage.adam_lr), strict=True
        ):
            for group in optimiser.param_groups:
                group["lr"] = warm * (start + (end - start) * share)
        loss = self._loss(batch)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self._advance(stage, batch, time.perf_counter() - began)

    def _loss(self, batch: TrainingBatch) -> torch.Tensor:
        """Return the mean loss over trained-on tokens; update the running accuracies."""
        ids = torch.from_numpy(batch.ids).to(self.device)
        kinds = torch.from_numpy(batch.kinds).to(self.device)[:, 1:]
        wanted = kinds != 0
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            # No attention mask: padding is at the right, where causality hides it.
            hidden = self.model.model(input_ids=ids, use_cache=False).last_hidden_state
            logits = self.model.lm_head(hidden[:, :-1][wanted])
        targets, kinds = ids[:, 1:][wanted], kinds[wanted]
        loss = F.cross_entropy(logits.float(), targets)
        right = (logits.argmax(-1) == targets).float()
        self._average("loss", loss.item())
        for kind, name in enumerate(KINDS):
            mask = kinds == kind
            if mask.any():
                self._average(name, right[mask].mean().item())
        return loss

    def _average(self, name: str, value: float) -> None:
        old = self.progress.averages.get(name, value)
        self.progress.averages[name] = SMOOTHING * old + (1 - SMOOTHING) * value

    def _next_batch(self, stage: Stage) -> TrainingBatch:
        at = self.progress
        key = (at.stage, at.pool)
        if self._pool_key != key:
            self._pool, self._pool_key = make_pool(self.task, stage, (self.seed, *key)), key
        batch = self._pool[at.batch_in_pool]
        at.batch_in_pool += 1
        if at.batch_in_pool == len(self._pool):
            at.pool, at.batch_in_pool = at.pool + 1, 0
        return batch

    def _advance(self, stage: Stage, batch: TrainingBatch, seconds: float) -> None:
        at = self.progress
        at.step += 1
        at.step_in_stage += 1
        at.tokens += batch.ids.size
        at.seconds += seconds
        recalls = stage.until_recall is not None and at.step_in_stage > WARMUP_STEPS
        if at.step_in_stage >= stage.steps or (
            recalls and at.averages.get("recall", 0.0) > (stage.until_recall or 0.0)
        ):
            at.stage, at.step_in_stage, at.pool, at.batch_in_pool = at.stage + 1, 0, 0, 0

    def save(self, path: Path) -> None:
        """Write a checkpoint; a reader sees the old or the new one, never half of it."""
        state = {
            "name": self.recipe.name,
            "task": self.task.name,
            "seed": self.seed,
            "model": self.model.state_dict(),
            "config": self.model.config.to_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "progress": asdict(self.progress),
            "stages": [asdict(stage) for stage in self.stages],
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, path)

    def restore(self, path: Path) -> None:
        """Continue from a checkpoint; the curriculum may have changed from its stage on."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        if (state["name"], state["seed"]) != (self.recipe.name, self.seed):
            raise ValueError(f"{path} is of model {state['name']}, seed {state['seed']}")
        self.model.load_state_dict(state["model"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.progress = Progress(**state["progress"])
        self._pool_key = None


def report(trainer: Trainer, seconds: float) -> str:
    """Return one line on the state of the run; `seconds` were spent in this process."""
    at, stage = trainer.progress, trainer.stage
    left = sum(s.steps for s in trainer.stages[at.stage :]) - at.step_in_stage
    averages = " ".join(f"{name} {value:.4f}" for name, value in sorted(at.averages.items()))
    per_step = at.seconds / max(1, at.step)
    return (
        f"{seconds / 60:6.1f} min  step {at.step}  stage {stage.name if stage else 'done'}"
        f"  {averages}  {at.tokens / max(at.seconds, 1e-9):.0f} tokens/s"
        f"  at most {left} steps, {left * per_step / 60:.0f} min left"
    )


def train(
    trainer: Trainer, out: Path, minutes: float, every_s: float = 60.0, log_steps: int = 20
) -> None:
    """Run until the curriculum ends or `minutes` have passed; checkpoints go to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    began = saved = time.perf_counter()
    trainer.model.train()
    while trainer.stage is not None and time.perf_counter() - began < 60 * minutes:
        trainer.step()
        at = trainer.progress
        now = time.perf_counter()
        if at.step % log_steps == 0:
            print(report(trainer, now - began), flush=True)
            stage = trainer.stage.name if trainer.stage else "done"
            record = {"step": at.step, "tokens": at.tokens, "seconds": round(at.seconds, 1)}
            with (out / CURVE).open("a") as file:
                rounded = {name: round(value, 5) for name, value in at.averages.items()}
                file.write(json.dumps({**record, "stage": stage, **rounded}) + "\n")
        if now - saved > every_s:
            trainer.save(out / CHECKPOINT)
            saved = now
    trainer.save(out / CHECKPOINT)


def model_of(path: Path) -> tuple[LlamaForCausalLM, Task, dict[str, Any]]:
    """Return the model in a checkpoint, its task and the checkpoint itself."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    task = get_task(state["task"])
    model = LlamaForCausalLM(LlamaConfig(**state["config"]))
    model.load_state_dict(state["model"])
    model.eval()
    return model, task, state


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="arborsim_torch.reference.train", description=__doc__)
    parser.add_argument("model", choices=sorted(RECIPES))
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--minutes", type=float, default=600.0, help="stop after this long")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true", help="autocast; default on cuda")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies all stages' steps")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out")
    options = parser.parse_args(arguments)

    torch.set_num_threads(options.threads)
    recipe = RECIPES[options.model]
    stages = [replace(s, steps=max(1, round(s.steps * options.scale))) for s in recipe.stages]
    bf16 = options.bf16 or options.device.startswith("cuda")
    recipe = replace(recipe, stages=tuple(stages))
    trainer = Trainer(recipe, options.seed, options.device, bf16=bf16)
    checkpoint = options.out / CHECKPOINT
    if options.resume:
        trainer.restore(checkpoint)
    elif checkpoint.exists():
        parser.error(f"{checkpoint} exists; give --resume or another --out")
    started = {"step": trainer.progress.step, "threads": options.threads, "scale": options.scale}
    trainer.progress.starts.append({**started, "device": options.device, "bf16": bf16})
    train(trainer, options.out, options.minutes)
    print(report(trainer, trainer.progress.seconds), flush=True)


if __name__ == "__main__":
    main()
