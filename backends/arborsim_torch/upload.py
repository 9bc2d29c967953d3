"""Small tables of the host, on their way to the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def uploaded(table: np.ndarray, device: torch.device) -> Tensor:
    """A table as a tensor on the device; the host does not wait until the device gets to it.

    CUDA copies ordinary memory aside before the call returns, so the table may change afterwards;
    a copy that blocks would wait for everything that the device still computes.  On the CPU the
    tensor is the table.
    """
    return torch.from_numpy(table).to(device, non_blocking=True)
