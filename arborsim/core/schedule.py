"""Work that brings forth more work, spread over processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from typing import TypeVar

from arborsim.core.errors import UsageError
from arborsim.core.workers import die_on_interrupt

Item = TypeVar("Item")
Result = TypeVar("Result")

_AHEAD = 2  # items under way per process


def unfold(
    function: Callable[[Item], Result], next_item: Callable[[], Item], processes: int
) -> Iterator[tuple[Item, Result]]:
    """Work on items until there are none, and none of those under way can bring forth more.

    What is handed out may make `next_item` give more.  The order in which results come is that of
    their being done: whoever needs another order must make it.

    Parameters
    ----------
    function : callable
        At the top level of a module, as are the classes of items and results (they are pickled).
    next_item : callable
        The next item; raises `LookupError` if there is none now.
    processes : int

    Raises
    ------
    UsageError
        A process died.

    Notes
    -----
    After Ctrl-C nothing is waited for: processes that it did not reach are ended.
    """
    if processes <= 1:
        while more := _taken(next_item, 1):
            yield more[0], function(more[0])
        return
    others = set(active_children())
    pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=die_on_interrupt)
    under_way: dict[Future[Result], Item] = {}
    try:
        while True:
            for item in _taken(next_item, _AHEAD * processes - len(under_way)):
                under_way[pool.submit(function, item)] = item
            if not under_way:
                return
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                yield under_way.pop(future), future.result()
    except BrokenProcessPool:
        raise UsageError(
            f"one of {processes} worker processes died, perhaps for lack of memory: try fewer"
        ) from None
    except KeyboardInterrupt:
        for process in set(active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _taken(next_item: Callable[[], Item], most: int) -> list[Item]:
    """The next items, as many as there are now."""
    found: list[Item] = []
    try:
        while len(found) < most:
            found.append(next_item())
    except LookupError:
        pass
    return found
