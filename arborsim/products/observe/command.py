"""`arborsim observe`: measure an endpoint, write a log and an engine fitted to it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated

from arborsim.core.errors import UsageError
from arborsim.products.declare import Option, Positive, Written
from arborsim.report.words import plain

_MOST_SHOWN = 10


def observe(
    url: str,
    *,
    log: Written = Path("observed.jsonl"),
    engine_out: Written = Path("observed.toml"),
    served: Annotated[str, Option(shown="the first one")] = "",
    loads: str = "1,4,16",
    requests: Positive = 32,
    prompt_tokens: Positive = 512,
    answer_tokens: Positive = 64,
    seconds: float = 120.0,
    key_env: Annotated[str, Option(shown="no key")] = "",
    model: Annotated[str, Option(complete="model")] = "llama-3.1-8b",
    gpu: Annotated[str, Option(complete="gpu")] = "h100",
    engine: Annotated[str, Option(complete="engine")] = "vllm",
    overwrite: bool = False,
) -> None:
    """Measure an OpenAI-compatible endpoint, and how far predictions are off there.

    Only this address is asked, for a bounded number of requests and seconds. The log can be
    imported, and plans take the engine.

    Parameters
    ----------
    url
        The address up to /v1, such as http://127.0.0.1:8000/v1.
    log
        Write a line for each request.
    engine_out
        Write an engine fitted to what was measured.
    served
        Name by which the model is served.
    loads
        Numbers of clients, each with one request at a time.
    requests
        Requests of each load.
    prompt_tokens
        Length of the prompts, about: the endpoint's count stands in the log.
    answer_tokens
        Length of the answers.
    seconds
        Time for all of it, at most.
    key_env
        Environment variable with the key that the endpoint wants.
    model
        The model that is predicted: a name, or a config.json.
    gpu
        The GPU that is predicted.
    engine
        The engine that is predicted, and that the fitted one is based on.
    overwrite
        Replace the files.
    """
    from arborsim.machine.lookup import load_geometry, load_profile
    from arborsim.machine.machine import ServingOptions
    from arborsim.products.observe import client, run
    from arborsim.products.validate.published import ServedMachine

    if not 0 < seconds < 86_400:
        raise UsageError("--seconds is a number above 0, at most a day")
    numbers = {int(each) if each.strip().isdecimal() else 0 for each in loads.split(",")}
    if not all(0 < each <= 1024 for each in numbers):
        raise UsageError("--loads are numbers of clients from 1 to 1024, such as 1,4,16")
    if answer_tokens < 2:
        raise UsageError(
            "--answer-tokens is at least 2: times per token are of those after the first"
        )
    if key_env and key_env not in os.environ:
        raise UsageError(f"--key-env {key_env:.40}: there is no such environment variable")
    for path in (log, engine_out):
        if path.exists() and not overwrite:
            raise UsageError(f"{path} exists: choose another name, or --overwrite")
    profile = load_profile(gpu, engine=engine)
    machine = ServedMachine(profile, load_geometry(model), ServingOptions(preemption="recompute"))
    endpoint = client.Endpoint(url, served, os.environ.get(key_env, "") if key_env else "")
    try:
        name = served or endpoint.served(time.monotonic() + min(seconds, 10.0))
    except client.Failed as error:
        raise UsageError(f"{url:.60}: {plain(str(error))}") from None
    endpoint = client.Endpoint(url, name, endpoint.key)
    asked = client.Asked(sorted(numbers), requests, prompt_tokens, answer_tokens, seconds)
    answered, failures = client.measure(endpoint, asked)
    for failure in failures[:_MOST_SHOWN]:
        print(f"arborsim: {plain(failure)}", file=sys.stderr)
    if len(failures) > _MOST_SHOWN:
        print(f"arborsim: and {len(failures) - _MOST_SHOWN} more", file=sys.stderr)
    if not answered:
        raise UsageError(f"{url:.60}: no request was answered; nothing was written")
    run.write_log(log, answered)
    before = run.observed(answered, machine)
    print(f"wrote {log}: {len(answered)} requests of {len(before)} loads, {len(failures)} failed")
    if not before:
        raise UsageError("no answer had two tokens or more: no engine was fitted")
    fitted, constants = run.fitted(answered, machine)
    after = run.observed(answered, fitted)
    said = (
        f"On {sum(each.requests for each in before)} requests at {len(before)} loads, predictions "
        f"of {profile.name} with {engine} were off by {run.off(before)}; as fitted to the same "
        f"requests, by {run.off(after)}."
    )
    run.write_engine(engine_out, engine, constants, said, log.name)
    print("clients  requests   TTFT, ms (predicted, fitted)    TPOT, ms (predicted, fitted)")
    for old, new in zip(before, after, strict=True):
        first = f"{1e3 * old.ttft_s:8.1f} ({1e3 * old.predicted_ttft_s:.1f}, "
        first += f"{1e3 * new.predicted_ttft_s:.1f})"
        later = f"{1e3 * old.tpot_s:8.2f} ({1e3 * old.predicted_tpot_s:.2f}, "
        later += f"{1e3 * new.predicted_tpot_s:.2f})"
        print(f"{old.clients:7d}  {old.requests:8d}  {first:30s}  {later}")
    print(said)
    if all(each.predicted_tpot_s > 1.05 * each.tpot_s for each in after):
        print(
            f"It answers faster than {gpu} can with {model}: name what serves with --gpu, --model"
        )
    print(f'wrote {engine_out}: name it in a workload, [serving] engine = "{engine_out}"')
