"""`arborsim.record`: searches of a live model as a trace."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.outputs import output_path
from arborsim.core.settings import whole_number
from arborsim.products import choices
from arborsim.products.choices import Settings
from arborsim.products.declare import (
    AnyPath,
    Count,
    InPython,
    Option,
    Options,
    Positive,
    Silent,
    call,
    equivalent,
    listed,
    setting_texts,
)
from arborsim.products.record.problems import RewardedProblems, search_fields, split_settings

if TYPE_CHECKING:
    from arborsim.play.backends import LayerChoice, RecordProgress
    from arborsim.products.traces.ask import Trace
    from arborsim.searches.arms import Recipe


@dataclass(frozen=True, kw_only=True)
class CaptureOptions(Options, panel="What is stored"):
    """The signals that a trace holds of a search.

    Parameters
    ----------
    capture
        tree, signals or qkv.
    attention
        auto: whole rows for paths up to 4096 tokens, dense or sparse for all.
    attention_top
        Positions per sparse row.
    qkv_layers
        Layers of --capture qkv, e.g. 2,3, or all.
    attention_layers
        Also store these layers' own rows, mean and variance over heads: 2,3 or all.
    hidden_layers
        Also store the outputs of these layers, 2 bytes per number: 2,3 or all.
    """

    capture: Annotated[
        Literal["tree", "signals", "qkv"] | None,
        Option(shown="signals; of a bank: tree and embeddings"),
    ] = None
    attention: Literal["auto", "dense", "sparse"] = "auto"
    attention_top: Positive = 256
    qkv_layers: str | Sequence[int] = ""
    attention_layers: str | Sequence[int] = ""
    hidden_layers: str | Sequence[int] = ""


@dataclass(frozen=True, kw_only=True)
class BankOptions(Options, panel="Banks (for arborsim search)"):
    """A tree that several searches can be run on later.

    Parameters
    ----------
    bank
        Grow a tree that searches can be run on later, instead of running --search.
    children
        Children per node, or per depth: 8 or 64,16,8.
    depth
        Levels of the tree.
    algorithms
        Record what these policies read, e.g. h2o,arkv. With --bank, grow only what these searches
        ask for, e.g. rebase,ets or all.
    widths
        Widths of --for.
    batch
        Problems recorded together. With --bank thoughts drawn at once.
    """

    bank: bool = False
    children: str | int | Sequence[int] = ""
    depth: Annotated[Count, Option(shown="one per entry of --children")] = 0
    algorithms: Annotated[str | Sequence[str], Option("for", complete="algorithm")] = ""
    widths: Annotated[str | int | Sequence[int], Option("width", shown="16")] = ""
    batch: Annotated[Count, Option(shown="1, 256")] = 0


@dataclass(frozen=True)
class RecordOptions(CaptureOptions, BankOptions, RewardedProblems):
    """Run searches on a live model and record them.

    Needs the extra torch. Ctrl-C stops after the last whole episode, leaves a valid trace, and
    exits with code 130.

    Parameters
    ----------
    out
        The trace to make.
    overwrite
        Replace the file.
    resume
        Go on after an interruption.
    settings
        An option of the search, name=value. Repeatable.
    teacher_forced
        Record tokens that any engine generated: JSON lines, each {"prompt": ..., "tokens": ...},
        text or ids, and if known "thoughts" (their ends) and "correct".
    search
        {algorithms}, or package.module:Class.
    progress
        Show progress on standard error.

    Returns
    -------
    Trace

    Examples
    --------
    >>> import arborsim
    >>> trace = arborsim.record("mine.parquet", task="chain", episodes=2)  # doctest: +SKIP
    """

    out: Annotated[AnyPath, Option(writes=True, named=True)]
    _: KW_ONLY
    overwrite: Silent = False
    resume: Silent = False
    settings: Annotated[Settings, Option(panel="Search and rewards")] = ()
    teacher_forced: Annotated[AnyPath | None, Option(panel="Problems and model")] = None
    search: Annotated[str, Option(complete="algorithm", panel="Search and rewards")] = "linear"
    progress: InPython = False

    def results(self) -> Trace:
        """Record everything."""
        from arborsim.products.traces.ask import Trace

        recording = Recording(self)
        recording.run()
        return Trace(recording.request.out)


record = call("record", RecordOptions)


class Recording:
    """A recording that was asked for, checked."""

    def __init__(self, options: RecordOptions) -> None:
        from arborsim.play.backends import RecordProgress, RecordRequest

        # A recording is a line unless a search is named, whatever the task.
        given = self._options = replace(options, search=options.search or "linear")
        texts = setting_texts(given.settings)
        if given.teacher_forced is not None:
            _check_forced(given)
        recipe = _recipe(given, texts)
        found = search_fields(given)
        if given.bank and given.temperature is None:
            found["temperature"] = 1.0
        own: dict[str, str] = {}
        if not given.bank:
            own, unknown = split_settings(texts, given.search, ())
            own |= dict(map(choices.assigned, unknown))  # the search refuses them by name
        forced, out = given.teacher_forced, output_path(given.out)
        if out.exists() and not (given.overwrite or given.resume):
            raise UsageError(f"{out} exists: choose another --out, or --overwrite or --resume")
        stored = stored_fields(given, "tree" if given.bank else "signals")
        if given.algorithms and not given.bank:
            stored |= _stored_for(given)
        self.request = RecordRequest(
            **found,
            **stored,
            out=out,
            search_options=own,
            bank=recipe,
            teacher_forced=None if forced is None else Path(forced),
            batch=1 if given.bank else max(1, given.batch),
            overwrite=given.overwrite,
            resume=given.resume,
            command=equivalent("record", given),
        )
        #: How far it is.
        self.seen = RecordProgress(0, 0, 0, 0, 0, 0.0)

    def run(self) -> None:
        """Record. An interruption leaves the whole episodes, which `seen` counts."""
        from arborsim.play.backends import get_backend
        from arborsim.report.progress import LiveBar

        backend = get_backend("torch")

        def see(seen: RecordProgress, show: Callable[..., None] | None = None) -> None:
            if show is not None and seen.about != self.seen.about:
                print(seen.about, file=sys.stderr)
            self.seen = seen
            if show is not None:
                show(self.described(), completed=seen.episode, total=seen.episodes)

        if not self._options.progress:
            self.seen = backend.record(self.request, see)
            return
        with LiveBar("loading the model", time_left=True) as bar:
            self.seen = backend.record(self.request, lambda seen: see(seen, bar.show))

    def described(self) -> str:
        """Accuracy so far (of a bank: problems that some thought solves) and speed, in words."""
        seen, bank = self.seen, self.request.bank is not None
        verdict = f"{seen.correct}/{seen.judged} {'solvable' if bank else 'correct'}, "
        thoughts = f"{seen.thoughts} thoughts, " if bank else ""
        if not seen.tokens and 0 < seen.episode == seen.episodes:
            return "all of them there before"
        speed = f"{seen.tokens} tokens, {seen.tokens_per_s:.0f} tokens/s"
        return f"{verdict if seen.judged else ''}{thoughts}{speed}"


def _stored_for(given: RecordOptions) -> dict[str, Any]:
    """The signals that serve the policies of --for."""
    from arborsim.play.backends import captured_for
    from arborsim.policies.registry import build
    from arborsim.searches import search_names

    for name in ("capture", "attention_layers", "hidden_layers"):
        if getattr(given, name):
            flag = name.replace("_", "-")
            raise UsageError(f"--for says what is stored: leave out --{flag}, or --for")
    layers = _layers("--qkv-layers", given.qkv_layers) or "all"
    for name in choices.names(given.algorithms):
        if name in (*search_names(), "all"):
            raise UsageError(f"--for {name} is about banks: add --bank, or name policies")
    chosen = choices.ChosenPolicies(given.algorithms, oracle=False)
    return captured_for([build(name) for name in chosen.names], layers)


def _check_forced(given: RecordOptions) -> None:
    """Refuse what contradicts given tokens."""
    contradicting = {
        "--prompts": given.prompts is not None,
        "--bank": given.bank,
        "--search": given.search != "linear",
        "--temperature": given.temperature is not None,
        "--top-p": given.top_p < 1,
        "--max-tokens": given.max_tokens > 0,
        "--reward": bool(given.reward),
    }
    for name, value in contradicting.items():
        if value:
            raise UsageError(f"--teacher-forced records tokens as they are: leave out {name}")
    if given.batch:
        raise UsageError("--teacher-forced computes one chain after the other: leave out --batch")


def _recipe(given: RecordOptions, settings: list[str]) -> Recipe | None:
    """The tree to grow. None unless a bank was asked for."""
    from arborsim.searches.arms import BATCH, Recipe, recipe_for

    if not given.bank:
        for each in ("children", "depth", "widths"):
            if getattr(given, each):
                name = {"widths": "width"}.get(each, each)
                raise UsageError(f"--{name} is about banks: add --bank, or leave it out")
        return None
    _check_bank(given, settings)
    batch = given.batch or BATCH
    if given.algorithms:
        found = list(dict.fromkeys(choices.whole_numbers(given.widths or 16, "--width")))
        named = choices.names(given.algorithms)
        return recipe_for(named, found, settings, not given.keep_duplicates, batch)
    counts = tuple(choices.whole_numbers(given.children, "--children"))
    if len(counts) == 1 and given.depth == 0:
        raise UsageError(f"--children {counts[0]} needs --depth, e.g. --depth 3")
    recipe = Recipe(children=counts, depth=given.depth, batch=batch)
    recipe.make()  # refuses a tree that is too large
    return recipe


def _check_bank(given: RecordOptions, settings: list[str]) -> None:
    """Refuse contradictions: a bank serves any search, or those that it names."""
    children, algorithms = given.children, given.algorithms
    if given.search != "linear":
        raise UsageError(f"--bank serves searches later: --for {given.search} instead of --search")
    if given.temperature == 0:
        raise UsageError("--bank at --temperature 0 would draw the same thought again and again")
    if bool(children) == bool(algorithms):
        raise UsageError(
            "--bank needs either --children (e.g. 8 with --depth 3, or 64,16,8) or --for with "
            "--width (e.g. --for rebase,ets --width 16,64)"
        )
    if algorithms and given.depth:
        raise UsageError("--depth goes with --children: searches go as deep as they like")
    for name, value in (("--width", given.widths), ("--set", settings)):
        if children and value:
            raise UsageError(f"{name} goes with --for: --children serves any search")


def stored_fields(given: CaptureOptions, level: str = "signals") -> dict[str, Any]:
    """The fields of a `RecordRequest` that say what is stored, by default at this level."""
    if given.attention not in (known := ("auto", "dense", "sparse")):
        raise UnknownName("form of attention", given.attention, known)
    return {
        "attention": given.attention,
        "attention_top": given.attention_top,
        "capture": _capture(given.capture or level),
        "qkv_layers": _layers("--qkv-layers", given.qkv_layers),
        "attention_layers": _layers("--attention-layers", given.attention_layers),
        "hidden_layers": _layers("--hidden-layers", given.hidden_layers),
    }


def _capture(name: str) -> Any:
    from arborsim.trace.schema import Capture

    if name not in (known := [str(each) for each in Capture]):
        raise UnknownName("capture level", name, known)
    return Capture(name)


def _layers(option: str, given: str | Sequence[int]) -> LayerChoice:
    if not given:
        return ()
    if given == "all":
        return "all"
    parts = given.split(",") if isinstance(given, str) else listed(given)
    try:
        return tuple(sorted({whole_number(str(part)) for part in parts}))
    except ValueError:
        raise UsageError(f"{option} {given!s:.40}: expected numbers, e.g. 2,3, or all") from None
