"""The reference models need torch and transformers; without them, skip."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def two_threads():
    """Keep the tests within two cores, and put the setting back."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(2, before))
    yield
    torch.set_num_threads(before)
