"""CUDA graphs: a capture notes operations and has no effect; a replay carries them out again.

Operations are carried out while they are captured, because the shapes of their results are needed,
and what they wrote is put back afterwards.  A replay computes into the tensors of the capture.

A stream joins a capture by waiting for an event of it.  Its operations are a branch of the graph,
which has to be joined again; accesses of two branches must be in order like those of streams.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .clocks import Access, Gpu, Memory, Stream, Timeline


def _nothing() -> None: ...


@dataclass
class Note:
    """One operation of a capture: how to do it again, and what it accesses.

    `accesses` have a memory, its bytes, whether they are written, and whether the capture has
    allocated it.
    """

    what: str
    again: Callable[[], None] = _nothing
    accesses: list[tuple[ReferenceType[Memory], tuple[int, int], bool, bool]] = field(
        default_factory=list
    )


class Pool:
    """Memory of graphs (``torch.cuda.graph_pool_handle``), by the rules of the caching allocator.

    Attributes
    ----------
    graphs : int
        Captured into it, and alive.
    recording : bool
        A capture into it has begun and not ended.
    blocks : set of Memory
        Allocated while something was captured into it, and alive.
    """

    def __init__(self) -> None:
        self.graphs = 0
        self.recording = self._known = False
        self.blocks: WeakSet[Memory] = WeakSet()

    def begin(self) -> None:
        if self.recording:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        if self._known and not self.graphs and self.blocks:  # else the pool has been forgotten
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self.recording = self._known = True
        self.graphs += 1

    def end(self) -> None:
        if not self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording = False


class Capture:
    """What a thread captures at the moment.

    Attributes
    ----------
    failed : bool
        It can only be ended, which raises.
    branches : dict of Stream to Timeline
        The stream that began, and those that have joined.
    fresh : set of Memory
        Allocated meanwhile.
    """

    def __init__(self, stream: Stream, branch: Timeline, pool: Pool) -> None:
        self.branches = {stream: branch}
        self.pool, self.failed = pool, False
        self._first = branch
        self._accesses: WeakKeyDictionary[Memory, list[Access]] = WeakKeyDictionary()
        self.notes: list[Note] = []
        self.fresh: WeakSet[Memory] = WeakSet()
        self.results: list[Tensor] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # a memory, and what was in it

    def access(self, stream: Stream, memory: Memory, span: tuple[int, int], write: bool) -> None:
        """The last operation, on a stream, accesses a part of a memory."""
        note = self.notes[-1]
        note.accesses.append((ref(memory), span, write, memory in self.fresh))
        known = self._accesses.get(memory, [])
        by = self.branches[stream]
        self._accesses[memory] = memory.ordered(known, by, span, write, note.what)

    @property
    def unjoined(self) -> list[str]:
        """Branches with operations that what began does not come after."""
        known = self._first.known
        return [x.name for x in self.branches.values() if known.get(x.id, 0) < x.now]

    def keep(self, memory: Memory, x: Tensor) -> None:
        """A tensor of the CPU is about to be written: remember what is in its memory."""
        storage = x.untyped_storage()
        if memory not in self.fresh and storage._cdata not in self._before:
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
            self._before[storage._cdata] = whole, whole.clone()

    def end(self) -> None:
        """Undo what was written: a capture computes nothing."""
        for whole, before in self._before.values():
            whole.copy_(before)
        self._before.clear()
        for x in self.results:
            if x.is_floating_point() and x.itemsize > 1:
                x.fill_(float("nan"))
        self.results.clear()


def refill(into: Any, found: Any) -> None:
    """Put new results into the tensors of the old ones."""
    if isinstance(into, (list, tuple)):
        for one, other in zip(into, found, strict=True):
            refill(one, other)
    elif isinstance(into, Tensor) and into.data_ptr() != found.data_ptr():
        into.copy_(found)


class Graph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._capture: Capture | None = None
        self._pool: Pool | None = None  # of a capture that has ended

    def __del__(self) -> None:
        if self._pool is not None:
            self._pool.graphs -= 1

    def capture_begin(self, pool: Pool) -> None:
        stream = self._gpu.stream()
        if stream is self._gpu.default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        assert self._gpu.capture is None, "a capture inside of a capture"
        pool.begin()
        if pool not in self._gpu.pools:
            self._gpu.pools.append(pool)
        self._capture = self._gpu.capture = Capture(stream, self._gpu.branch(stream), pool)

    def capture_end(self) -> None:
        capture, self._gpu.capture = self._gpu.capture, None
        assert capture is not None
        with torch.inference_mode():
            capture.end()
        if capture.failed:
            raise RuntimeError("CUDA error: operation failed due to a previous error")
        capture.pool.end()
        self._pool = capture.pool

    def replay(self) -> None:
        assert self._capture is not None, "nothing was captured"
        gpu = self._gpu
        with gpu.lock, torch.inference_mode(), torch._C.DisableTorchFunctionSubclass():
            stream = gpu.launch("graph replay")
            for note in self._capture.notes:
                for known, span, write, fresh in note.accesses:
                    memory = known()
                    if memory is not None:
                        memory.touch(stream, span, write, note.what)
                        if fresh:  # memory of graphs goes to other graphs alone
                            memory.recorded.add(stream.id)
                    elif not fresh:
                        gpu.fault(f"{note.what} of a graph accesses memory that was freed")
                note.again()


class captured:
    """`torch.cuda.graph`; `turned` makes its stream the current one.

    Like the original it does not turn back where the capture cannot be ended.
    """

    def __init__(self, gpu: Gpu, graph: Graph, turned: Any, pool: Pool | None) -> None:
        self._gpu, self._graph, self._turned = gpu, graph, turned
        self._pool = Pool() if pool is None else pool

    def __enter__(self) -> None:
        gpu = self._gpu
        with gpu.lock:
            for each in gpu.streams:
                each.flush()
                gpu.host().learn(each.known)
        gpu.wait({}, "torch.cuda.graph")
        self._turned.__enter__()
        self._graph.capture_begin(self._pool)

    def __exit__(self, *error: Any) -> None:
        capture = self._gpu.capture
        assert capture is not None
        if error[0] is None and capture.unjoined:
            capture.failed = True
            self._gpu.faults.append(f"{capture.unjoined[0]} is not joined when the capture ends")
        self._graph.capture_end()
        self._turned.__exit__(*error)
