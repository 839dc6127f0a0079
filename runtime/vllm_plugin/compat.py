"""All that this plugin knows of vLLM's insides: what it subclasses, which attributes it reads, and what differs between versions.

Imported only where vLLM runs. A version outside `TESTED_VERSIONS` is warned of when a plan is to be served, never before.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from time import monotonic
from typing import Any

import torch
import vllm
from fastapi import HTTPException
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.metrics.loggers import PerEngineStatLoggerAdapter, StatLoggerBase
from vllm.v1.request import Request
from vllm.v1.sample.logits_processor import LogitsProcessor

from tangram_plan.ir import TangramError

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker

__all__ = [
    "AsyncScheduler",
    "AttentionBackend",
    "AttentionCGSupport",
    "AttentionImpl",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "CommonAttentionMetadata",
    "FullAttentionManager",
    "FullAttentionSpec",
    "HTTPException",
    "LoadLogger",
    "LogitsProcessor",
    "MultipleOf",
    "Request",
    "Scheduler",
    "Worker",
    "add_report",
    "attention_form",
    "attention_layers",
    "build_server",
    "device_name",
    "engine_config",
    "errors_in_one_line",
    "greedy",
    "log",
    "memory_of_model",
    "model_config_json",
    "model_facts",
    "on_cpu",
    "parse_engine_options",
    "parse_serve_options",
    "prompt_tokens_of",
    "register_spec",
    "run_server",
    "settings_of",
    "start_engine",
    "tensor_parallel_rank",
    "use_v1_runner",
    "version_warning",
    "without_output_tokens",
]

TESTED_VERSIONS = {"cpu": ("0.32.0",), "cuda": ("0.26.0",)}

log = init_logger("vllm.tangram_plan")  # below vLLM's own, so that it is seen where vLLM's is


def version_warning() -> str:
    """One line if this version of vLLM was not tested; else empty."""
    platform = "cpu" if on_cpu() else "cuda"
    version, tested = vllm.__version__.split("+")[0], ", ".join(TESTED_VERSIONS[platform])
    if version in TESTED_VERSIONS[platform]:
        return ""
    return f"vLLM {version} was not tested with plans on {platform}: tested is {tested}"


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Log what keeps a plan from being served in one line; what vLLM makes of an error in its processes is long."""
    try:
        yield
    except TangramError as error:
        log.error("%s", error)
        raise


def on_cpu() -> bool:
    """Whether this vLLM runs on CPUs."""
    return bool(current_platform.is_cpu())


def device_name() -> str:
    """Of the first GPU; empty if this vLLM is for GPUs and finds none."""
    if not current_platform.is_cuda_alike() or not torch.cuda.is_available():
        return ""
    return str(current_platform.get_device_name())


def register_spec(spec: type, manager: type) -> None:
    """Name the manager of a kind of cache; again is harmless. The registry only fills itself while it is empty: so first of all."""
    KVCacheSpecRegistry._ensure_registered()  # noqa: SLF001
    KVCacheSpecRegistry.register(spec, manager, FullAttentionSpec)


def use_v1_runner(worker: Any) -> None:
    """Have a worker build the first model runner: the second computes widths of block tables without asking the spec (0.26)."""
    worker.use_v2_model_runner = False


def parse_serve_options(options: Sequence[str]) -> tuple[Namespace, dict[str, Any]]:
    """What `vllm serve` makes of its options, and those that were given.

    Raises:
        TangramError: vLLM does not know one, or not its value.
    """
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def refuse(message: str) -> None:
        raise TangramError(
            "vLLM refuses its options", where="vllm serve", got=message, fix="see `vllm serve --help=all`"
        )

    parser = FlexibleArgumentParser(prog="vllm")
    (command,) = cmd_init()
    serve = command.subparser_init(parser.add_subparsers(dest="subparser"))
    serve.set_defaults(dispatch_function=command.cmd)
    parser.error = serve.error = refuse
    try:
        parsed = parser.parse_args(["serve", *options])
        command.validate(parsed)
        serve.set_defaults(**dict.fromkeys(vars(parsed)))
        given = vars(parser.parse_args(["serve", *options]))
    except (ValueError, TypeError, OSError) as error:
        refuse(_first_reason(str(error) or repr(error)))
    return parsed, {name: value for name, value in given.items() if value is not None}


def build_server(parsed: Namespace) -> None:
    """Put a server together, as `run_server` does, but only when it has started an engine.

    Raises:
        ImportError: it needs a package that is not there.
        TangramError: an option names what is not there.
    """
    try:
        from vllm.entrypoints.launchers.app import build_app
    except ModuleNotFoundError:  # 0.26
        from vllm.entrypoints.openai.api_server import build_app

    try:
        build_app(parsed, ("generate",))
    except (AttributeError, ValueError) as error:  # of a user's middleware
        raise TangramError("vLLM refuses its options", where="vllm serve", got=error) from error


