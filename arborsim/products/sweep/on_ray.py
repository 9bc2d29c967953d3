"""Cells on the machines of a Ray cluster; each needs arborsim, and the inputs at the same paths.

Workers get a cell's parameters and the paths of its inputs, and return its small file, which the
sweep alone writes.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from arborsim.core.errors import UsageError
from arborsim.products.sweep.cells import WENT_WRONG, Made, died, made
from arborsim.products.sweep.jobs import Job
from arborsim.products.sweep.run import Pool

#: Cells under way or waiting, per processor of the cluster: hides the way there and back.
_AHEAD = 2
_REACH_S = 10.0  # for a cluster's address to answer


def on_ray(workers: int, address: str = "") -> Pool:
    """A pool on the cluster at `address`, or on one of `workers` that is started here.

    Raises
    ------
    UsageError
        Ray is not installed, or there is no cluster.
    """
    try:
        import ray
    except ImportError:
        raise UsageError("--on ray needs the package ray: pip install 'arborsim[ray]'") from None
    if address:
        _reach(address)

    def pool(
        function: Callable[[Job], Made], take: Callable[[], Job]
    ) -> Iterator[tuple[Job, Made]]:
        started = not ray.is_initialized()
        if started:
            _start(ray, workers, address)
        try:
            yield from _unfold(ray, function, take, own=started)
        finally:
            if started:
                ray.shutdown()

    return pool


def _start(ray: Any, workers: int, address: str) -> None:
    quiet: dict[str, Any] = {"logging_level": "error", "log_to_driver": False}
    own: dict[str, Any] = {"num_cpus": max(1, workers), "include_dashboard": False}
    if address:
        own = {"address": address}
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(**own, **quiet)
        # Ray's own answer to SIGTERM is to abort.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
    except Exception as error:  # of many kinds
        said = " ".join(str(error).split())[:160]
        raise UsageError(f"Ray cannot be reached or started: {said}") from None


def _reach(address: str) -> None:
    """Refuse an address where nothing listens: Ray itself tries for minutes, or for ever."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:  # "auto", "local": names that Ray knows
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
    except (OSError, ValueError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(
            f"--address {address}: no Ray cluster answers there ({why}): `ray status` says where "
            "one is"
        ) from None


def _unfold(
    ray: Any, function: Callable[[Job], Made], take: Callable[[], Job], *, own: bool
) -> Iterator[tuple[Job, Made]]:
    """As `arborsim.core.workers.unfold`; a cell whose process dies twice has failed.

    What is left of a cluster of the sweep's `own` ends with it: to cancel tasks just before can
    abort Ray (2.60: "Tried to complete task that was not pending").
    """
    task = ray.remote(num_cpus=1, max_retries=1)(function)
    most = _AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
    under_way: dict[Any, Job] = {}
    try:
        while True:
            while len(under_way) < most:
                try:
                    job = take()
                except LookupError:
                    break
                under_way[task.remote(job)] = job
            if not under_way:
                return
            for reference in ray.wait(list(under_way), num_returns=1)[0]:
                job = under_way.pop(reference)
                yield job, _result(ray, reference, job)
    finally:
        for reference in () if own else under_way:
            ray.cancel(reference)


def _result(ray: Any, reference: Any, job: Job) -> Made:
    try:
        found: Made = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None  # `function` raises what concerns all cells
    except ray.exceptions.WorkerCrashedError:
        return died(job)
    except ray.exceptions.RayError as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        return made(job, WENT_WRONG, reason=f"Ray lost it ({said})")
    return found
