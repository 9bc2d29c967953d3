"""How much of all attention the most attended tokens get, on the reference models.

    python -m benchmarks.claims.attention --out reports/claims

The memory-hierarchy paper (section 2.1, Figure 1) adds up the attention that each token gets over
all decoding steps, mean over layers and heads: the top fifth of the tokens holds 56.5%, the bottom
half less than 10%.  Writes ``attention.parquet``: the same of every problem (``grouping`` "model"),
of each layer and of each query head on its own (their mean), counted over the reasoning's tokens or
over the whole text; finished cells are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks.claims import Row, Store, run

PROBLEMS = 20
#: Model and program lines; models without weights are left out.
MODELS = (("chain", 32), ("tail", 16), ("tail-deep", 16))


def concentration(received: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shares of attention that the most attended fifth and the least attended half hold.

    `received`, float64 ``[groups, tokens]``; both float64 ``[groups]``.  A fifth and a half are
    whole numbers of tokens, rounded down.
    """
    rising = np.sort(received, axis=1)
    count, total = rising.shape[1], rising.sum(axis=1)
    top, bottom = rising[:, count - count // 5 :], rising[:, : count // 2]
    return top.sum(axis=1) / total, bottom.sum(axis=1) / total


def received(model: Any, prompt: tuple[int, ...], generated: tuple[int, ...]) -> np.ndarray:
    """Attention that each token gets from all generated ones: float64 ``[layers, heads, tokens]``.

    A token's own query counts.
    """
    import torch

    with torch.no_grad():
        made = model(torch.tensor([[*prompt, *generated]]), output_attentions=True)
    first = len(prompt)
    return np.stack([rows[0, :, first:].double().sum(dim=1).numpy() for rows in made.attentions])


def rows_of(name: str, lines: int) -> Iterator[Row]:
    """A row per problem, grouping, and what is counted; greedy reasonings of test problems."""
    from arborsim_torch import reference
    from arborsim_torch.reference.decoder import generate

    model, task = reference.load(name, attn_implementation="eager", lines=lines)
    problems = [task.problem("test", index) for index in range(PROBLEMS)]
    for problem, made in zip(
        problems, generate(model, task, problems, batch=PROBLEMS), strict=True
    ):
        whole = received(model, problem.prompt, tuple(made.tokens))
        layers, heads, tokens = whole.shape
        for counted, first in (("reasoning", len(problem.prompt)), ("whole text", 0)):
            part = whole[:, :, first:]
            for grouping, groups in (
                ("model", part.mean(axis=(0, 1))[None]),
                ("layer", part.mean(axis=1)),
                ("head", part.reshape(layers * heads, -1)),
            ):
                top, bottom = concentration(groups)
                yield {
                    "episode": problem.index, "counted": counted, "grouping": grouping,
                    "tokens": tokens - first, "top_fifth": float(top.mean()),
                    "bottom_half": float(bottom.mean()),
                }  # fmt: skip


def experiments(store: Store) -> None:
    from arborsim_torch.reference import weights_path

    for name, lines in MODELS:
        if (weights_path(name) / "model.safetensors").exists():
            setting = {"model": name, "lines": lines}
            store.cell("attention", setting, partial(rows_of, name, lines))
        else:
            print(f"{name}: no weights here, left out")


if __name__ == "__main__":
    run("attention", experiments)
