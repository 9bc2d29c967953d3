"""`arborsim.record`: searches of a live model as a trace."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from arborsim.core.errors import UnknownName, UsageError
from arborsim.core.outputs import output_path
from arborsim.core.settings import whole_number
from arborsim.products import choices
from arborsim.products.equivalent import equivalent
from arborsim.products.record.problems import DEFAULTS, Problems, search_fields, split_settings

if TYPE_CHECKING:
    from arborsim.play.backends import LayerChoice, RecordProgress
    from arborsim.products.choices import Settings
    from arborsim.products.traces.ask import Trace
    from arborsim.searches.arms import Recipe

_OPTIONS = {"algorithms": "for"}


def record(
    out: str | os.PathLike[str],
    *,
    settings: Settings = (),
    capture: str | None = None,
    attention: str = "auto",
    attention_top: int = 256,
    qkv_layers: str | Sequence[int] = "",
    attention_layers: str | Sequence[int] = "",
    hidden_layers: str | Sequence[int] = "",
    teacher_forced: str | os.PathLike[str] | None = None,
    bank: bool = False,
    children: str | int | Sequence[int] = "",
    depth: int = 0,
    algorithms: str | Sequence[str] = "",
    widths: str | int | Sequence[int] = "",
    batch: int = 0,
    overwrite: bool = False,
    resume: bool = False,
    progress: bool = False,
    **problems: Unpack[Problems],
) -> Trace:
    """Run searches on a live model and record them.

    Needs the ``torch`` extra.  An interruption leaves a valid trace of all whole episodes.

    Parameters
    ----------
    out : path
        The trace to make.
    settings : mapping or sequence of str
        Options of the search: ``{"keep": 2}``.
    capture : {"tree", "signals", "qkv"}, optional
        What is stored; signals if left out, and of a bank the tree and embeddings.
    attention : {"auto", "dense", "sparse"}
        How attention is stored: auto is whole rows for paths up to 4,096 tokens.
    attention_top : int
        Positions per sparse row.
    qkv_layers, attention_layers, hidden_layers : sequence of int or "all"
        Layers whose vectors (``capture="qkv"``), whose own attention rows and whose outputs are
        stored.
    teacher_forced : path, optional
        JSON lines with ``"prompt"`` and ``"tokens"`` that any engine generated: record these tokens
        instead of generating any.
    bank : bool
        Grow a tree that searches can be run on later, instead of running one.
    children, depth : int or sequence of int, int
        Of a bank: children per node, or per depth, and levels.
    algorithms, widths : names, numbers
        Of a bank: grow only what these searches at these widths ask for.
    batch : int
        Problems recorded together, or of a bank thoughts drawn at once; 0 for 1, or 256.
    overwrite, resume : bool
        Replace the file; go on after an interruption.
    progress : bool
        Show progress on standard error.
    **problems
        The problems, the model, the search and its rewards
        (`arborsim.products.record.problems.Problems`), such as
        ``model="Qwen/Qwen3-0.6B"``, ``prompts="prompts.jsonl"``.

    Returns
    -------
    Trace

    Raises
    ------
    ArborsimError
        A name, number, file or combination of arguments that cannot work, in one line.

    Examples
    --------
    >>> import arborsim
    >>> trace = arborsim.record("mine.parquet", task="chain", episodes=2)  # doctest: +SKIP
    """
    from arborsim.products.traces.ask import Trace

    given = {name: value for name, value in locals().items() if name not in ("problems", "Trace")}
    recording = Recording(**given, **problems)
    recording.run(progress=progress)
    return Trace(recording.request.out)


class Recording:
    """What `record` is asked for, checked.  Takes the arguments of `record`."""

    def __init__(
        self,
        out: str | os.PathLike[str],
        *,
        settings: Settings,
        capture: str | None,
        attention: str,
        attention_top: int,
        qkv_layers: str | Sequence[int],
        attention_layers: str | Sequence[int],
        hidden_layers: str | Sequence[int],
        teacher_forced: str | os.PathLike[str] | None,
        bank: bool,
        children: str | int | Sequence[int],
        depth: int,
        algorithms: str | Sequence[str],
        widths: str | int | Sequence[int],
        batch: int,
        overwrite: bool,
        resume: bool,
        progress: bool = False,
        **problems: Any,
    ) -> None:
        from arborsim.play.backends import RecordProgress, RecordRequest

        given = {
            name: value for name, value in locals().items() if name not in ("self", "problems")
        }
        # A recording is a line unless a search is named, whatever the task.
        problems = {**problems, "search": problems.get("search") or "linear"}
        command = equivalent("record", record, given | problems, DEFAULTS, _OPTIONS)
        command = command.replace("arborsim record ", "arborsim record --out ", 1)
        choices.at_least(0, batch=batch, depth=depth)
        choices.at_least(1, attention_top=attention_top)
        texts = choices.setting_texts(settings)
        if teacher_forced is not None:
            _check_forced(problems, bank=bank, batch=batch)
        recipe = _recipe(
            problems, texts, bank=bank, children=children, depth=depth, algorithms=algorithms,
            widths=widths, batch=batch,
        )  # fmt: skip
        found = search_fields(problems) | {"attention": attention, "attention_top": attention_top}
        if bank and problems.get("temperature") is None:
            found["temperature"] = 1.0
        options: dict[str, str] = {}
        if not bank:
            own, unknown = split_settings(texts, problems["search"], ())
            options = own | dict(map(choices.assigned, unknown))  # the search refuses them by name
        if attention not in (known := ("auto", "dense", "sparse")):
            raise UnknownName("form of attention", attention, known)
        self.request = RecordRequest(
            **found,
            out=output_path(out),
            capture=_capture(capture or ("tree" if bank else "signals")),
            qkv_layers=_layers("--qkv-layers", qkv_layers),
            attention_layers=_layers("--attention-layers", attention_layers),
            hidden_layers=_layers("--hidden-layers", hidden_layers),
            search_options=options,
            bank=recipe,
            teacher_forced=None if teacher_forced is None else Path(teacher_forced),
            batch=1 if bank else max(1, batch),
            overwrite=overwrite,
            resume=resume,
            command=command,
        )
        #: How far it is.
        self.seen = RecordProgress(0, 0, 0, 0, 0, 0.0)

    def run(self, *, progress: bool = False) -> None:
        """Record; an interruption leaves the whole episodes, which `seen` counts."""
        from arborsim.play.backends import get_backend
        from arborsim.report.progress import LiveBar

        backend = get_backend("torch")

        def see(seen: RecordProgress, show: Callable[..., None] | None = None) -> None:
            self.seen = seen
            if show is not None:
                show(self.described(), completed=seen.episode, total=seen.episodes)

        if not progress:
            self.seen = backend.record(self.request, see)
            return
        with LiveBar("recording", time_left=True) as bar:
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


def _check_forced(problems: dict[str, Any], *, bank: bool, batch: int) -> None:
    """Refuse what contradicts given tokens."""
    given = {
        "--prompts": problems.get("prompts") is not None,
        "--bank": bank,
        "--search": problems["search"] != "linear",
        "--temperature": problems.get("temperature") is not None,
        "--top-p": problems.get("top_p", 1) < 1,
        "--max-tokens": problems.get("max_tokens", 0) > 0,
        "--reward": bool(problems.get("reward")),
    }
    for name, value in given.items():
        if value:
            raise UsageError(f"--teacher-forced records tokens as they are: leave out {name}")
    if batch:
        raise UsageError("--teacher-forced computes one chain after the other: leave out --batch")


def _recipe(
    problems: dict[str, Any],
    settings: list[str],
    *,
    bank: bool,
    children: str | int | Sequence[int],
    depth: int,
    algorithms: str | Sequence[str],
    widths: str | int | Sequence[int],
    batch: int,
) -> Recipe | None:
    """What to grow; None unless a bank was asked for."""
    from arborsim.searches.arms import BATCH, Recipe, recipe_for

    given = {"--children": children, "--depth": depth, "--for": algorithms, "--width": widths}
    if not bank:
        for name, value in given.items():
            if value:
                raise UsageError(f"{name} is about banks: add --bank, or leave it out")
        return None
    _check_bank(problems, given, settings)
    batch = batch or BATCH
    if algorithms:
        found = list(dict.fromkeys(choices.whole_numbers(widths or 16, "--width")))
        dedupe = not problems.get("keep_duplicates", False)
        return recipe_for(choices.names(algorithms), found, settings, dedupe, batch)
    counts = tuple(choices.whole_numbers(children, "--children"))
    if len(counts) == 1 and depth == 0:
        raise UsageError(f"--children {counts[0]} needs --depth, e.g. --depth 3")
    recipe = Recipe(children=counts, depth=depth, batch=batch)
    recipe.make()  # refuses a tree that is too large
    return recipe


def _check_bank(problems: dict[str, Any], given: dict[str, Any], settings: list[str]) -> None:
    """Refuse contradictions: a bank serves any search, or those that it names."""
    children, algorithms = given["--children"], given["--for"]
    if problems["search"] != "linear":
        raise UsageError(
            f"--bank serves searches later: --for {problems['search']} instead of --search"
        )
    if problems.get("temperature") == 0:
        raise UsageError("--bank at --temperature 0 would draw the same thought again and again")
    if bool(children) == bool(algorithms):
        raise UsageError(
            "--bank needs either --children (e.g. 8 with --depth 3, or 64,16,8) or --for with "
            "--width (e.g. --for rebase,ets --width 16,64)"
        )
    if algorithms and given["--depth"]:
        raise UsageError("--depth goes with --children: searches go as deep as they like")
    for name, value in (("--width", given["--width"]), ("--set", settings)):
        if children and value:
            raise UsageError(f"{name} goes with --for: --children serves any search")


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
    parts = given.split(",") if isinstance(given, str) else choices.listed(given)
    try:
        return tuple(sorted({whole_number(str(part)) for part in parts}))
    except ValueError:
        raise UsageError(f"{option} {given!s:.40}: expected numbers, e.g. 2,3, or all") from None
