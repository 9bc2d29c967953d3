"""One decode iteration on tensors that stay where they are, so that a CUDA graph can replay it.

What a step reads and writes has the same address at every step: its inputs (ids, positions, slots
to write), the pools, and the tables that say which slots are on which path.  Tokens in DDR that are
streamed come from page-locked rows to two buffers: copies of all layers but the first are branches
of the graph, and the first layer's set out when the step before is over.  Numbers of entries and
of sequences are rounded up to a *bucket*: entries beyond are masked, sequences beyond read nothing
and write to a slot that no token has.  The first step of a bucket runs eagerly, on the
stream that captures the second; from then on, one launch replays it.  Without graphs every step
runs eagerly, on the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arborsim_torch.cache.forward import AttentionMetadata, PlacedPiece
from arborsim_torch.cache.hf import BatchedCaches, hf_cache
from arborsim_torch.cache.layout import Place
from arborsim_torch.cache.pieces import padded, rounded
from arborsim_torch.cache.reader import PiecePlan
from arborsim_torch.cache.tiered import TieredCache
from arborsim_torch.context import ForwardContext, PassContext
from arborsim_torch.fused_layers import fused
from arborsim_torch.fused_layers import refusal as unfused
from arborsim_torch.graphs import Graphs, StepOutputs, refused

_NUMBERS = count()


class StaticStep:
    """Computes the steps of one search, or of several together, as CUDA graphs if `graphs`.

    `bucket` is what the last step has in common with others that the same graph computes.  `fused`
    says whether layers run in fused kernels (`arborsim_torch.fused_layers`).
    """

    def __init__(self, model: Any, cache: TieredCache, graphs: bool) -> None:
        self._model, self._cache = model, cache
        self.graphs = Graphs(model) if graphs else None
        self.fused = not unfused(model)
        self._slides = bool(getattr(model.config, "sliding_window", None))
        self._number = next(_NUMBERS)
        self._together: tuple[StaticStep, ...] = (self,)
        self._hf = hf_cache(self, cache.layout.layers)
        self._inputs: dict[int, Tensor] = {}  # int64 [2 + groups, rows]: ids, positions and slots
        self._input = torch.empty(0)
        self._plan: PiecePlan
        self._versions: dict[Place, int] = {}  # of the tables, when their pools were up to date
        self._addresses: dict[Place, tuple[int, ...]] = {}
        self._buffers = 0  # allocations of those that tokens in DDR are streamed through
        self._longest = 0
        self.bucket: Hashable = None

    # -- what transformers asks of a cache ---------------------------------------------------------

    @property
    def seen_tokens(self) -> int:
        return self._longest

    @property
    def held_tokens(self) -> int:
        return self._cache.held_tokens

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write ``[seqs, kv_heads, 1, head_dim]`` to the slots of the step."""
        layout, pool = self._cache.layout, self._cache.pools[Place.HBM]
        slots = self._input[2:][layout.groups_of_layer(layer)]
        if layout.grouping == "head":  # rows of the slab, head by head
            data, where = pool.rows(layer), slots.reshape(-1)
            for target, new in zip(data.unbind(), (keys, values), strict=True):
                target.index_copy_(0, where, new[:, :, 0].transpose(0, 1).flatten(0, 1))
            return
        for target, new in zip(pool.slab(layer)[0].unbind(), (keys, values), strict=True):
            target.index_copy_(1, slots[0], new[:, :, 0].transpose(0, 1))

    def target(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Where a layer's keys and values are, and the slots that those of the step go to.

        ``[kv_heads or 1, slots, head_dim]`` and int64 ``[kv_heads or 1, rows]``.
        """
        layout, pool = self._cache.layout, self._cache.pools[Place.HBM]
        by_head = layout.grouping == "head"  # rows of the slab, head by head
        keys, values = pool.rows(layer)[:, None] if by_head else pool.slab(layer)[0]
        return keys, values, self._input[2:][layout.groups_of_layer(layer)]

    # -- steps -------------------------------------------------------------------------------------

    @property
    def possible(self) -> bool:
        """Whether all that the next step reads has an address that stays."""
        return self._cache.in_place

    def begin(self, ids: np.ndarray) -> AttentionMetadata:
        """Announce the next token of each leaf, int ``[seqs, 1]``."""
        cache, layout, seqs = self._cache, self._cache.layout, len(ids)
        rows = padded(seqs)
        position, slots, self._plan = cache.enter(ids, rounded, rows)
        self._longest, pool = cache.seen_tokens, cache.pools[Place.HBM]
        if layout.grouping == "head":
            slots = slots + pool.first_row[:, None]
        if rows not in self._inputs:
            self._inputs[rows] = torch.zeros(
                (2 + layout.groups, rows), dtype=torch.int64, device=layout.device
            )
        self._input = self._inputs[rows]
        table = np.zeros(self._input.shape, dtype=np.int64)
        table[0, :seqs], table[1, :seqs], table[2:] = ids[:, 0], position[:, 0], slots
        self._input.copy_(torch.from_numpy(table), non_blocking=True)
        at, first = self._input[1, :seqs, None], position[:, 0].tolist()
        unused = (_not_gathered, _not_gathered)
        return AttentionMetadata(at, first, self._longest, *unused, self.store)

    @property
    def rows(self) -> int:
        """Sequences, those of the padding included."""
        return self._input.shape[1]

    def _bring_up_to_date(self, wants_rows: bool) -> None:
        """Let tables have all tensors that the step reads: a capture must not make any."""
        moved = False
        for table in (*self._plan.tables, *self._plan.on_host.tables):
            if wants_rows or self._slides:
                table.tensor("position")
            if self._versions.get(table.place) != table.version:
                self._versions[table.place] = table.version
                table.pool.bring_up_to_date()
            now = table.pool.addresses
            moved |= self._addresses.get(table.place, now) != now
            self._addresses[table.place] = now
        if self._cache.stream is not None:
            buffers = self._cache.stream.allocations
            moved |= self._buffers != buffers
            self._buffers = buffers
        if moved and self.graphs is not None:
            self.graphs.forget()
        self.bucket = self.rows, rounded(self._longest), self._plan.key

    def _fresh(self, state: PassContext) -> PassContext:
        """An empty context of all sequences and positions of the bucket."""
        layers = range(self._cache.layout.layers)
        listed = [self._plan.pieces(layer) for layer in layers]

        def pieces(layer: int) -> list[PlacedPiece]:
            self._plan.on_host.arrive(layer)
            return listed[layer]

        metadata = replace(
            state.metadata,
            at=self._input[1][:, None],
            positions=rounded(self._longest),
            pieces=pieces if self._plan.on_host.tables else listed.__getitem__,
        )
        return state.again(metadata)

    def run(
        self, states: Sequence[PassContext], wants_hidden: bool, others: Sequence[StaticStep] = ()
    ) -> list[StepOutputs]:
        """Compute what this step and others, of other searches, have begun.

        `states` say what is collected of each, `wants_hidden` whether outputs of blocks are wanted
        of any. What has been captured of all together is kept by this step.
        """
        together = (self, *others)
        for step, state in zip(together, states, strict=True):
            step._bring_up_to_date(state.wants_rows)
            step._plan.on_host.await_first()
        if others or self._together != together:
            rows = [step.rows for step in together]
            passes = BatchedCaches(together, rows) if others else self
            self._together, self._hf = together, hf_cache(passes, self._cache.layout.layers)

        def compute() -> StepOutputs:
            hidden: list[Tensor] = []
            fresh = [step._fresh(state) for step, state in zip(together, states, strict=True)]
            take = block_outputs(self._model.model.layers, hidden.append)
            with take if wants_hidden else nullcontext():
                outputs = self.compute(fresh, hidden)
            for own, state in zip(fresh, states, strict=True):  # lets go of the pools afterwards
                own.metadata = state.metadata
            return outputs

        def begin_again() -> None:
            for step in together:
                step._plan.on_host.begin_again()

        replayed = False
        if self.graphs is None:
            outputs = compute()
        else:
            asked = [
                (step._number, step.bucket, state.asked)
                for step, state in zip(together, states, strict=True)
            ]
            before = self.graphs.replays
            outputs = self.graphs.run((tuple(asked), wants_hidden), compute, begin_again)
            replayed = self.graphs.replays > before
            for step in others:
                if step.graphs is not None:
                    step.graphs.replays += replayed
        for step in together:
            step._plan.on_host.passed(replayed)
        found, first = [], 0
        for number, (step, state) in enumerate(zip(together, states, strict=True)):
            found.append(outputs.of(number, first, state.metadata))
            first += step.rows
        return found

    def compute(self, states: list[PassContext], hidden: list[Tensor]) -> StepOutputs:
        """The device's part: all that it reads and writes is where it was at the last step.

        Hooks may put outputs of blocks into `hidden`.
        """
        model, inputs = self._model, [step._input for step in self._together]
        at = [state.metadata.at for state in states]
        alone = len(inputs) == 1
        with fused(model, self._together) if self.fused else nullcontext():
            last = model.model(
                input_ids=(inputs[0][0] if alone else torch.cat([x[0] for x in inputs]))[:, None],
                position_ids=at[0] if alone else torch.cat(at),
                past_key_values=self._hf,
                use_cache=True,
                context=ForwardContext(states),
            ).last_hidden_state
        for state in states:
            state.settle()
        return StepOutputs(model.lm_head(last), last, hidden, states)


def _not_gathered(layer: int) -> Any:
    raise AssertionError("a static step reads pieces alone")


@contextmanager
def block_outputs(layers: Any, take: Callable[[Tensor], None]) -> Iterator[None]:
    """Hand over the output of every block when it comes.

    Hooks: the last entry of ``output_hidden_states`` is the normalised state, no output.
    """

    def hook(_module: Any, _args: Any, output: Any) -> None:
        take(output[0] if isinstance(output, tuple) else output)

    handles = [layer.register_forward_hook(hook) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def kind_of_steps(model: Any, graphs: bool) -> str:
    """How decode steps whose reads stay where they are are computed, in words."""
    if model.device.type != "cuda" or not graphs:
        return "eager"
    if why := refusal(model):
        return f"eager: {why}"
    notes = [f"{len(failed)} not captured: {failed[0]}"] if (failed := refused(model)) else []
    notes += [f"small operations apart: {why}"] if (why := unfused(model)) else []
    return ", ".join(["CUDA graphs", *notes])


def refusal(model: Any) -> str:
    """Why steps of a model cannot be captured; empty if they can."""
    config = model.config
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        return f"{kind} RoPE asks on the host how long the context is"
    if getattr(config, "num_local_experts", 0) or getattr(config, "num_experts", 0):
        return "which experts compute a token is known on the host alone"
    return ""
