"""Tests of rewards need PyTorch, and one thread: the models are tiny."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
torch.set_num_threads(1)
