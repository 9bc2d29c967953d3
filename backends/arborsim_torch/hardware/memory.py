"""How much memory there is, what measurements may take of it, and the error when it runs out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from arborsim.core.errors import UsageError

_SHARE = 0.25  # of what is free: other processes, and the pass itself, need some


def installed_bytes(device: torch.device) -> int:
    """Memory of a GPU, or of the host."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_bytes(device: torch.device | str) -> int | None:
    """Free memory of a GPU, or of the host; None where it is not known."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # no Linux
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def usable_bytes(device: torch.device) -> int:
    """Free memory of a GPU, or of the host: half of what is installed where it is not known."""
    free = free_bytes(device)
    return installed_bytes(device) // 2 if free is None else free


def sizes_that_fit(sizes: tuple[int, ...], copies: int, *devices: torch.device) -> tuple[int, ...]:
    """The sizes of which `copies` buffers are a small part of what is free; at least the first."""
    room = min(usable_bytes(device) for device in devices) * _SHARE
    return tuple(size for i, size in enumerate(sizes) if i == 0 or copies * size <= room)


@contextmanager
def memory_errors(said: Callable[[], UsageError]) -> Iterator[None]:
    """Raise what `said` returns where memory of the host or of a GPU runs out."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise said() from error
    except RuntimeError as error:
        if "not enough memory" not in str(error) and "can't allocate memory" not in str(error):
            raise
        raise said() from error
