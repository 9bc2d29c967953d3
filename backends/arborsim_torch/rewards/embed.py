"""Embeddings of thoughts by a sentence-transformers model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from arborsim.core.errors import UsageError
from arborsim.play.backends import ModelUsage
from arborsim_torch.checkpoint import check_files
from arborsim_torch.kernels.fused import pinned
from arborsim_torch.rewards.base import Account, check_weights

_OURS = "sentence_transformers."
#: What sentence-transformers raises on folders that are damaged in one way or another.
_BROKEN = (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError, RuntimeError)


class SentenceEmbedder:
    """An `arborsim_torch.rewards.base.Embedder` by a `SentenceTransformer` on its device."""

    def __init__(self, name: str, model: Any) -> None:
        self.name, self._model = name, model
        self.size = int(model.encode([""], convert_to_numpy=True).shape[1])
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        self._device = torch.device(model.device)
        self._account = Account("embed", name, weights, self._device)

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        with self._account.timed(texts), pinned(self._device, math=True):
            found = self._model.encode(list(texts), show_progress_bar=False, convert_to_numpy=True)
        return np.asarray(found, dtype=np.float16)  # as the trace stores them

    def usage(self) -> ModelUsage:
        return self._account.usage()


def check_embedder(folder: str) -> Path:
    """The folder of an embedding model; `UsageError` says what is missing."""
    option = f"--embed {folder}"
    path = check_files(option, folder, ("modules.json",), "a sentence-transformers model")
    try:
        kinds = [str(module["type"]) for module in json.loads((path / "modules.json").read_text())]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{option}: its modules.json cannot be read ({error})") from error
    foreign = [kind for kind in kinds if not kind.startswith(_OURS)]
    if foreign:
        raise UsageError(f"{option}: it needs code of its own ({foreign[0]}), which is not run")
    try:
        import sentence_transformers  # noqa: F401 (it takes seconds: only for who asks)
    except ImportError as error:
        raise UsageError(
            f"--embed needs {error.name or 'sentence-transformers'}, which is not installed: "
            "pip install 'arborsim[embed]'"
        ) from error
    return path


def load_embedder(folder: str, device: str) -> SentenceEmbedder:
    """A folder's sentence-transformers model; `UsageError`: it is none, or does not fit."""
    path = check_embedder(folder)
    from sentence_transformers import SentenceTransformer

    check_weights(f"--embed {folder}", path, device)
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    options["model_kwargs"] = {"use_safetensors": True}
    try:
        model = SentenceTransformer(str(path), device=device, **options)
        return SentenceEmbedder(path.name, model.eval())
    except (*_BROKEN, SafetensorError) as error:
        what = " ".join(str(error).split())[:300]
        raise UsageError(f"--embed {folder}: cannot be loaded: {what}") from error
