"""Computes the cells that are missing, each once, however many sweeps work on a folder."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from arborsim.core.outputs import Busy, Lock
from arborsim.core.workers import WorkerDied, unfold
from arborsim.products.sweep.cells import WENT_WRONG, Folder, Made, died
from arborsim.products.sweep.jobs import Job

#: Between two looks at cells that another sweep computes.
_LOOK_S = 0.2
#: Computes items here or elsewhere: as `arborsim.core.workers.unfold`, without its last argument.
Pool = Callable[[Callable[[Job], Made], Callable[[], Job]], Iterator[tuple[Job, Made]]]


@dataclass
class Tally:
    """The cells that a sweep computed or found."""

    there: int = 0  #: cells that an earlier or another sweep computed
    statuses: Counter[str] = field(default_factory=Counter)  #: of cells computed now
    failures: list[tuple[str, str]] = field(default_factory=list)  #: cells with reasons

    @property
    def made(self) -> int:
        return self.statuses.total()


class Progress:
    """Reports what is done to a bar, with the rate and the number of failures."""

    def __init__(self, advance: Callable[[str, int], None]) -> None:
        self._advance, self._began_s = advance, time.monotonic()

    def __call__(self, job: Job, tally: Tally) -> None:
        seconds = time.monotonic() - self._began_s
        said = [f"{tally.made / seconds:.1f} cells/s"] if seconds > 0 and tally.made else []
        if tally.failures:
            said.append(f"{len(tally.failures)} failed")
        self._advance(", ".join([*said, job.name]), 1)


def local(workers: int) -> Pool:
    """Processes of this machine; 0 for this one alone, which then dies with a policy that does."""
    return lambda function, take: unfold(function, take, workers)


def fill(
    folder: Folder,
    jobs: Sequence[Job],
    compute: Callable[[Job], Made],
    pool: Pool,
    notice: Callable[[Job, Tally], None] = lambda job, tally: None,
) -> Tally:
    """Compute and write the cells that are not in the folder.

    Cells are locked while they are computed: those of other sweeps are waited for, and taken over
    if these end without them.  An interruption loses only what is being computed.
    """
    folder.clear()
    folder.arrange(jobs)
    waiting = deque(job for job in jobs if job not in folder)
    tally = Tally(there=len(jobs) - len(waiting))
    held: dict[str, tuple[Job, Lock]] = {}

    def take() -> Job:
        """The next cell that no other sweep computes, locked."""
        for _ in range(len(waiting)):
            job = waiting.popleft()
            try:
                lock = folder.lock(job)
            except Busy:
                waiting.append(job)
                continue
            if job in folder:  # another sweep was faster
                lock.release()
                tally.there += 1
                notice(job, tally)
                continue
            held[job.address] = job, lock
            return job
        raise LookupError

    def keep(job: Job, found: Made) -> None:
        folder.write(job, found)
        held.pop(job.address)[1].release()
        tally.statuses[found.status] += 1
        if found.status == WENT_WRONG:
            tally.failures.append((job.name, found.reason))
        notice(job, tally)

    try:
        while waiting:
            try:
                for job, found in pool(compute, take):
                    keep(job, found)
            except WorkerDied:  # one of the cells under way did it: each runs by itself
                for job, _ in list(held.values()):
                    keep(job, _alone(job, compute, pool))
                continue
            if waiting:  # others have the rest
                time.sleep(_LOOK_S)
    finally:
        for _, lock in held.values():
            lock.release()
    return tally


def _alone(job: Job, compute: Callable[[Job], Made], pool: Pool) -> Made:
    """A cell by itself in a process; a record of its failure if that dies."""
    try:
        ((_, found),) = pool(compute, deque([job]).popleft)
    except WorkerDied:
        return died(job)
    return found
