"""A model that cannot be recorded is refused at once, with what is missing and what to do."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from arborsim.core.errors import UsageError
from arborsim_torch.checkpoint import FAMILIES, _reachable, check_checkpoint
from tests.live.tiny import save_tiny


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("made"))


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(made, tmp_path / "model"))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No network, and an empty cache of the hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def without(*names: str) -> Callable[[Path], None]:
    def break_it(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return break_it


def sharded(folder: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


def gguf(folder: Path) -> None:
    (folder / "config.json").rename(folder / "model-q4.gguf")


def one_below(folder: Path) -> None:
    (folder / "checkpoint-5").mkdir()
    (folder / "config.json").rename(folder / "checkpoint-5" / "config.json")


def torn(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')


def of_family(kind: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.json").write_text(json.dumps({"model_type": kind}))  # type: ignore[return-value]


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "no tokenizer": (without("tokenizer.json"), r"no tokenizer.*tokenizer\.json.*save_pretrained"),
    "no weights": (
        without("model.safetensors"),
        r"no weights.*finish the download.*config:.* has random",
    ),
    "a shard": (sharded, r"1 of the 2 files.*model-00002-of-00002.*finish the download"),
    "pickled": (pickled, r"pickled weights can run code"),
    "no config": (without("config.json"), r"no config\.json: give the folder"),
    "adapter": (adapter, r"LoRA.*merge_and_unload"),
    "gguf": (gguf, r"GGUF: --model \S+/model-q4\.gguf"),
    "below": (one_below, r"checkpoint-5 has: --model .*checkpoint-5"),
    "torn": (torn, r"config\.json cannot be read as JSON"),
    "gpt2": (of_family("gpt2"), r"the gpt2 family is not supported; supported: .*llama.*qwen3"),
    "gpt-oss": (of_family("gpt_oss"), r"gpt_oss family is not supported \(its attention sinks.*"),
    "no family": (of_family(""), r"no model_type"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_missing_is_named(name: str, folder: Path) -> None:
    break_it, message = BROKEN[name]
    check_checkpoint(str(folder))  # whole, it is fine
    break_it(folder)
    with pytest.raises(UsageError, match=message) as error:
        check_checkpoint(str(folder))
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)


def test_a_file_is_no_folder(folder: Path) -> None:
    with pytest.raises(UsageError, match="that is a file: give the folder"):
        check_checkpoint(str(folder / "config.json"))


@pytest.mark.parametrize(
    ("model", "geometry"),
    [
        ("meta-llama/Llama-3.1-8B", "config:llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "config:llama-3.1-8b"),
        ("Qwen/Qwen3-8B", "config:qwen3-8b"),
        ("someone/their-own-model", ""),
    ],
)
def test_ids_without_network_suggest_the_geometry(model: str, geometry: str, offline: Path) -> None:
    with pytest.raises(UsageError, match=f"hf download {model} --local-dir") as error:
        check_checkpoint(model)
    assert str(offline) in str(error.value)
    assert ("config:" in str(error.value)) == bool(geometry)
    assert geometry in str(error.value)


def test_ids_in_the_cache_need_no_network(
    made: Path, offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = offline / "models--someone--tiny"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc")
    snapshot = Path(shutil.copytree(made, kept / "snapshots" / "abc"))
    check_checkpoint("someone/tiny")
    (snapshot / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match="no tokenizer"):
        check_checkpoint("someone/tiny")
    monkeypatch.setattr("arborsim_torch.checkpoint._reachable", lambda: True)
    check_checkpoint("someone/tiny")  # the rest is fetched


@pytest.fixture
def server() -> Iterator[str]:
    """Something that answers, if only that it knows nothing."""

    class Refuse(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refuse) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


def test_any_answer_of_the_hub_will_do(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("HF_ENDPOINT", server)
    assert _reachable()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    assert not _reachable()


def test_nothing_heavy_is_imported_to_refuse(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").unlink()
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "w3"}\n')
    for model, message in ((folder, "no tokenizer"), (tmp_path / "none", "no such folder")):
        arguments = ["record", "--model", str(model), "--prompts", str(prompts),
                     "--out", str(tmp_path / "t.parquet")]  # fmt: skip
        code = (
            "import sys\nfrom arborsim.cli.app import main\n"
            f"code = main({arguments!r})\n"
            "print(code, 'torch' in sys.modules, 'transformers' in sys.modules)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        assert message in done.stderr
        assert done.stdout.split() == ["2", "False", "False"]


def test_families_are_those_of_transformers() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert set(FAMILIES) <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
