"""CUDA graphs of steps: captured once, then replayed; steps that cannot be captured stay eager."""

from __future__ import annotations

import gc
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from arborsim_torch.static import StepOutputs

_MOST_GRAPHS = 32  #: kept per search; the one that was used longest ago goes first
_MOST_REFUSALS = 3  #: failed captures of a model, after which none is tried any more


class _Captures:
    """A stream, and memory for graphs, shared by all captures of one model.

    The caching allocator forgets a pool with the last of its graphs, and then lets nothing be
    captured into it as long as any tensor of it is held (``use_count > 0`` is asserted in
    ``create_or_incref_pool``).  So a tiny graph, the first of each pool, is kept.

    Attributes
    ----------
    stream : torch.cuda.Stream
        One for all searches: libraries keep a workspace for each that they have seen.
    refused : list of str
        Why captures failed, in a line each.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream: Any = torch.cuda.Stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._keeper: Any = None
        self._failed: list[Any] = []  # graphs that allocators may still point to
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
                    self._captured(graph, lambda: torch.zeros(1, device=self._device))
                    graph = torch.cuda.CUDAGraph()
                return graph, self._captured(graph, compute)
        except Exception as error:
            why = reason(error)
            self.refused.append(why)
        self._clear(graph)
        warnings.warn(
            f"a CUDA graph could not be captured, its steps are computed eagerly: {why}",
            RuntimeWarning, stacklevel=4,
        )  # fmt: skip
        return None

    def _captured(self, graph: Any, compute: Callable[[], Any]) -> Any:
        # Copies of other threads go on meanwhile.
        with _uncollected(), torch.cuda.graph(
            graph, pool=self._pool, stream=self.stream, capture_error_mode="thread_local"
        ):  # fmt: skip
            return compute()

    def _clear(self, graph: Any) -> None:
        """Undo what a capture has begun that did not end (``CUDAGraph::capture_end``)."""
        self._failed.append(graph)
        with suppress(RuntimeError):  # that it has ended
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
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


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without garbage collection: it could destroy other graphs, which ends a capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


_SHARED: WeakKeyDictionary[Any, _Captures] = WeakKeyDictionary()  #: by model


def refused(model: Any) -> list[str]:
    """Why captures of a model's steps have failed so far, in a line each."""
    shared = _SHARED.get(model)
    return [] if shared is None else list(shared.refused)


class Graphs:
    """CUDA graphs of steps that differ in the sizes of what they read.

    All graphs of a model share one stream and one memory pool, so what one leaves behind must be
    used before another runs.  The first step of a bucket runs eagerly, the second is captured.

    Parameters
    ----------
    model

    Attributes
    ----------
    captures, replays : int
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

        Parameters
        ----------
        bucket : hashable
        compute : callable
        begin_again : callable, optional
            Prepares for another `compute`, after one whose capture has failed.
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
