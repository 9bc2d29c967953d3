"""Rewards from a reward model: a classifier of texts or of steps, or a step-token model.

Every call reads the whole paths anew: the model keeps no keys and values between calls.  What it
holds during a call is counted, as are its weights and its seconds.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arborsim.core.errors import UsageError
from arborsim.play.backends import ModelUsage
from arborsim_torch.kernels.fused import pinned
from arborsim_torch.rewards.base import Account, Thought
from arborsim_torch.rewards.texts import Encoded


@dataclass(frozen=True)
class Head:
    """How the logits at a position become a score in [0, 1]."""

    #: softmax over these; empty for one logit, whose sigmoid is taken
    classes: tuple[int, ...] = ()
    good: int = 0  #: which of `classes` is the score

    def __call__(self, logits: Tensor) -> Tensor:
        """float64 ``[n]`` from logits ``[n, labels or vocabulary]``."""
        if not self.classes:
            return logits[:, 0].double().sigmoid()
        return logits[:, list(self.classes)].double().softmax(-1)[:, self.good]


class RewardModel:
    """A reward (`arborsim_torch.rewards.base.Reward`) by a model of transformers.

    The model, in evaluation mode, gives logits per position, or, if it `pools`, one row
    ``[n, labels]`` per text.  `encode` says what it reads of a thought, and at which positions it
    scores, `aggregate` makes the score of the path from those of the steps.  `pad_id` fills shorter
    paths of a call; None computes paths of equal length together instead.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        encode: Callable[[Thought], Encoded],
        head: Head,
        *,
        pools: bool,
        aggregate: Callable[[Sequence[float]], float],
        pad_id: int | None,
    ) -> None:
        self.name = name
        self._model, self._encode, self._head = model, encode, head
        self._pools, self._aggregate, self._pad_id = pools, aggregate, pad_id
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        self._account = Account("reward", name, weights, model.device)
        known = inspect.signature(model.forward).parameters
        # Language models need no logits but those of the steps, which a long vocabulary makes big.
        self._keeps = "logits_to_keep" in known and not pools
        self._caches = "use_cache" in known and not getattr(model.config, "is_encoder_decoder", 0)
        longest = getattr(model.config, "max_position_embeddings", None)
        self._longest = 1 << 30 if longest is None else int(longest)

    def usage(self) -> ModelUsage:
        return self._account.usage()

    def score(self, thoughts: Sequence[Thought], rng: np.random.Generator) -> list[float]:
        if not thoughts:
            return []
        with self._account.timed(thoughts), pinned(self._model.device, math=True):
            paths = [self._encode(thought) for thought in thoughts]
            self._check_length(max(len(path.ids) for path in paths))
            scores = [0.0] * len(paths)
            for group in self._groups(paths):
                together = self._scores([paths[i] for i in group])
                for i, steps in zip(group, together, strict=True):
                    scores[i] = self._aggregate(steps)
        if any(math.isnan(score) for score in scores):  # would pass for having no reward
            raise UsageError(
                f"--reward {self.name}: it scores not-a-number: its weights are damaged, or "
                f"overflow in {str(self._model.dtype).removeprefix('torch.')}"
            )
        return scores

    def _groups(self, paths: Sequence[Encoded]) -> list[list[int]]:
        """Paths that are computed together."""
        if self._pad_id is not None:
            return [list(range(len(paths)))]
        by_length: dict[int, list[int]] = {}
        for i, path in enumerate(paths):
            by_length.setdefault(len(path.ids), []).append(i)
        return list(by_length.values())

    @torch.inference_mode()
    def _scores(self, paths: Sequence[Encoded]) -> list[list[float]]:
        """Scores of the steps of each path."""
        longest = max(len(path.ids) for path in paths)
        ids = torch.full((len(paths), longest), self._pad_id or 0)
        mask = torch.zeros_like(ids)
        for row, path in enumerate(paths):
            ids[row, : len(path.ids)] = torch.tensor(path.ids)
            mask[row, : len(path.ids)] = 1
        wanted = sorted({step for path in paths for step in path.steps})
        options: dict[str, Any] = {"use_cache": True} if self._caches else {}
        if self._keeps:
            options["logits_to_keep"] = torch.tensor(wanted, device=self._model.device)
        device = self._model.device
        output = self._model(input_ids=ids.to(device), attention_mask=mask.to(device), **options)
        self._count(ids.numel(), output)
        if self._pools:
            return [[score] for score in self._head(output.logits).tolist()]
        place = {step: at if self._keeps else step for at, step in enumerate(wanted)}
        rows = [row for row, path in enumerate(paths) for _ in path.steps]
        columns = [place[step] for path in paths for step in path.steps]
        scores = iter(self._head(output.logits[rows, columns]).tolist())
        return [[next(scores) for _ in path.steps] for path in paths]

    def _count(self, tokens: int, output: Any) -> None:
        held = getattr(output, "past_key_values", None)
        layers = getattr(held, "layers", ())
        kv_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        account = self._account
        account.tokens += tokens
        account.peak_kv_bytes = max(account.peak_kv_bytes, kv_bytes)

    def _check_length(self, tokens: int) -> None:
        if tokens > self._longest:
            raise UsageError(
                f"--reward {self.name}: a path has {tokens} tokens, but the model takes "
                f"{self._longest}: lower --max-tokens"
            )
