"""From the options of `arborsim live` to a request.

What cannot work is refused before any model is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborsim.core.errors import UnknownName, UsageError
from arborsim.run.aggregate import ANY, BASELINE, ORACLE

if TYPE_CHECKING:
    from arborsim.machine.machine import Machine
    from arborsim.run.episode import Cell

#: How what is in DDR can be read.
RECALLS = ("stage", "stream", "near", "ondemand")
#: Reference tasks that are searched as a tree unless asked otherwise.
_TREES = {"game24": "tot-bfs"}
_LIVE_PAGE, _SHADOW_PAGE = 16, 1


def model_of(model: str, task: str) -> str:
    """The model to load: that of the task, or `chain`, unless one was named."""
    return model or task or "chain"


def search_of(search: str, model: str, task: str) -> str:
    """The search: that of the task unless one was named."""
    return search or _TREES.get(task or model, "linear")


def temperature_of(temperature: float | None, search: str) -> float:
    """Branches must differ; a line need not."""
    if temperature is not None:
        return temperature
    return 0.0 if search == "linear" else 0.7


def split_settings(
    given: Sequence[str], search: str, policies: Sequence[str]
) -> tuple[dict[str, str], list[str]]:
    """What of ``--set`` is for the search, and what for policies.

    ``search.name=value`` and ``tot-bfs.name=value`` are for the search.  So is ``name=value`` if
    the search has that option and no chosen policy has.

    Raises
    ------
    UsageError
        Both have it.
    """
    from arborsim.policies.registry import find, parameters
    from arborsim.search import search_options

    options = search_options(search)
    held = {key for name in policies for key in parameters(find(name))}
    own: dict[str, str] = {}
    others: list[str] = []
    for setting in given:
        key, equals, value = (part.strip() for part in setting.partition("="))
        head, _, rest = key.partition(".")
        if equals and rest and head in ("search", search):
            own[rest] = value
        elif equals and key in options and key in held:
            raise UsageError(
                f"--set {setting}: the search and a policy have {key}: say search.{key} or "
                f"POLICY.{key}"
            )
        elif equals and key in options:
            own[key] = value
        else:
            others.append(setting)
    return own, others


def make_cells(
    policies: Sequence[str], budgets: Sequence[str], settings: Sequence[str], *, full: bool
) -> tuple[Cell, ...]:
    """Every policy under every budget; those that know no budget once.

    Parameters
    ----------
    full : bool
        Full retention leads even if it was not named.
    """
    from arborsim.cli.options import build_policies, chosen_names, names, policy_settings
    from arborsim.core.budget import Budget
    from arborsim.core.observations import Signal
    from arborsim.policies.registry import build
    from arborsim.run.episode import Cell

    chosen = chosen_names(",".join(policies))
    if "all" in names(",".join(policies)):
        chosen = [name for name in chosen if name != ORACLE]
    made = build_policies(policy_settings(chosen, settings))
    for policy in made:
        if Signal.EVICTION_TIME in policy.reads():
            raise UsageError(
                f"--policy {policy.name}: the offline optimum needs the future, which no live "
                "search has: replay a trace instead"
            )
    if full:
        made = [build(BASELINE), *(policy for policy in made if policy.name != BASELINE)]
    shares = [Budget.parse(text) for text in names(",".join(budgets))]
    if not shares:
        raise UsageError("--budget names no budget")
    whole = Budget(ANY, share=1.0)
    free = [Cell(policy, whole) for policy in made if not policy.uses_budget]
    bound = [Cell(p, budget) for budget in shares for p in made if p.uses_budget]
    return (*free, *bound)


def make_machine(
    *, shadow: bool, gpu: str, recall: str, overlap: bool, page_tokens: int
) -> Machine | None:
    """The simulated machine of a shadow run; None if tokens are really removed.

    Raises
    ------
    UsageError
        An option of the other kind of run.
    """
    from arborsim.machine.lookup import load_profile
    from arborsim.machine.machine import Machine

    if recall not in RECALLS:
        raise UnknownName("recall mode", recall, RECALLS)
    if not shadow:
        if gpu:
            raise UsageError("--gpu is simulated, by --shadow: a live run takes --device cuda")
        return None
    if not overlap:
        raise UsageError("--no-overlap is for live runs: leave out --shadow")
    return Machine(load_profile(gpu or "h100"), None, recall, page_tokens or _SHADOW_PAGE)


def page_size(page_tokens: int, *, shadow: bool) -> int:
    """Slots per page, after ``--page-tokens``."""
    return page_tokens or (_SHADOW_PAGE if shadow else _LIVE_PAGE)


def check_files(out: Path | None, trace: Path | None, report: Path | None, **given: Any) -> None:
    """Refuse outputs that cannot be written, or that options contradict.

    Parameters
    ----------
    given : bool
        ``resume``, ``overwrite`` and ``shadow``.
    """
    from arborsim.cli.options import check_output

    paths = {"--out": out, "--trace": trace, "--report": report}
    seen: dict[Path, str] = {}
    for option, path in paths.items():
        if path is None:
            continue
        check_output(path, option)
        if path.resolve() in seen:
            raise UsageError(f"{option} {path}: {seen[path.resolve()]} names the same file")
        seen[path.resolve()] = option
    if given["resume"] and out is None:
        raise UsageError("--resume needs --out, the log to go on with")
    if given["resume"] and given["overwrite"]:
        raise UsageError("--resume keeps the log and --overwrite replaces it: give one of them")
    if trace is not None and not given["shadow"]:
        raise UsageError("--trace needs --shadow: a search that policies prune is no recording")
    if trace is not None and given["resume"]:
        raise UsageError("--trace records whole runs: --resume cannot go with it")
    if trace is not None and trace.exists() and not given["overwrite"]:
        raise UsageError(f"--trace {trace}: the file exists: --overwrite replaces it")
