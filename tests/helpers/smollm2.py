"""The language model that tests run on where it is installed."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from arborsim.core.errors import UsageError


def smollm2() -> Any:
    """SmolLM2-135M-Instruct, loaded once per process; skips, with the command, where it is not."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from arborsim_torch.gguf_models import NAMED, check_named

    try:
        check_named(NAMED["smollm2"])
    except UsageError as missing:
        pytest.skip(str(missing))
    return _loaded()


@functools.cache
def _loaded() -> Any:
    from arborsim_torch.models import load_model

    return load_model("smollm2")
