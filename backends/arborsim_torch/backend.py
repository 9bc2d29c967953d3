"""The `torch` backend: records searches of live models into traces.

PyTorch is imported when a request is carried out, not with this module: a model that is not there
is refused at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from arborsim.core.errors import UsageError
from arborsim.play.backends import (
    LiveObserver,
    LiveRequest,
    ModelUsage,
    RecordProgress,
    RecordRequest,
    SearchRequest,
    ValidationObserver,
)
from arborsim.play.fidelity import FOLLOWED, FidelityObserver, FidelityRequest
from arborsim.play.problem_sets import ProblemSet, read_lines, read_problems, read_text
from arborsim.searches import make_search
from arborsim_torch.checkpoint import check_checkpoint, is_plain
from arborsim_torch.given_file import read_searches

if TYPE_CHECKING:
    from arborsim.products.calibrate.backend import (
        HardwareMeasurements,
        HardwareRequest,
        MaskingRequest,
        Maskings,
        OcclusionRequest,
        Occlusions,
        OnProgress,
    )
    from arborsim_torch.live.run import MetersOf
    from arborsim_torch.models import LoadedModel
    from arborsim_torch.tree_recording import TreeRecording

for _package in ("torch", "transformers"):
    if find_spec(_package) is None:
        raise ModuleNotFoundError(f"No module named {_package!r}", name=_package)


class TorchBackend:
    """Live models on PyTorch and transformers, CPU or CUDA."""

    name = "torch"

    def record(
        self, request: RecordRequest, on_progress: Callable[[RecordProgress], None]
    ) -> RecordProgress:
        """Record a trace.

        Raises `UsageError` if the request cannot work: nothing was written then.  On
        `KeyboardInterrupt`, which is passed on, the whole episodes are in the file.
        """
        _check(request)
        from arborsim.trace.writer import TraceWriter
        from arborsim_torch.episodes import record_all, trace_info
        from arborsim_torch.hardware.memory import memory_errors
        from arborsim_torch.recording_plan import make_plan

        with memory_errors(partial(_too_large, request)):
            loaded, prompts = _load(request)
            plan = make_plan(request, loaded, prompts)
            info = trace_info(request, loaded, plan)
            with TraceWriter(
                request.out, info, overwrite=request.overwrite, resume=request.resume
            ) as writer:
                return record_all(request, loaded, plan, info, writer, on_progress)

    def record_trees(
        self, request: RecordRequest, model: Any, tokenizer: Any, search: str
    ) -> TreeRecording:
        """Record trees that are handed over one by one; raises `UsageError`."""
        if isinstance(model, str) and is_plain(model):
            check_checkpoint(model)
        from arborsim_torch.tree_recording import TreeRecording

        return TreeRecording(request, model, tokenizer, search)

    def live(
        self, request: LiveRequest, watch: LiveObserver, meters: MetersOf | None = None
    ) -> tuple[ModelUsage, ...]:
        """Search under policies, or with policies in shadow mode.

        `meters` are for the controllers: of an episode and a cell.  Returns what reward and
        embedding models took.  Raises `UsageError` if the request cannot work.  A
        `KeyboardInterrupt`, or what `watch` raises, is passed on, after the results so far.
        """
        _check(request)
        from arborsim_torch.episodes import trace_info
        from arborsim_torch.hardware.memory import memory_errors
        from arborsim_torch.live.run import LiveRun
        from arborsim_torch.live.shadow import ShadowRun, record_request
        from arborsim_torch.recording_plan import make_plan

        recording = record_request(request)
        with memory_errors(partial(_too_large, recording)):
            loaded, prompts = _load(request)
            plan = make_plan(recording, loaded, prompts)
            if request.masked:
                from arborsim_torch.masked.drafts import MaskedRun

                MaskedRun(request, loaded, plan, watch, meters).run()
            elif request.shadow:
                info = trace_info(recording, loaded, plan)
                ShadowRun(request, loaded, plan, info, watch, meters).run()
            else:
                LiveRun(request, loaded, plan, watch, meters).run()
            return plan.model_usage()

    def fidelity(self, request: FidelityRequest, watch: FidelityObserver) -> None:
        """Read documents under policies; raises what `live` raises."""
        for path in request.texts:
            read_text(path)
        if request.problems is not None and request.problems.path is None:
            read_problems(request.problems)
        elif request.prompts is not None:
            read_lines(request.prompts, FOLLOWED)
        if is_plain(request.model, request.task):
            check_checkpoint(request.model)
            if not request.texts and request.prompts is None:
                raise UsageError(f"--model {request.model} has no task: give --text or --prompts")
        from arborsim_torch.fidelity import FidelityRun, too_large
        from arborsim_torch.hardware.memory import memory_errors

        with memory_errors(partial(too_large, request)):
            FidelityRun(request, _load(request)[0], watch).run()

    def validate(self, request: LiveRequest, watch: ValidationObserver) -> None:
        """Compare simulated with measured searches; raises what `live` raises."""
        _check(request)
        from arborsim_torch.episodes import trace_info
        from arborsim_torch.hardware.memory import memory_errors
        from arborsim_torch.live.shadow import record_request
        from arborsim_torch.live.validate import ValidationRun, validation_recording
        from arborsim_torch.recording_plan import make_plan

        with memory_errors(partial(_too_large, record_request(request))):
            loaded, prompts = _load(request)
            recording = validation_recording(request, loaded)
            plan = make_plan(recording, loaded, prompts)
            ValidationRun(request, loaded, plan, trace_info(recording, loaded, plan), watch).run()

    def occlude(self, request: OcclusionRequest, on_progress: OnProgress) -> Occlusions:
        """Occlude windows of greedy reasonings, for `arborsim calibrate bands`."""
        from arborsim_torch import calibration

        return calibration.occlude(request, on_progress)

    def mask(self, request: MaskingRequest, on_progress: OnProgress) -> Maskings:
        """Hide blocks of recorded paths, for `arborsim calibrate msve`."""
        from arborsim_torch import calibration

        return calibration.mask(request, on_progress)

    def measure_hardware(
        self, request: HardwareRequest, on_progress: OnProgress
    ) -> HardwareMeasurements:
        """Measure this machine, for `arborsim calibrate hardware`."""
        from arborsim_torch.hardware.measure import measure

        return measure(request, on_progress)


def _check(request: SearchRequest) -> None:
    """Refuse what needs no PyTorch to be refused."""
    recipe = request.bank if isinstance(request, RecordRequest) else None
    _ = make_search(request.search, **request.search_options) if recipe is None else recipe.make()
    forced = request.teacher_forced if isinstance(request, RecordRequest) else None
    if forced is not None:
        read_searches(forced)
    if request.problems is not None:
        read_problems(request.problems)
    elif request.judge or request.recipe or request.problem_fields:
        raise UsageError("--judge, --recipe and --field are about prompts: give --prompts")
    if is_plain(request.model, request.task):
        check_checkpoint(request.model)
        if request.prompts is None and forced is None:
            raise UsageError(f"--model {request.model} has no task: give --prompts FILE.jsonl")


def _load(request: SearchRequest) -> tuple[LoadedModel, ProblemSet | None]:
    """The model and the problems of prompts, if any; what is quickly checked comes first."""
    from arborsim_torch.models import load_model
    from arborsim_torch.rewards.embed import check_embedder
    from arborsim_torch.rewards.load import check_choice

    check_choice(request.reward)
    if request.embed:
        check_embedder(request.embed)
    followed = isinstance(request, FidelityRequest)
    prompts = read_problems(request.problems) if request.problems and not followed else None
    where, options = (request.device, request.dtype), request.task_options
    loaded = load_model(request.model, request.task, *where, options, request.trust_remote_code)
    return loaded, prompts


def _too_large(request: RecordRequest) -> UsageError:
    from arborsim_torch.episodes import new_search

    many = request.bank is not None or request.batch > 1
    return UsageError(
        f"out of memory on {request.device}: {request.model} in {request.dtype}, "
        f"{new_search(request).name} with {new_search(request).slots} leaves at once: try fewer "
        f"{'children, a smaller --batch' if many else 'children'}, a shorter prompt, "
        "--max-tokens, a smaller --dtype, or (when recording) --capture tree"
    )
