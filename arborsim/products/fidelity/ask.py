"""`arborsim.fidelity`: how near policies keep the next token's distribution to full retention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from arborsim.products.declare import (
    AnyPath,
    Count,
    InPython,
    Option,
    Positive,
    Seed,
    Silent,
    call,
)
from arborsim.products.options import PolicyOptions
from arborsim.products.record.problems import PromptOptions

if TYPE_CHECKING:
    from arborsim.products.fidelity.results import FidelityResults


@dataclass(frozen=True, kw_only=True)
class DocumentOptions(PromptOptions, panel="Documents and model"):
    """The texts, and the model that reads them.

    Parameters
    ----------
    model
        chain, game24, tail or tail-deep (shipped), a folder with safetensors, or a model id.
    text
        Files of plain text. Repeatable.
    prompts
        JSON lines, each {"prompt": "...", "tokens": "..."}, text or token ids. Or problems, as live
        takes them (with --recipe or --field, hf:NAME, made:NAME), whose answers are generated.
    generate
        Tokens that full retention generates after prompts without tokens, at most.
    tokens
        Tokens of a document: longer texts are cut into several.
    prefill
        How much of a text's document is computed at once, as a prompt: a share or tokens.
    documents
        How many documents.
    """

    model: str
    text: Annotated[AnyPath | Sequence[AnyPath], Option(many=True)] = ()
    prompts: AnyPath | None = None
    generate: Count = 0
    tokens: Annotated[int, Option(least=2)] = 1024
    prefill: float | str = 0.25
    documents: Annotated[Count, Option(shown="all; 8 of a task")] = 0


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
        from arborsim.products.fidelity.run import Reading

        running = Reading(self)
        running.run()
        return running.results()


fidelity = call("fidelity", FidelityOptions)