def run_server(options: Sequence[str]) -> None:
    """What the command `vllm serve` does."""
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

    cli_env_setup()
    parsed, _ = parse_serve_options(options)
    parsed.dispatch_function(parsed)


def engine_config(parsed: Namespace) -> Any:
    """The configuration of the engine that a server with these options starts.

    Raises:
        TangramError: vLLM refuses it.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    parsed.model = parsed.model_tag or parsed.model
    try:
        arguments = AsyncEngineArgs.from_cli_args(parsed)
        return arguments.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    except (ValueError, TypeError, OSError, RuntimeError, NotImplementedError) as error:
        what = _first_reason(str(error) or repr(error))
        raise TangramError("vLLM refuses its options", where="vllm serve", got=what) from error


def _first_reason(message: str) -> str:
    """Of an error of vLLM's or pydantic's, what a person needs."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    reasons = [line.removeprefix("Value error, ") for line in lines if line.startswith("Value error, ")]
    return [*reasons, *lines][0].split(" [type=")[0]


def settings_of(config: Any) -> dict[str, Any]:
    """What an engine is configured to do, under the names of vLLM's engine arguments."""
    model, cache, parallel, scheduler = (
        config.model_config,
        config.cache_config,
        config.parallel_config,
        config.scheduler_config,
    )
    multimodal = model.multimodal_config
    settings: dict[str, Any] = {
        "enable_prefix_caching": cache.enable_prefix_caching,
        "speculative_config": config.speculative_config and config.speculative_config.method,
        "kv_cache_dtype": cache.cache_dtype,
        "dtype": model.dtype,
        "runner": model.runner_type,
        "modalities": "more than text" if multimodal and not multimodal.language_model_only else "text",
        "kv_transfer_config": config.kv_transfer_config and config.kv_transfer_config.kv_connector,
        "kv_events_config": config.kv_events_config,
        "ec_transfer_config": getattr(config, "ec_transfer_config", None),
        "attention_backend": config.attention_config.backend,
        "block_size": cache.block_size if cache.user_specified_block_size else None,
        "max_model_len": model.max_model_len,
        "use_v2_model_runner": config.use_v2_model_runner,
    }
    places = (
        (cache, "kv_offloading_size kv_sharing_fast_prefill calculate_kv_scales"),
        (parallel, "tensor_parallel_size pipeline_parallel_size data_parallel_size enable_dbo ubatch_size"),
        (parallel, "decode_context_parallel_size prefill_context_parallel_size"),
        (scheduler, "max_num_batched_tokens max_num_scheduled_tokens max_num_seqs enable_chunked_prefill"),
        (scheduler, "long_prefill_token_threshold max_num_partial_prefills"),
    )
    for place, names in places:
        settings |= {name: getattr(place, name) for name in names.split() if hasattr(place, name)}
    return settings


def model_facts(config: Any) -> dict[str, Any]:
    """What an engine's model is, under the names of `refusals.planned_facts`."""
    model = config.model_config
    return {
        "number of layers": model.get_total_num_hidden_layers(),
        "number of KV heads": model.get_total_num_kv_heads(),
        "head_dim": model.get_head_size(),
        "hidden_size": model.get_hidden_size(),
        "vocab_size": model.get_vocab_size(),
    }


def model_config_json(config: Any) -> dict[str, Any]:
    """The `config.json` of an engine's model."""
    return dict(config.model_config.hf_config.to_dict())


def without_output_tokens(runner: Any) -> None:
    """Have a runner not wait for every step's tokens, as it does for logits processors that look at them; ours does not."""
    if all(str(name).startswith(f"{__package__}.") for name in runner.model_config.logits_processors or ()):
        runner.input_batch.logitsprocs_need_output_token_ids = False


@contextmanager
def memory_of_model(runner: Any) -> Iterator[None]:
    """Count what is allocated meanwhile as the model's, so that the cache is sized without it; on CPUs nobody counts."""
    if on_cpu():
        yield
        return
    before = torch.cuda.memory_allocated()
    yield
    runner.model_memory_usage += torch.cuda.memory_allocated() - before


def tensor_parallel_rank() -> int:
    """Of this worker."""
    return int(get_tensor_model_parallel_rank())


