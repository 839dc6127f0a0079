"""All that this plugin knows of vLLM's insides: what it subclasses, which attributes it reads, and what differs between versions.

Imported only where vLLM runs. A version outside `TESTED_VERSIONS` is refused when a plan is to be served, never before.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import vllm
from vllm.distributed import get_tensor_model_parallel_rank
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
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
from vllm.v1.request import Request

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
    "MultipleOf",
    "Request",
    "Scheduler",
    "SchedulerOutput",
    "Worker",
    "attention_layers",
    "check_version",
    "memory_of_model",
    "on_cpu",
    "prompt_tokens_of",
    "register_spec",
    "tensor_parallel_rank",
    "use_v1_runner",
]

TESTED_VERSIONS = {"cpu": ("0.32.0",), "cuda": ("0.26.0",)}


def check_version() -> None:
    """That this version of vLLM was tested.

    Raises:
        TangramError: it was not.
    """
    platform = "cpu" if on_cpu() else "cuda"
    version = vllm.__version__.split("+")[0]
    if version not in TESTED_VERSIONS[platform]:
        tested = ", ".join(TESTED_VERSIONS[platform])
        raise TangramError(
            f"this version of vLLM is not tested on {platform}",
            got=version,
            expected=tested,
            fix=f"install vLLM {tested}",
        )


def on_cpu() -> bool:
    """Whether this vLLM runs on CPUs."""
    return bool(current_platform.is_cpu())


def register_spec(spec: type, manager: type) -> None:
    """Name the manager of a kind of cache; again is harmless. The registry only fills itself while it is empty: so first of all."""
    KVCacheSpecRegistry._ensure_registered()  # noqa: SLF001
    KVCacheSpecRegistry.register(spec, manager, FullAttentionSpec)


def use_v1_runner(worker: Any) -> None:
    """Have a worker build the first model runner: the second computes widths of block tables without asking the spec (0.26)."""
    worker.use_v2_model_runner = False


@contextmanager
def memory_of_model(runner: Any) -> Iterator[None]:
    """Count what is allocated meanwhile as the model's, so that the cache is sized without it."""
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


def prompt_tokens_of(runner: Any, num_reqs: int) -> list[int]:
    """Prompt lengths of the first rows of a runner's batch, 0 for rows without a request."""
    batch = runner.input_batch
    live = min(num_reqs, batch.num_reqs)
    return [*batch.num_prompt_tokens[:live].tolist(), *[0] * (num_reqs - live)]
