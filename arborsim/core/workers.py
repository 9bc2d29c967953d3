"""Work spread over processes. What comes of it does not depend on their number.

Processes are spawned, not forked: a fork would copy the threads' locks of Arrow and BLAS.
Functions are at the top level of a module, as are classes of items and results: all are pickled.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import contextmanager, suppress
from multiprocessing import active_children, get_context, parent_process
from threading import Thread
from typing import TypeVar

from arborsim.core.errors import UsageError

Item = TypeVar("Item")
Result = TypeVar("Result")

#: Items under way or finished early, per process: bounds the memory that waiting results take.
_AHEAD = 2
#: Processes; what counts them overflows at some billions.
_MOST = 10_000


class WorkerDied(UsageError):
    """A worker process ended without a result."""


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Iterator[Result]:
    """Like ``map(function, items)``, in `workers` processes if more than one.

    Items are taken as results are handed out, a few ahead, so that `items` can look at them.  It is
    a `WorkerDied` if a process dies.
    """
    if workers <= 1:
        yield from map(function, items)
        return
    waiting: deque[Future[Result]] = deque()
    with _processes(workers) as pool:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= _AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def unfold(
    function: Callable[[Item], Result], next_item: Callable[[], Item], workers: int
) -> Iterator[tuple[Item, Result]]:
    """Items with their results, as they are done, until there are none and none is under way.

    `next_item` raises `LookupError` if there is none now. A result that was handed out may make it
    give more.  It is a `WorkerDied` if a process dies.  With 0 workers this one does the work.
    """
    if workers < 1:
        while more := _taken(next_item, 1):
            yield more[0], function(more[0])
        return
    under_way: dict[Future[Result], Item] = {}
    with _processes(workers) as pool:
        while True:
            for item in _taken(next_item, _AHEAD * workers - len(under_way)):
                under_way[pool.submit(function, item)] = item
            if not under_way:
                return
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                yield under_way.pop(future), future.result()


@contextmanager
def _processes(workers: int) -> Iterator[Executor]:
    """A pool. After Ctrl-C processes that it did not reach are ended, and nothing is waited for."""
    from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor  # slow to import

    if workers > _MOST:
        raise UsageError(f"{workers:,} worker processes are too many: take at most {_MOST:,}")
    others = set(active_children())
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _begin)
    try:
        yield pool
    except BrokenProcessPool:
        raise WorkerDied(
            f"one of {workers} worker processes died, perhaps for lack of memory: try fewer; a "
            "script that uses workers keeps its calls below if __name__ == '__main__'"
        ) from None
    except KeyboardInterrupt:
        for process in set(active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """In a new process: end at Ctrl-C without a word, and with the process that works are for."""
    # Ctrl-C reaches every process of the terminal; only the first has something to report.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """However it ends: a process that is killed says nothing."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _taken(next_item: Callable[[], Item], most: int) -> list[Item]:
    """The next items, as many as there are now."""
    found: list[Item] = []
    with suppress(LookupError):
        while len(found) < most:
            found.append(next_item())
    return found
