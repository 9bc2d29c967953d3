"""CUDA graphs of steps: captured once, then replayed; steps that cannot be captured stay eager."""

from __future__ import annotations

import gc
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from arborsim_torch.cache.forward import AttentionMetadata
from arborsim_torch.context import PassContext

_MOST_GRAPHS = 32  #: kept per search; the one that was used longest ago goes first
_MOST_REFUSALS = 3  #: failed captures of a model, after which none is tried any more
_FAILED: list[Any] = []  # kept for good: allocators go on asking a graph whose capture failed


@dataclass(frozen=True)
class StepOutputs:
    """The results of a step, in memory that the next one may overwrite."""

    logits: Tensor  #: ``[seqs, 1, vocabulary]``
    last: Tensor  #: ``[seqs, 1, size]``: normalised last hidden state
    hidden: list[Tensor]  #: ``[seqs, 1, size]``: output of every block, if it is wanted
    #: what attention has left, of each search; their sequences come one after the other
    states: list[PassContext]

    def tensors(self) -> list[Tensor]:
        """All of them."""
        left = [x for state in self.states for x in state.tensors()]
        return [self.logits, self.last, *self.hidden, *left]

    def of(self, search: int, first: int, metadata: AttentionMetadata) -> StepOutputs:
        """A search's own, whose sequences begin at `first`, without what its padding left."""
        own = slice(first, first + metadata.num_seqs)
        hidden = [rows[own] for rows in self.hidden]
        state = self.states[search].within(metadata)
        return StepOutputs(self.logits[own], self.last[own], hidden, [state])


def capture_into(graph: Any, pool: Any, stream: Any, work: Callable[[], Any]) -> Any:
    """Capture what `work` launches; its result."""
    collects = gc.isenabled()
    gc.disable()  # it could destroy other graphs, which ends a capture
    try:
        mode = "thread_local"  # copies of other threads go on
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):
            return work()
    finally:
        if collects:
            gc.enable()


def abandon(graph: Any, pool: Any, device: int) -> bool:
    """Tell the allocator that a failed capture is over; False if CUDA ended it in peace."""
    _FAILED.append(graph)
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device, pool)
        return True
    return False


class _Captures:
    """A stream, and memory for graphs, shared by all captures of one model.

    The caching allocator forgets a pool with the last of its graphs, and then lets nothing be
    captured into it as long as any tensor of it is held (``use_count > 0`` is asserted in
    ``create_or_incref_pool``).  So a tiny graph, the first of each pool, is kept.  All searches
    have one stream, as libraries keep a workspace for each that they have seen.  `refused` says why
    captures failed, in a line each.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream: Any = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._keeper: Any = None
        self.refused: list[str] = []

    def capture(self, compute: Callable[[], Any]) -> tuple[Any, Any] | None:
        """A graph and what it computes into; None if it cannot be captured.

        Then the current stream, the allocator and the random numbers are as before.
        """
        if len(self.refused) >= _MOST_REFUSALS:
            return None
        graph = torch.cuda.CUDAGraph()
        here = torch.cuda.current_stream()
        try:
            with torch.cuda.stream(here):  # a capture that fails to end does not turn back
                if self._keeper is None:
                    self._keeper = graph
                    tiny = lambda: torch.zeros(1, device=self._device)  # noqa: E731
                    capture_into(graph, self._pool, self.stream, tiny)
                    graph = torch.cuda.CUDAGraph()
                return graph, capture_into(graph, self._pool, self.stream, compute)
        except Exception as error:
            why = reason(error)
            self.refused.append(why)
        self._clear(graph)
        what = f"a CUDA graph could not be captured, its steps are computed eagerly: {why}"
        warnings.warn(what, RuntimeWarning, stacklevel=4)
        return None

    def _clear(self, graph: Any) -> None:
        """Undo what a capture has begun that did not end (``CUDAGraph::capture_end``)."""
        abandon(graph, self._pool, torch.cuda.current_device())
        self._pool, self._keeper = torch.cuda.graph_pool_handle(), None
        torch.cuda.synchronize()  # an error of the device itself ends the run here
        for generator in torch.cuda.default_generators:
            # It may count as capturing for ever, and refuse to draw.
            fresh = torch.Generator(generator.device).manual_seed(generator.initial_seed())
            generator.graphsafe_set_state(fresh.graphsafe_get_state())


def reason(error: BaseException) -> str:
    """Why a capture failed, in a line.  Ending it fails then, too, which tells less."""
    both = [each for each in (error.__context__, error) if each is not None]
    return "; ".join(f"{type(x).__name__}: {x}".splitlines()[0] for x in both)[:300]


_SHARED: WeakKeyDictionary[Any, _Captures] = WeakKeyDictionary()  #: by model


def refused(model: Any) -> list[str]:
    """Why captures of a model's steps have failed so far, in a line each."""
    shared = _SHARED.get(model)
    return [] if shared is None else list(shared.refused)


class Graphs:
    """CUDA graphs of steps that differ in the sizes of what they read.

    All graphs of a model share one stream and one memory pool, so what one leaves behind must be
    used before another runs.  The first step of a bucket runs eagerly, the second is captured.
    """

    def __init__(self, model: Any) -> None:
        shared = _SHARED.get(model)
        if shared is None:
            shared = _SHARED[model] = _Captures(model.device)
        self._shared = shared
        self._captured: OrderedDict[Hashable, tuple[Any, StepOutputs] | None] = OrderedDict()
        self._eager: set[Hashable] = set()  # buckets that could not be captured
        self.captures = self.replays = 0

    @property
    def refused(self) -> list[str]:
        """Why captures of the model's steps have failed, in a line each."""
        return self._shared.refused

    def run(
        self,
        bucket: Hashable,
        compute: Callable[[], StepOutputs],
        begin_again: Callable[[], None] | None = None,
    ) -> StepOutputs:
        """The results of `compute`, which does the same for the same `bucket`.

        `begin_again` prepares for another `compute`, after one whose capture has failed.
        """
        if bucket in self._eager:
            return compute()
        if bucket not in self._captured:
            if len(self._captured) == _MOST_GRAPHS:
                self._captured.popitem(last=False)
            self._captured[bucket] = None
            return self._aside(compute)
        self._captured.move_to_end(bucket)
        known = self._captured[bucket]
        if known is None:
            known = self._shared.capture(compute)
            if known is None:
                self._eager.add(bucket)
                del self._captured[bucket]
                if begin_again is not None:
                    begin_again()
                return compute()
            self._captured[bucket] = known
            self.captures += 1
        graph, outputs = known
        graph.replay()
        self.replays += 1
        return outputs

    def _aside(self, compute: Callable[[], StepOutputs]) -> StepOutputs:
        """Compute on the stream that captures, whose libraries then have their workspaces."""
        here, aside = torch.cuda.current_stream(), self._shared.stream
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            outputs = compute()
        here.wait_stream(aside)
        for x in outputs.tensors():
            x.record_stream(here)
        return outputs

    def forget(self) -> None:
        """Drop all graphs: what they read has moved."""
        self._captured.clear()
