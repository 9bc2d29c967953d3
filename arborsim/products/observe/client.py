"""Measure an OpenAI-compatible endpoint: a few clients, each with one request at a time.

Only the address that was given is asked: redirects are not followed.  Requests and seconds are
bounded, and a request that fails is a line, not an end: what was measured before is kept.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from arborsim.core.errors import UsageError

#: Failures of one load after which the endpoint is left alone.
MOST_FAILURES = 3
_MOST_LINE_BYTES = 1 << 20


class Failed(Exception):
    """Why a request has no answer, in words."""


@dataclass(frozen=True)
class Endpoint:
    """Where a model is served, and how it is asked."""

    url: str
    model: str = ""  # the name it is served by
    key: str = field(default="", repr=False)

    def connect(self, timeout_s: float) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        kinds: dict[str, type[http.client.HTTPConnection]] = {
            "http": http.client.HTTPConnection,
            "https": http.client.HTTPSConnection,
        }
        try:
            if not parts.hostname:
                raise ValueError
            return kinds[parts.scheme](parts.hostname, parts.port, timeout=timeout_s)
        except (KeyError, ValueError):
            raise UsageError(
                f"{self.url:.60} is no address: give one such as http://127.0.0.1:8000/v1"
            ) from None

    def ask(self, method: str, path: str, body: Any, deadline_s: float) -> Iterator[bytes]:
        """The lines of an answer until the deadline of `time.monotonic`, or `Failed`."""
        connection = self.connect(max(0.05, deadline_s - time.monotonic()))
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        try:
            at = urlsplit(self.url).path.rstrip("/") + path
            connection.connect()
            socket = connection.sock  # which the response keeps where the connection lets it go
            connection.request(method, at, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise Failed(f"the endpoint answered {response.status} {response.reason:.40}")
            while line := response.readline(_MOST_LINE_BYTES):
                if time.monotonic() > deadline_s:
                    raise TimeoutError
                yield line
                socket.settimeout(max(0.05, deadline_s - time.monotonic()))
        except TimeoutError:
            raise Failed("no answer within the time given (--seconds)") from None
        except (OSError, http.client.HTTPException) as error:
            raise Failed(f"the connection failed ({type(error).__name__})") from None
        finally:
            connection.close()

    def served(self, deadline_s: float) -> str:
        """The name of the first model it serves, or `Failed`."""
        try:
            found = json.loads(b"".join(self.ask("GET", "/models", None, deadline_s)))
            return str(found["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise Failed("/models holds no list of models: name one with --served") from None


@dataclass(frozen=True)
class Answered:
    """A request and its times, seconds."""

    at_s: float  # since the measurement began
    clients: int  # the load
    prompt_tokens: int
    answer_tokens: int
    ttft_s: float
    e2e_s: float

    @property
    def tpot_s(self) -> float:
        """Seconds of each token after the first; NaN for an answer of one."""
        more = self.answer_tokens - 1
        return (self.e2e_s - self.ttft_s) / more if more else float("nan")

    def row(self) -> dict[str, Any]:
        """A line of the log, which `arborsim import requests` reads as Mooncake's."""
        return {
            "timestamp": round(1e3 * self.at_s, 3),
            "input_length": self.prompt_tokens,
            "output_length": self.answer_tokens,
            "clients": self.clients,
            "ttft_s": round(self.ttft_s, 6),
            "e2e_s": round(self.e2e_s, 6),
        }


@dataclass(frozen=True)
class Asked:
    """Loads to measure, and the bounds on them."""

    loads: Sequence[int]
    requests: int  # of each load
    prompt_tokens: int
    answer_tokens: int
    seconds: float  # of all loads together


def measure(endpoint: Endpoint, asked: Asked) -> tuple[list[Answered], list[str]]:
    """All loads, one after the other: what was answered, and why the rest was not."""
    begun = time.monotonic()
    answered: list[Answered] = []
    failures: list[str] = []
    for load in asked.loads:
        if time.monotonic() - begun >= asked.seconds:
            failures.append(f"{load} clients were not tried: the time is over (--seconds)")
            continue
        one = _Load(endpoint, asked, load, begun)
        threads = [threading.Thread(target=one.client, daemon=True) for _ in range(load)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        answered += one.answered
        failures += one.failures
    return answered, failures


class _Load:
    """Clients of one load, who share the number of requests."""

    def __init__(self, endpoint: Endpoint, asked: Asked, clients: int, begun: float) -> None:
        self.endpoint, self.asked, self.clients, self.begun = endpoint, asked, clients, begun
        self.answered: list[Answered] = []
        self.failures: list[str] = []
        self._left, self._lock = asked.requests, threading.Lock()

    def client(self) -> None:
        while (number := self._next()) is not None:
            try:
                found = self._request(number)
            except Failed as error:
                with self._lock:
                    self.failures.append(f"{self.clients} clients, request {number}: {error}")
            else:
                with self._lock:
                    self.answered.append(found)

    def _next(self) -> int | None:
        over = time.monotonic() - self.begun >= self.asked.seconds
        with self._lock:
            if over or not self._left or len(self.failures) >= MOST_FAILURES:
                return None
            self._left -= 1
            return self.asked.requests - self._left - 1

    def _request(self, number: int) -> Answered:
        body = {
            "model": self.endpoint.model,
            "prompt": self._prompt(number),
            "stream": True,
            "max_tokens": self.asked.answer_tokens,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }
        at, deadline = time.monotonic(), self.begun + self.asked.seconds
        first = last = float("nan")
        chunks, ended = 0, False
        usage: dict[str, Any] = {}
        for line in self.endpoint.ask("POST", "/completions", body, deadline):
            said = line.strip().removeprefix(b"data:").strip()
            if not said or said == b"[DONE]" or line.startswith((b":", b"event:")):
                ended |= said == b"[DONE]"
                continue
            event = _event(said)
            usage = event.get("usage") or usage
            choices = event.get("choices") or [{}]
            ended |= bool(choices[0].get("finish_reason"))
            if choices[0].get("text"):
                last = time.monotonic()
                first = last if not chunks else first
                chunks += 1
        if not ended or not chunks:
            raise Failed("the answer ended before its end" if chunks else "an answer without text")
        prompt = usage.get("prompt_tokens", self.asked.prompt_tokens)
        answer = usage.get("completion_tokens", chunks)
        if not all(isinstance(each, int) and each > 0 for each in (prompt, answer)):
            raise Failed("an answer whose usage is no number of tokens")
        return Answered(at - self.begun, self.clients, prompt, answer, first - at, last - at)

    def _prompt(self, number: int) -> str:
        """Words that no other request begins with: no cache of prefixes can help."""
        rng = np.random.default_rng((self.clients, number))
        return " ".join(str(each) for each in rng.integers(0, 10, self.asked.prompt_tokens // 2))


def _event(said: bytes) -> dict[str, Any]:
    try:
        found = json.loads(said)
    except ValueError:
        raise Failed("the answer is not JSON: is it an OpenAI-compatible endpoint?") from None
    choices = found.get("choices", []) if isinstance(found, dict) else None
    if not isinstance(choices, list) or not all(isinstance(each, dict) for each in choices):
        raise Failed("the answer is no stream of completions")
    if isinstance(found.get("error"), dict):
        raise Failed(f"the endpoint says {found['error'].get('message')!s:.60}")
    if not isinstance(found.get("usage") or {}, dict):
        raise Failed("an answer whose usage is no object")
    return dict(found)
