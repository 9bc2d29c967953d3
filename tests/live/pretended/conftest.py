"""Where there is a GPU, nothing is pretended."""

import pytest

torch = pytest.importorskip("torch")
if torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
