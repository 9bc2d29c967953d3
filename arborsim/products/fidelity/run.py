"""A run of `fidelity`: what was asked, checked, and its results as they come."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from arborsim.core.errors import UsageError
from arborsim.play.fidelity import FidelityRequest, FidelityResult
from arborsim.products.choices import budgets
from arborsim.products.declare import equivalent, listed
from arborsim.products.fidelity.results import FidelityResults, of_run
from arborsim.products.live.run import LoggedRun, log_path
from arborsim.products.record.problems import live_fields

if TYPE_CHECKING:
    from arborsim.play.backends import LiveFacts
    from arborsim.report.progress import LiveBar


class Reading(LoggedRun[FidelityResult]):
    """A `FidelityObserver` of what `FidelityOptions` ask for."""

    bar: LiveBar | None = None
    units = "results were there"

    def __init__(self, options: Any) -> None:
        self._options, given, out = options, options, log_path(options)
        texts = tuple(Path(each) for each in listed(given.text))
        if texts and (given.prompts is not None or given.generate):
            raise UsageError("--text is read as it is: leave out --prompts and --generate")
        if given.prompts is None and (given.recipe or given.field):
            raise UsageError("--recipe and --field are about prompts: give --prompts")
        prefill = budgets(given.prefill)
        if len(prefill) != 1 or prefill[0].text == "1":
            raise UsageError(
                f"--prefill {given.prefill}: give a share below 1 (0.25) or tokens (64)"
            )
        request = self._asked = FidelityRequest(
            **live_fields(given) | {"episodes": given.documents, "max_tokens": given.generate},
            texts=texts,
            document_tokens=given.tokens,
            prefill=prefill[0],
            masked=given.masked,
            batch=given.batch,
            command=equivalent("fidelity", given),
        )
        super().__init__(given, request, FidelityResult, out)
        self.wants = self.found.wants

    def run(self) -> None:
        from contextlib import ExitStack

        from arborsim.play.backends import get_backend
        from arborsim.report.progress import LiveBar

        with ExitStack() as stack:
            stack.callback(self.close)
            if self._options.progress:
                self.bar = stack.enter_context(LiveBar("loading the model", time_left=True))
            get_backend("torch").fidelity(self.request, self)

    def began(self, facts: LiveFacts, episodes: int) -> None:
        """See `FidelityObserver`, as the others."""
        self.found.began(facts, episodes)
        self._show("reading")

    def running(self, episode: int, what: str, tokens: int) -> None:
        """A token was read under several policies, which is no step of the bar."""

    def finished(self, result: FidelityResult) -> None:
        self.found.finished(result)
        self._show(f"{result.document}, {result.policy} {result.budget}")

    def _show(self, what: str) -> None:
        if self.bar is not None:
            self.bar.show(what, completed=len(self.found.results), total=self.total)

    def results(self) -> FidelityResults:
        if self.found.facts is None:
            raise UsageError("the model was not loaded yet: there are no results")
        return FidelityResults(*of_run(self._asked, self.found.facts, self.found.results))
