"""`arborsim observe` against a small server: what is measured is kept, and failures are lines."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from arborsim.cli.app import main
from arborsim.machine.lookup import load_engine, load_geometry, load_profile
from arborsim.machine.machine import ServingOptions
from arborsim.products.observe import run
from arborsim.products.observe.client import Answered
from arborsim.products.validate.published import ServedMachine
from arborsim.trace.importers.request_logs import read_requests

TOKEN_S = 0.001


class Server(BaseHTTPRequestHandler):
    """A model of a word a millisecond. The first part of the path says what goes wrong."""

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if "nothing" in self.path:
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "small"}]}' if "html" not in self.path else b"<html>")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        number = self.server.count = getattr(self.server, "count", 0) + 1  # type: ignore[attr-defined]
        kind = self.path.split("/")[1]
        if kind == "some" and number % 2:
            kind = "error"
        if kind == "error":
            self.send_error(503)
            return
        if kind == "redirect":
            self.send_response(302)
            self.send_header("Location", "http://192.0.2.1/")
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        if kind == "hang":
            time.sleep(3)
            return
        if kind == "text":
            self.wfile.write(b"data: hello\n\n")
            return
        time.sleep(2 * TOKEN_S)
        for _ in range(asked["max_tokens"]):
            self.say({"choices": [{"text": " w"}]})
            time.sleep(TOKEN_S)
            if kind == "closes":
                return
        usage = {"prompt_tokens": 20, "completion_tokens": asked["max_tokens"]}
        self.say({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def say(self, event: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.chdir(tmp_path)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


OPTIONS = "--loads 1,2 --requests 3 --prompt-tokens 20 --answer-tokens 5 --seconds 20"


def observe(url: str, more: str = "") -> int:
    return main(["observe", url, *OPTIONS.split(), *more.split()])


def test_a_log_and_an_engine_are_written(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert observe(f"{url}/fine/v1") == 0
    said = capsys.readouterr().out
    assert "6 requests of 2 loads, 0 failed" in said
    log = read_requests(Path("observed.jsonl"))
    assert [(each.prompt_tokens, each.answer_tokens) for each in log.searches] == 6 * [(20, 5)]
    assert sorted(each.other["clients"] for each in log.searches if each.other) == 3 * [1] + 3 * [2]
    engine = load_engine("observed.toml")
    assert engine.observed in said
    base = load_engine("vllm")
    for name in ("step_s", "sequence_s", "request_s"):  # what stayed as it was keeps its source
        ours = engine.source(name) == "fitted to arborsim observe (observed.jsonl)"
        assert ours != (getattr(engine, name) == getattr(base, name))
    assert engine.chunk_tokens == base.chunk_tokens
    assert main(["import", "requests", "observed.jsonl", "log.parquet"]) == 0
    assert observe(f"{url}/fine/v1") == 2  # the files are there
    assert "observed.jsonl exists" in capsys.readouterr().err


def test_what_was_measured_is_kept(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert observe(f"{url}/some/v1") == 0
    out, error = capsys.readouterr()
    assert "the endpoint answered 503" in error
    kept = len(read_requests(Path("observed.jsonl")).searches)
    assert f"{kept} requests" in out
    assert kept + error.count("answered 503") == 6


BROKEN = {
    "error": "the endpoint answered 503",
    "redirect": "the endpoint answered 302",
    "hang": "no answer within the time given (--seconds)",
    "closes": "the answer ended before its end",
    "text": "the answer is not JSON",
    "html": "/models holds no list of models",
    "nothing": "the connection failed",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_failures_are_a_line_each(kind: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    more = "--seconds 0.4" if kind == "hang" else ""
    assert observe(f"{url}/{kind}/v1", more) == 2
    error = capsys.readouterr().err
    assert BROKEN[kind] in error
    assert all(line.startswith("arborsim: ") for line in error.splitlines())
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    ("more", "named"),
    [("--loads 0", "--loads are numbers"), ("--seconds 0", "--seconds is a number"),
     ("--answer-tokens 1", "--answer-tokens is at least 2"), ("--key-env NO_SUCH", "no such env")],
)  # fmt: skip
def test_options_are_checked(more: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert observe("http://127.0.0.1:9/v1", more) == 2
    assert named in capsys.readouterr().err
    for address in ("127.0.0.1:8000", "ftp://127.0.0.1/v1"):
        assert observe(address) == 2
        assert "is no address" in capsys.readouterr().err


def test_a_fit_finds_the_constants_it_was_made_with() -> None:
    profile = load_profile("h100", engine="vllm")
    options = ServingOptions(preemption="recompute")
    machine = ServedMachine(profile, load_geometry("llama-3.1-8b"), options)
    true = {"step_s": 0.004, "sequence_s": 2e-4, "request_s": 0.02}
    measured = []
    for clients in (1, 4, 8):
        ttft_s, tpot_s = run._predicted(run._with(machine, true), 256, 32, clients, 8)
        measured += 8 * [Answered(0.0, clients, 256, 32, ttft_s, ttft_s + 31 * tpot_s)]
    fitted, found = run.fitted(measured, machine)
    assert found["step_s"] == pytest.approx(true["step_s"], rel=0.05)
    assert found["sequence_s"] == pytest.approx(true["sequence_s"], rel=0.1)
    assert found["request_s"] == pytest.approx(true["request_s"], rel=0.05)
    before, after = run.observed(measured, machine), run.observed(measured, fitted)
    assert all(abs(e) < 0.03 for each in after for e in each.errors)
    assert max(abs(e) for each in before for e in each.errors) > 0.2
