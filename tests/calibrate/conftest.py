"""Tests of calibrations on the shipped model: one thread, the models are tiny."""

import pytest


@pytest.fixture
def one_thread():
    """PyTorch on one thread, and back afterwards; skips where PyTorch is missing."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
