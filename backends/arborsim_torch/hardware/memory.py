"""How much memory there is, and how much of it measurements may take."""

from __future__ import annotations

import os
from pathlib import Path

import torch

_SHARE = 0.25  # of what is free: other processes, and the pass itself, need some


def installed_bytes(device: torch.device) -> int:
    """Memory of a GPU, or of the host."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_bytes(device: torch.device) -> int:
    """What is free there now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:  # no Linux
        pass
    return installed_bytes(device) // 2


def sizes_that_fit(sizes: tuple[int, ...], copies: int, *devices: torch.device) -> tuple[int, ...]:
    """The sizes of which `copies` buffers are a small part of what is free; at least the first."""
    room = min(free_bytes(device) for device in devices) * _SHARE
    return tuple(size for i, size in enumerate(sizes) if i == 0 or copies * size <= room)
