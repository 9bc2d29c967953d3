"""Train a reference model, and write it as `load` takes it.

::

    python -m benchmarks.reference.train chain --out runs/chain --seed 1

writes `config.json`, `model.safetensors`, `vocab.json` and `training.json`.  A run is a function of
its arguments (on the same machine, with the same number of threads).  It needs
PyTorch 2.9, which has Muon (Jordan et al. 2024).
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional as F

from arborsim_torch.reference import get_task, load, weights_path
from benchmarks.reference.curriculum import KINDS, RECIPES, Recipe, Stage, TrainingBatch, make_pool
from benchmarks.reference.model import grow, make_config, make_model

WARMUP_STEPS = 20  #: of each stage
SMOOTHING = 0.95  #: of the running averages
_EVERY = 20  # steps from one point of the curve to the next


class Trainer:
    """A model in training, with running loss and accuracies by name.

    `bf16` autocasts to bfloat16.  It pays on GPUs and on CPUs with native bfloat16; others emulate
    it, far slower than float32.
    """

    def __init__(self, recipe: Recipe, seed: int, device: str = "cpu", bf16: bool = False) -> None:
        self.recipe, self.task, self.seed = recipe, get_task(recipe.task), seed
        self.device, self.bf16 = torch.device(device), bf16
        config = make_config(self.task, **recipe.config)
        if recipe.start is None:
            self.model = make_model(config, seed, recipe.look_back)
        else:
            self.model = grow(load(recipe.start)[0], config, seed)
        # transformers wraps `Module.to` in a decorator that loses `self` to type checkers.
        self.model.to(self.device)  # type: ignore[arg-type]
        self.steps = self.tokens = 0
        self.averages: dict[str, float] = {}
        matrices: list[torch.nn.Parameter] = []
        others: list[torch.nn.Parameter] = []
        for name, p in self.model.named_parameters():
            (matrices if p.ndim == 2 and "layers" in name else others).append(p)
        self._optimisers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, momentum=0.95, weight_decay=0.0),
            torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0),
        )

    def train(self, tell: Callable[[Stage], None] = lambda stage: None) -> None:
        """Go through the curriculum; `tell` is called after every step."""
        self.model.train()
        for number, stage in enumerate(self.recipe.stages):
            seeds = ((self.seed, number, pool) for pool in count())
            batches = (batch for seed in seeds for batch in make_pool(self.task, stage, seed))
            for step in range(stage.steps):
                self._step(stage, step, next(batches))
                tell(stage)
                recall = self.averages.get("recall", 0.0) if step >= WARMUP_STEPS else 0.0
                if stage.until_recall is not None and recall > stage.until_recall:
                    break

    def _step(self, stage: Stage, step: int, batch: TrainingBatch) -> None:
        share, warm = step / stage.steps, min(1.0, (step + 1) / WARMUP_STEPS)
        rates = (stage.muon_lr, stage.adam_lr)
        for optimiser, (start, end) in zip(self._optimisers, rates, strict=True):
            optimiser.param_groups[0]["lr"] = warm * (start + (end - start) * share)
        torch.autograd.backward(self._loss(batch))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser in self._optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.steps += 1
        self.tokens += batch.ids.size

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
            if (mask := kinds == kind).any():
                self._average(name, right[mask].mean().item())
        return loss

    def _average(self, name: str, value: float) -> None:
        old = self.averages.get(name, value)
        self.averages[name] = SMOOTHING * old + (1 - SMOOTHING) * value

    def save(self, folder: Path, dtype: torch.dtype, record: dict[str, Any]) -> None:
        """Write weights, vocabulary and what is worth knowing of the run."""
        self.model.to(dtype)  # type: ignore[arg-type]
        self.model.save_pretrained(folder)
        # Generation settings would only repeat the configuration's token ids.
        (folder / "generation_config.json").unlink(missing_ok=True)
        self.task.vocab.save(folder / "vocab.json")
        (folder / "training.json").write_text(json.dumps(record, indent=1) + "\n")


def run(trainer: Trainer, out: Path, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """Train, print how it goes, and write the weights to `out`."""
    began, curve = time.perf_counter(), list[dict[str, Any]]()

    def tell(stage: Stage) -> None:
        if trainer.steps % _EVERY == 0:
            rounded = {name: round(value, 5) for name, value in sorted(trainer.averages.items())}
            at = {"step": trainer.steps, "tokens": trainer.tokens, "stage": stage.name}
            curve.append({**at, "seconds": round(time.perf_counter() - began, 1), **rounded})
            print(*(f"{name} {value}" for name, value in curve[-1].items()), sep="  ", flush=True)

    trainer.train(tell)
    name, seed = trainer.recipe.name, trainer.seed
    record = {
        "task": trainer.task.name,
        "command": f"python -m benchmarks.reference.train {name} --out RUN --seed {seed}",
        "seed": seed,
        "steps": trainer.steps,
        "tokens": trainer.tokens,
        "minutes": round((time.perf_counter() - began) / 60, 1),
        "final": trainer.averages,
        "options": options,
        "machine": platform.machine(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "stages": [asdict(stage) for stage in trainer.recipe.stages],
        "curve": curve[:: -max(1, len(curve) // 100)][::-1],
    }
    trainer.save(out, dtype, record)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="benchmarks.reference.train", description=__doc__)
    parser.add_argument("model", choices=sorted(RECIPES))
    parser.add_argument("--out", type=Path, help="default: where `load` looks for the weights")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true", help="autocast; default on cuda")
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16"))
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies all stages' steps")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    recipe = RECIPES[options.model]
    stages = [replace(s, steps=max(1, round(s.steps * options.scale))) for s in recipe.stages]
    bf16 = options.bf16 or options.device.startswith("cuda")
    trainer = Trainer(
        replace(recipe, stages=tuple(stages)), options.seed, options.device, bf16=bf16
    )
    chosen = {"threads": options.threads, "scale": options.scale, "device": options.device}
    out = options.out or weights_path(options.model)
    run(trainer, out, getattr(torch, options.dtype), **chosen, bf16=bf16)


if __name__ == "__main__":
    main()
