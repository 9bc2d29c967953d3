"""The basis of a run's numbers, its options apart: software, and the state of the device.

Traces, live runs, validations, calibrations and benchmarks all name them.  No name of a host, no
path and no serial number is among them.
"""

from __future__ import annotations

import platform
from typing import Any

import torch

from arborsim.core.installed import gpu_state, revision, versions
from arborsim_torch.cache.layout import Layout
from arborsim_torch.kernels.fused import choose_decode, choose_sdpa


def software(model: Any = None) -> dict[str, str]:
    """Versions that numbers depend on; of a model also the backend of PyTorch's attention.

    On CUDA also what reads shared prefixes in decode steps (`choose_decode`).

    CUDA and Triton are named where they can take part.
    """
    packages = ("torch", "transformers", "numpy")
    found = versions(*packages) | {"python": platform.python_version(), "torch": torch.__version__}
    if torch.cuda.is_available():
        found |= {"cuda": torch.version.cuda or "", **versions("triton")}
    if model is not None:
        head_dim = Layout.of(model).head_dim
        found["attention"] = choose_sdpa(model.device, model.dtype, head_dim).name
        if model.device.type == "cuda":
            found["decode attention"] = choose_decode(model.device, model.dtype, head_dim).name
    return {name: text for name, text in found.items() if text}


def conditions(device: torch.device) -> dict[str, str]:
    """Conditions that may change within a run: sources, driver, clocks, power limit.

    The revision is there when arborsim runs from a checkout, the others on CUDA.
    """
    found = {"revision": revision()}
    if device.type == "cuda":
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", "")
        found |= gpu_state(f"GPU-{uuid}" if uuid else str(device.index or 0))
    return {name: text for name, text in found.items() if text}


def all_facts(model: Any) -> dict[str, str]:
    """Both, for results that are made in one go."""
    return software(model) | conditions(model.device)
