"""Fit the constants of inference engines to published serving runs: run it, copy what it prints.

    python benchmarks/fit_engines.py                         # all engines
    python benchmarks/fit_engines.py vllm trtllm-1.0
    python benchmarks/fit_engines.py vllm --also outside.csv --closed-form

Only runs on the fitted side of `ServingRun.fitted` are looked at, without odd ones; of another file
those whose identifier has an even third last digit.  First constants of the host are fitted to runs
of a single client, where there are several, then the others.  Where all runs queue, `request_s`
cannot be told from waiting and stays as it is.  What is least is the sum over runs of the absolute
logarithms of simulated over measured: of the time per output token, and a quarter of that of the
time to first token (a tenth where requests queue).

A run is played once a round.  Between, it is a closed form of the same kernels (a decode step, and
the prompts that arrive during it), scaled to what was played; each step replaces it by its
derivatives and solves a linear program.  Constants of a GPU of its own are shares of kernels alone:
the host does not know what GPU it launches them on.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog

from arborsim.core.errors import UsageError
from arborsim.machine.engine import EngineProfile
from arborsim.machine.forward import Forward, forward_of
from arborsim.machine.lookup import load_engine
from arborsim.products.validate.published import (
    LITTLE_QUEUEING,
    ServedMachine,
    engine_of,
    machine_of,
    oddness,
    play,
    profile_name,
)
from arborsim.products.validate.serving import ServingRun, read_runs

ROUNDS, STEPS = 2, 30
FIRST_TOKEN_WEIGHTS = 0.1, 0.25  # where requests queue, and where they do not
CHUNK = 8192
FACTOR = 2.0  # runs that are off by more at the start tell of something else than constants
MOST = 36  # runs of an engine, drawn with the seed: playing them takes its time
SEED = 0
B200 = "b200"
#: Constants with the least and the largest value, and a step for their derivatives.
CONSTANTS = {
    "step_s": (0.0, 2e-3, 1e-4), "sequence_s": (0.0, 1e-4, 2e-6), "layer_s": (0.0, 6e-5, 2e-6),
    "prefill_layer_s": (0.0, 3e-4, 1e-5), "request_s": (0.0, 0.06, 1e-3),
    "product_share": (0.8, 1.3, 0.02), "quantised_share": (0.8, 1.3, 0.02),
    "attention_share": (0.7, 1.3, 0.02), "expert_share": (0.5, 1.5, 0.02),
    "all_reduce_share": (0.5, 4.0, 0.02), "all_reduce_bytes_share": (0.5, 2.0, 0.02),
    "prefill_share": (1.0, 1.5, 0.02), "mxfp4_prompt_share": (0.8, 2.0, 0.02),
}  # fmt: skip
ALONE = ("request_s", "step_s", "prefill_layer_s")
SHARES = tuple(name for name in CONSTANTS if name.endswith("_share"))
Constants = Mapping[str, float]


class Played(NamedTuple):
    """A run as it was simulated; NaN where it could not be."""

    token_s: float
    first_s: float
    queues: float  # 1 if much of the time to first token is waiting for others, else 0


def with_constants(run: ServingRun, constants: Constants) -> ServedMachine:
    machine = machine_of(run)
    engine = replace(machine.profile.engine, **constants)  # type: ignore[type-var]
    return machine._replace(profile=replace(machine.profile, engine=engine))


def played(task: tuple[ServingRun, Constants]) -> Played:
    run, constants = task
    try:
        found = play(run, with_constants(run, constants))
    except UsageError:
        return Played(math.nan, math.nan, 1.0)
    return Played(found.tpot_s, found.ttft_s, float(found.queueing >= LITTLE_QUEUEING))


class Parts:
    """Seconds of the parts of runs in closed form, arrays ``[n]``: all shares 1 and constants 0."""

    def __init__(self, runs: list[ServingRun]) -> None:
        made = [_parts(run) for run in runs]
        self.of = {name: np.array([each[name] for each in made]) for name in made[0]}

    def seconds(self, c: Constants) -> tuple[np.ndarray, np.ndarray]:
        """Time per output token, and of the time to first token what is no constant."""
        of, given = self.of, {**dict.fromkeys(SHARES, 1.0), **c}

        def kernels(at: str) -> np.ndarray:
            products = of[f"products {at}"]
            for share in ("product_share", "quantised_share"):
                products = products * given[share] ** of[f"{share} {at}"]
            return np.asarray(products + experts(at))

        def experts(at: str) -> np.ndarray:
            return np.asarray(given["expert_share"] * of[f"experts {at}"])

        def others(at: str) -> np.ndarray:
            reduces = given["all_reduce_share"] * of[f"latencies {at}"]
            reduces = reduces + given["all_reduce_bytes_share"] * of[f"reduced bytes {at}"]
            return np.asarray(reduces + of[f"moves {at}"])

        clients, layers, share = of["clients"], of["layers"], given["prefill_share"]
        step_s = kernels("decode") + others("decode") + given["layer_s"] * layers
        narrow = of["mxfp4"] * share * (given["mxfp4_prompt_share"] - 1)  # of experts beyond that
        prompts = of["part"] / (of["part"] + clients)
        mixed_s = kernels("mixed") * (1 + (share - 1) * prompts) + others("mixed")
        mixed_s += narrow * prompts * experts("mixed")
        mixed_s += given["prefill_layer_s"] * layers
        token_s = step_s + given["step_s"] + given["sequence_s"] * clients
        token_s += given["attention_share"] * of["attention"]
        asked_s = share * of["prompt attention"] + of["parts"] * (mixed_s - step_s)
        token_s += (clients - 1) / of["outputs"] * asked_s
        prompt_s = share * (kernels("prompt") + of["prompt attention"]) + others("prompt")
        prompt_s += narrow * experts("prompt")
        return token_s, prompt_s + given["prefill_layer_s"] * layers + given["step_s"]


def _parts(run: ServingRun) -> dict[str, float]:
    machine = machine_of(run)
    profile, geometry, options = machine
    assert profile.engine is not None
    plain = {name: 1.0 if name in SHARES else 0.0 for name in CONSTANTS}

    def made(**given: float) -> Forward:
        engine = replace(profile.engine, **{**plain, **given})  # type: ignore[type-var]
        gpus = options.tensor_parallel, options.expert_parallel
        return forward_of(profile, engine, geometry, *gpus)

    own, clients, prompt = made(), run.concurrency, run.prompt_tokens
    part = min(prompt, CHUNK)
    found = {
        "clients": clients, "layers": geometry.layers, "outputs": run.output_tokens,
        "part": part, "parts": prompt / part, "mxfp4": float(geometry.expert_type == "mxfp4"),
        "attention": own.attention_s(clients, clients * (prompt + run.output_tokens / 2))
        + own.windows_s(clients),
        "prompt attention": own.prefill_attention_s(prompt, 0),
    }  # fmt: skip
    for at, tokens, ends in (
        ("decode", clients, clients), ("mixed", clients + part, clients + 1), ("prompt", prompt, 1)
    ):  # fmt: skip
        found[f"products {at}"] = seconds = own.products_s(tokens, ends)
        for share in ("product_share", "quantised_share"):
            longer = made(**{share: 1.1}).products_s(tokens, ends)
            found[f"{share} {at}"] = math.log(longer / seconds) / math.log(1.1)
        found[f"experts {at}"] = own.experts_s(tokens)
        twice, once = (made(**each).all_reduce_s(tokens, at != "decode")
                       for each in ({"all_reduce_share": 2.0}, {}))  # fmt: skip
        found[f"latencies {at}"], found[f"reduced bytes {at}"] = twice - once, 2 * once - twice
        found[f"moves {at}"] = own.elementwise_s(tokens)
    return found


def fit(
    pool: ProcessPoolExecutor | None, runs: list[ServingRun], start: Constants, others: Constants
) -> dict[str, float]:
    """The constants of `start` that fit the runs best, with `others` as they are.

    Without a pool no run is played: the closed form counts, for runs with few prompts.
    """
    runs = runs if pool else [run for run in runs if _has_few_prompts(run)]
    now, parts = dict(start), Parts(runs)
    measured = np.array([(run.tpot_ms, run.ttft_ms) for run in runs]) / 1e3

    def all_played() -> np.ndarray:
        if pool is None:
            token_s, prompt_s = parts.seconds({**others, **now})
            waits = np.array([run.concurrency > 1 for run in runs], dtype=float)
            return np.stack([token_s, prompt_s + {**others, **now}["request_s"], waits], axis=1)
        return np.array(list(pool.map(played, [(run, {**others, **now}) for run in runs])))

    for _ in range(ROUNDS):
        exact = all_played()
        _say(exact, measured, now)
        if exact[:, 2].all() and "request_s" in now:
            others = {**others, "request_s": now.pop("request_s")}
        errors = _errors_near(parts, exact, measured, {**others, **now})
        for _ in range(STEPS):
            now, gained = _improved(now, errors)
            if gained < 1e-4:
                break
    _say(all_played(), measured, now)
    return now


def _has_few_prompts(run: ServingRun) -> bool:
    """Whether the closed form is near what is played, within 5% or so."""
    few = run.prompt_tokens * run.concurrency <= 200 * run.output_tokens
    return few and run.concurrency <= 64


def _errors_near(
    parts: Parts, exact: np.ndarray, measured: np.ndarray, at: Constants
) -> Callable[[Constants], np.ndarray]:
    """Weighted errors by constants, where the runs were played with the constants `at`."""
    token_s, prompt_s = parts.seconds(at)
    ratios = exact[:, 0] / token_s, (exact[:, 1] - at["request_s"]) / prompt_s
    near = np.abs(np.log(exact[:, 0] / measured[:, 0])) < math.log(FACTOR)
    weight = np.where(exact[:, 2] > 0, *FIRST_TOKEN_WEIGHTS)

    def errors(constants: Constants) -> np.ndarray:
        given = {**at, **constants}
        token_s, prompt_s = parts.seconds(given)
        token = np.log(token_s * ratios[0] / measured[:, 0])
        first = np.log((prompt_s * ratios[1] + given["request_s"]) / measured[:, 1])
        return np.concatenate([token[near], (weight * first)[near]])

    return errors


def _improved(
    now: dict[str, float], errors: Callable[[Constants], np.ndarray]
) -> tuple[dict[str, float], float]:
    """Constants a step better, and by how much of the error."""
    found = errors(now)
    slopes = []
    for name, value in now.items():
        _, high, step = CONSTANTS[name]
        step = step if value + step <= high else -step
        slopes.append((errors({**now, name: value + step}) - found) / step)
    matrix = np.array(slopes).T
    known = np.isfinite(found) & np.isfinite(matrix).all(axis=1)
    rows, size = matrix[known], len(now)
    one = np.eye(len(rows))
    room = [(CONSTANTS[n][0] - v, CONSTANTS[n][1] - v) for n, v in now.items()]
    solved = linprog(
        np.r_[np.zeros(size), np.ones(len(rows))],
        A_ub=np.block([[rows, -one], [-rows, -one]]),
        b_ub=np.r_[-found[known], found[known]],
        bounds=[*room, *[(0, None)] * len(rows)],
    )
    least = float(np.nansum(np.abs(found)))
    for share in (1.0, 0.5, 0.25):
        tried = {
            n: float(np.clip(v + share * d, *CONSTANTS[n][:2]))
            for (n, v), d in zip(now.items(), solved.x[:size], strict=True)
        }
        total = float(np.nansum(np.abs(errors(tried))))
        if total < least:
            return tried, (least - total) / least
    return now, 0.0


def _say(exact: np.ndarray, measured: np.ndarray, constants: Constants) -> None:
    token, first = (exact[:, :2] / measured - 1).T
    shown = {name: float(f"{value:.3g}") for name, value in constants.items()}
    print(
        f"# {len(exact)} runs, token {np.nanmedian(np.abs(token)):.1%} "
        f"{np.nanquantile(np.abs(token), 0.9):.1%}, bias {np.nanmedian(token):+.1%}, first "
        f"{np.nanmedian(np.abs(first)):.1%}, {np.sum(exact[:, 2] == 0)} do not queue: {shown}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engines", nargs="*")
    parser.add_argument("--also", type=Path, help="another file of runs")
    parser.add_argument("--closed-form", action="store_true", help="play no run: in a minute")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    every = [run for run in read_runs() if run.fitted]
    if options.also:
        every += [run for run in read_runs(options.also) if int(run.id[-3], 16) % 2 == 0]
    every = [r for r in every if not oddness(r)]
    by_engine: dict[str, list[ServingRun]] = {}
    for run in every:
        by_engine.setdefault(engine_of(run), []).append(run)
    with nullcontext() if options.closed_form else ProcessPoolExecutor(options.jobs) as pool:
        for name in options.engines or sorted(by_engine):
            runs, engine = by_engine[name], load_engine(name)
            older, newer = (
                _drawn([run for run in runs if (profile_name(run.gpu) == B200) == new])
                for new in (False, True)
            )
            kinds = {
                "product_share": any(run.weights == "bfloat16" for run in runs),
                "quantised_share": any(run.weights != "bfloat16" for run in runs),
                "expert_share": any(machine_of(run).geometry.experts for run in runs),
                "mxfp4_prompt_share": any(
                    machine_of(run).geometry.expert_type == "mxfp4" for run in runs
                ),
            }
            print(f"{name}: {len(older)} and {len(newer)} runs", flush=True)
            base = _start(engine, [each for each in CONSTANTS if kinds.get(each, True)])
            alone = [run for run in older if run.concurrency == 1]
            single = {}
            if len({run.prompt_tokens for run in alone}) > 1:
                single = fit(pool, alone, {each: base.pop(each) for each in ALONE}, base)
            base = {**fit(pool, older, base, single), **single}
            _show(base)
            if newer:
                print(f"[gpus.{B200}]")
                shares = [each for each in SHARES if kinds.get(each, True)]
                _show(fit(pool, newer, _start(engine.on(B200), shares), base))


def _drawn(runs: list[ServingRun]) -> list[ServingRun]:
    """At most `MOST` of the runs, those of a single client first."""
    drawn = np.random.default_rng(SEED).permutation(len(runs)).tolist()
    return sorted((runs[n] for n in drawn), key=lambda run: run.concurrency > 1)[:MOST]


def _start(engine: EngineProfile, names: list[str]) -> dict[str, float]:
    return {name: float(np.clip(getattr(engine, name), *CONSTANTS[name][:2])) for name in names}


def _show(constants: Constants) -> None:
    for name, value in constants.items():
        print(f"{name} = {value:.4g}", flush=True)


if __name__ == "__main__":
    main()
