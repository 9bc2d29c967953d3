"""Record trees that a program hands over one by one (`arborsim.Recorder`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from arborsim.core.errors import UsageError
from arborsim.play.backends import RecordRequest
from arborsim.play.given import GivenTree
from arborsim.trace.writer import TraceWriter
from arborsim_torch.checkpoint import check_family
from arborsim_torch.episodes import Tally, capture_of, trace_info
from arborsim_torch.given import record_tree
from arborsim_torch.models import LoadedModel, check_vocabulary, language_model, load_model
from arborsim_torch.recording_plan import RecordingPlan, of_given, plan_for, words_of


class TreeRecording:
    """A trace that grows by one tree at a time.

    `model` is a module of transformers, which is left as it was, or what `load_model` loads.  The
    file is opened with the first tree, whose longest path decides how "auto" stores attention.
    """

    def __init__(self, request: RecordRequest, model: Any, tokenizer: Any, search: str) -> None:
        if isinstance(model, str):
            loaded = load_model(model, "", request.device, request.dtype)
            self._loaded = loaded if tokenizer is None else replace(loaded, tokenizer=tokenizer)
        else:
            self._loaded = _of_module(model, tokenizer)
        self._request, self._search = request, search
        self._source = of_given(request, self._loaded)
        self._plan(0)  # refuses what the model lacks
        self._words = words_of(self._loaded, request.chat)
        self.vocabulary, self.longest = self._words.vocabulary, self._words.longest
        self._writer: TraceWriter | None = None
        self._tally = Tally(0)

    def encode(self, text: str, is_prompt: bool) -> list[int]:
        """Token ids of a text."""
        return self._words.encode(text, is_prompt)

    def write(self, tree: GivenTree) -> None:
        """Compute the tree and store it: safe on disk on return."""
        writer = self._writer or self._open(max(tree.lengths))
        named = self._loaded.tokenizer is not None or self._loaded.task is not None
        source = self._source if named else None
        with _lent(self._loaded.model):
            result = record_tree(self._loaded.model, tree, capture_of(writer.info), source)
        writer.write_episode(result.columns)
        self._tally.add(result)
        writer.update_timing(self._tally.timing())

    def _plan(self, longest: int) -> RecordingPlan:
        return plan_for(self._request, self._loaded, self._source, longest, 0, 0, ())

    def _open(self, longest: int) -> TraceWriter:
        request = self._request
        info = replace(trace_info(request, self._loaded, self._plan(longest)), search=self._search)
        how = {"overwrite": request.overwrite, "resume": request.resume}
        self._writer = TraceWriter(request.out, info, **how)
        return self._writer

    def close(self) -> None:
        """Make the file of the whole searches."""
        if self._writer is not None:
            self._writer.close()


def _of_module(model: Any, tokenizer: Any) -> LoadedModel:
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "lm_head") or not hasattr(model, "model"):
        raise UsageError(
            f"model is a {type(model).__name__}: give a causal language model of transformers, or "
            "its folder or name"
        )
    check_family("model", config.to_dict())
    inner = language_model(model)
    check_vocabulary("tokenizer", tokenizer, inner)
    name = getattr(config, "_name_or_path", "") or type(model).__name__
    return LoadedModel(name.rstrip("/").rpartition("/")[2], inner, None, tokenizer)


@contextmanager
def _lent(model: Any) -> Iterator[None]:
    """A model in evaluation mode; its own attention and mode come back afterwards."""
    attention, training = model.config._attn_implementation, model.training
    model.eval()
    try:
        yield
    finally:
        model.set_attn_implementation(attention)
        model.train(training)
