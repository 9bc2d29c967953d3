"""`arborsim.fidelity`: how near policies keep the next token's distribution to full retention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from arborsim.core.errors import UsageError
from arborsim.core.outputs import output_path
from arborsim.products.choices import budgets
from arborsim.products.declare import (
    AnyPath,
    Count,
    InPython,
    Option,
    Options,
    Positive,
    Seed,
    Silent,
    call,
    equivalent,
    listed,
)
from arborsim.products.options import PolicyOptions
from arborsim.products.record.problems import live_fields

if TYPE_CHECKING:
    from arborsim.play.backends import LiveFacts
    from arborsim.play.fidelity import FidelityResult
    from arborsim.play.live_log import Collector
    from arborsim.products.fidelity.results import FidelityResults
    from arborsim.report.progress import LiveBar


@dataclass(frozen=True, kw_only=True)
class DocumentOptions(Options, panel="Documents and model"):
    """The texts, and the model that reads them.

    Parameters
    ----------
    model
        chain, game24, tail or tail-deep (shipped), a folder with safetensors, or a model id.
    text
        Files of plain text. Repeatable.
    prompts
        JSON lines, each {"prompt": "...", "tokens": "..."}, text or token ids.
    generate
        Tokens that full retention generates after prompts without tokens, at most.
    tokens
        Tokens of a document: longer texts are cut into several.
    prefill
        How much of a text's document is computed at once, as a prompt: a share or tokens.
    documents
        How many documents.
    first
        Number of the first document.
    chat
        Put each prompt into the tokeniser's chat template.
    stop
        A thought ends with this text. Repeatable.
    device
        cpu or cuda.
    dtype
        auto, float32, bfloat16 or float16.
    """

    model: str
    text: Annotated[AnyPath | Sequence[AnyPath], Option(many=True)] = ()
    prompts: AnyPath | None = None
    generate: Count = 0
    tokens: Annotated[int, Option(least=2)] = 1024
    prefill: float | str = 0.25
    documents: Annotated[Count, Option(shown="all; 8 of a task")] = 0
    first: Count = 0
    chat: bool = False
    stop: Annotated[Sequence[str], Option(shown="a newline")] = ()
    device: str = "cpu"
    dtype: str = "auto"


@dataclass(frozen=True, kw_only=True)
class FidelityOptions(PolicyOptions, DocumentOptions):
    """Compare the next token's distribution under KV-cache policies with full retention's.

    A model reads documents token by token while each policy removes what it removes. Shows
    KL(full || policy), how often the most probable token is the same, and perplexity, with
    intervals over documents. Needs the extra torch. Ctrl-C keeps the log. Exit code 130.

    Parameters
    ----------
    masked
        Mask tokens in place of removing them: the same figures, several times faster, no bytes.
    batch
        Policies and budgets computed together.
    seed
        Seed of the bootstrap, and of policies that draw.
    out
        Log of all results, JSON lines: each is on the disk before the next.
    resume
        Go on with the log.
    overwrite
        Replace the log.
    progress
        Show progress on standard error.

    Returns
    -------
    FidelityResults

    Raises
    ------
    ArborsimError
        A name, file or combination of options that cannot work.

    Examples
    --------
    >>> import arborsim
    >>> found = arborsim.fidelity(model="my-model", text="book.txt", policies=["h2o", "kivi"],
    ...                           budgets=[0.25, 0.5])  # doctest: +SKIP
    >>> found.summary()  # doctest: +SKIP
    """

    search: ClassVar[str] = "linear"  # a document has one path

    masked: bool = False
    batch: Positive = 8
    seed: Seed = 0
    out: Annotated[AnyPath | None, Option(writes=True, silent=True, panel="Output")] = None
    resume: Annotated[Silent, Option(panel="Output")] = False
    overwrite: Annotated[Silent, Option(panel="Output")] = False
    progress: InPython = False

    def results(self) -> FidelityResults:
        """Read everything."""
        running = Reading(self)
        running.run()
        return running.results()


fidelity = call("fidelity", FidelityOptions)


class Reading:
    """A run that was asked for, checked. What is done survives an interruption."""

    bar: LiveBar | None = None

    def __init__(self, options: FidelityOptions) -> None:
        from arborsim.play.fidelity import FidelityRequest, FidelityResult
        from arborsim.play.live_log import Collector, LiveLog

        self._options, given = options, options
        self.out = None if given.out is None else output_path(given.out)
        if given.resume and self.out is None:
            raise UsageError("--resume needs --out, the log to go on with")
        if given.resume and given.overwrite:
            raise UsageError("--resume keeps the log and --overwrite replaces it: give one of them")
        texts = tuple(Path(each) for each in listed(given.text))
        if texts and (given.prompts is not None or given.generate):
            raise UsageError("--text is read as it is: leave out --prompts and --generate")
        prefill = budgets(given.prefill)
        if len(prefill) != 1 or prefill[0].text == "1":
            raise UsageError(
                f"--prefill {given.prefill}: give a share below 1 (0.25) or tokens (64)"
            )
        self.request = FidelityRequest(
            **live_fields(given) | {"episodes": given.documents, "max_tokens": given.generate},
            texts=texts,
            document_tokens=given.tokens,
            prefill=prefill[0],
            masked=given.masked,
            batch=given.batch,
            command=equivalent("fidelity", given),
        )
        self._log: Any = None
        if self.out is not None:
            keep = {"resume": given.resume, "overwrite": given.overwrite}
            self._log = LiveLog(self.out, self.request, FidelityResult, **keep)
        self.found: Collector[FidelityResult] = Collector(self._log)
        self.wants = self.found.wants

    def run(self) -> None:
        """Read everything that is missing. What is done stays if this is interrupted."""
        from contextlib import ExitStack

        from arborsim.play.backends import get_backend
        from arborsim.report.progress import LiveBar

        with ExitStack() as stack:
            if self._log is not None:
                stack.callback(self._log.close)
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

    @property
    def total(self) -> int:
        """Results of the whole run."""
        return self.found.episodes * len(self.request.cells)

    def _show(self, what: str) -> None:
        if self.bar is not None:
            self.bar.show(what, completed=len(self.found.results), total=self.total)

    def results(self) -> FidelityResults:
        """Those that there are; a `UsageError` if the model was not even loaded."""
        from arborsim.products.fidelity.results import FidelityResults, of_run

        if self.found.facts is None:
            raise UsageError("the model was not loaded yet: there are no results")
        return FidelityResults(*of_run(self.request, self.found.facts, self.found.results))

    def kept(self) -> str:
        """After an interruption: what there is, and how to go on."""
        if self.found.facts is None:
            return "the model was not loaded yet"
        done = f"{len(self.found.results)} of {self.total} results"
        if self.out is None:
            return f"{done} were there; --out FILE would have kept them"
        return f"{self.out} holds {done}; --resume goes on"
