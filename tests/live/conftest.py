"""Live tests need PyTorch, and one thread: the models are tiny."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from arborsim.cli.app import main

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
torch.set_num_threads(1)


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., str]]:
    """Give `record` bad options: it writes nothing but one line, which is returned."""
    out = tmp_path / "refused.parquet"

    def run(*options: str) -> str:
        capsys.readouterr()
        assert main(["record", "--out", str(out), *options]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1, error
        return error

    yield run
    assert not out.exists()