def attention_layers(runner: Any) -> Iterator[tuple[int, str, Any]]:
    """(layer index, name, layer) of a loaded model's decoder attention, by layer."""
    found = runner.compilation_config.static_forward_context.items()
    layers = [(extract_layer_index(name), name, layer) for name, layer in found if isinstance(layer, Attention)]
    return iter(sorted(layer for layer in layers if layer[2].attn_type == AttentionType.DECODER))


def attention_form(layer: Any) -> dict[str, Any]:
    """How a layer of a loaded model attends, under the names of `refusals.check_attention_form`."""
    impl, window = layer.impl, layer.sliding_window
    return {
        "softmax scale": float(impl.scale),
        "logit soft cap": getattr(impl, "logits_soft_cap", None) or None,
        "sliding window": window,
        "ALiBi": getattr(impl, "alibi_slopes", None) is not None,
        "sinks": getattr(impl, "sinks", None) is not None,
    }


def prompt_tokens_of(runner: Any, num_reqs: int) -> list[int]:
    """Prompt lengths of the first rows of a runner's batch, 0 for rows without a request."""
    batch = runner.input_batch
    live = min(num_reqs, batch.num_reqs)
    return [*batch.num_prompt_tokens[:live].tolist(), *[0] * (num_reqs - live)]


class LoadLogger(StatLoggerBase):
    """What an engine's steps say of its load, since it was last reset; made before the engine, which takes it for a factory."""

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:  # noqa: ARG002 - vLLM's signature
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.most_running, self.preemptions = 0, 0

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,  # noqa: ARG002 - vLLM's signature
        engine_idx: int = 0,  # noqa: ARG002 - vLLM's signature
    ) -> None:
        """See `StatLoggerBase.record`."""
        if scheduler_stats:
            self.most_running = max(self.most_running, scheduler_stats.num_running_reqs)
        if iteration_stats:
            self.preemptions += iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


class PlanLogger(StatLoggerBase):
    """Tells the metrics of a plan what vLLM says of steps, and of requests that ended.

    Args:
        metrics: `metrics.PlanMetrics` of this engine.
        num_pages: of its pool, the null page not counted.
    """

    def __init__(self, metrics: Any, num_pages: int) -> None:
        self._metrics, self._num_pages = metrics, num_pages

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,  # noqa: ARG002 - vLLM's signature
        engine_idx: int = 0,  # noqa: ARG002 - vLLM's signature
    ) -> None:
        """See `StatLoggerBase.record`; the share of the pool that is used stands for a whole number of pages."""
        if (step := scheduler_stats) is not None:
            waiting = step.num_waiting_reqs + step.num_skipped_waiting_reqs
            self._metrics.set_load(round(step.kv_cache_usage * self._num_pages), step.num_running_reqs, waiting)
        for request in iteration_stats.finished_requests if iteration_stats else ():
            if request.num_generation_tokens:  # else it may have ended before its prompt was computed
                self._metrics.count_prompt(request.num_prompt_tokens)

    def log(self) -> None:
        """Called every few seconds by a server, and by `LLM` while it has requests."""
        if line := self._metrics.log_line(monotonic()):
            log.info("%s", line)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""


def add_report(engine: Any, make_metrics: Callable[[int, str, str], Any]) -> None:
    """Have a front end tell the metrics of a plan what it tells vLLM's own; nothing where vLLM keeps no statistics.

    Args:
        engine: `LLMEngine` or `AsyncLLM`.
        make_metrics: (pages of the pool, the null page not counted; model name; number of the engine) -> `metrics.PlanMetrics`.
    """

    def make_report(config: Any, engine_index: int) -> PlanLogger:
        num_pages = config.cache_config.num_gpu_blocks - 1
        return PlanLogger(make_metrics(num_pages, config.model_config.served_model_name, str(engine_index)), num_pages)

    if manager := engine.logger_manager:
        manager.stat_loggers.append(PerEngineStatLoggerAdapter(engine.vllm_config, manager.engine_indexes, make_report))


def parse_engine_options(options: Sequence[str]) -> dict[str, Any]:
    """Engine arguments that options of the command line stand for, without those that are as they would be anyway.

    Raises:
        TangramError: vLLM does not know one, or not its value.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def refuse(message: str) -> None:
        raise TangramError("vLLM refuses its options", where="the command line", got=message)

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.error = refuse
    parsed = vars(parser.parse_args(list(options)))
    names = {field.name for field in fields(AsyncEngineArgs)}
    return {name: value for name, value in parsed.items() if name in names and value != parser.get_default(name)}


def start_engine(arguments: Mapping[str, Any], load: LoadLogger) -> Any:
    """An engine in a process of its own; its front end is this process."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[lambda *_: load])


def greedy(new_tokens: int) -> Any:
    """Sampling parameters of an answer of exactly so many tokens, which come as they are made, as numbers alone."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
