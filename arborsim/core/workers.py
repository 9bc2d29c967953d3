"""Work spread over processes, with results in the order of the work: the same whatever the number.

Processes are spawned, not forked: a fork would copy the threads' locks of Arrow and BLAS.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TypeVar

from arborsim.core.errors import UsageError

Item = TypeVar("Item")
Result = TypeVar("Result")

#: Items under way or finished early, per worker: bounds the memory that waiting results take.
_AHEAD = 2


def in_order(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Iterator[Result]:
    """Like ``map(function, items)``, in `workers` processes if more than one.

    Items are taken as results are handed out, a few ahead, so that `items` can look at them.

    Parameters
    ----------
    function : callable
        At the top level of a module, as are the classes of items and results (they are pickled).
    items : iterable
    workers : int

    Raises
    ------
    UsageError
        A process died.
    """
    if workers <= 1:
        yield from map(function, items)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=die_on_interrupt)
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= _AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise UsageError(
            f"one of {workers} worker processes died, perhaps for lack of memory: try fewer"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def die_on_interrupt() -> None:
    """Ctrl-C reaches every process of the terminal; only the first has something to say."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
