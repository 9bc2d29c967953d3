"""Import everything that the torch backend can use, and say as JSON what came of it.

`arborsim doctor` runs this as ``python -m arborsim_torch.probe``, in a process of its own: packages
with compiled parts fail in many ways when they were built for another version of torch.
"""

from __future__ import annotations

import importlib
import json
from importlib.metadata import PackageNotFoundError, version
from typing import Any

#: Distributions, and the modules that they are imported as.
MODULES = {
    "torch": "torch",
    "transformers": "transformers",
    "safetensors": "safetensors",
    "triton": "triton",
    "flash-attn": "flash_attn",
    "flashinfer-python": "flashinfer",
    "kaleido": "kaleido",
    "optuna": "optuna",
    "ray": "ray",
}


def probe() -> dict[str, Any]:
    """Find out what is broken, and what torch says of GPUs.

    Returns dict: ``broken``: reasons by distribution, of those that are installed but cannot be
    imported; ``backend``: why the backend cannot be loaded, or "".  ``cuda``: whether a GPU
    computed something.  ``cuda_failed``: why it did not, if torch saw one.  ``cuda_version`` that
    torch was built for.  ``gpus``: name and memory of each.  ``attention``: what computes it on the
    first GPU and why, by use.
    """
    installed = {name: module for name, module in MODULES.items() if _installed(name)}
    broken = {name: why for name, module in installed.items() if (why := _import(module))}
    found: dict[str, Any] = {"broken": broken, "backend": "", "cuda": False, "gpus": []}
    if "torch" in broken or "torch" not in installed:
        return found
    if not broken.keys() & {"transformers", "safetensors"} and "transformers" in installed:
        found["backend"] = _import("arborsim_torch.backend")
    found |= _gpus()
    if found["cuda"] and not found["backend"]:
        found["attention"] = _attention()
    return found


def _installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def _import(module: str) -> str:
    """Why a module cannot be imported, in a line; "" if it can."""
    try:
        importlib.import_module(module)
    except BaseException as error:  # compiled parts raise anything
        return f"cannot be imported ({_line(error)})"
    return ""


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:160]


def _gpus() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"cuda_version": torch.version.cuda or ""}
    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        properties = [torch.cuda.get_device_properties(i) for i in range(count)]
        found["gpus"] = [{"name": p.name, "memory_bytes": p.total_memory} for p in properties]
        if count:
            found["cuda"] = float(torch.ones(8, device="cuda").sum()) == 8.0
    except Exception as error:
        found["cuda_failed"] = _line(error)
    return found


def _attention() -> dict[str, str]:
    import torch

    from arborsim_torch.kernels.fused import choose, choose_decode

    where = torch.device("cuda", 0), torch.bfloat16, 128  # what most models have
    found = {}
    for use, chosen in (("prompts", choose), ("decode steps", choose_decode)):
        try:
            choice = chosen(*where)
            found[use] = f"{choice.name} ({choice.reason})"
        except Exception as error:
            found[use] = _line(error)
    return found


if __name__ == "__main__":
    print(json.dumps(probe()))
