"""vLLM's worker with two changes: planned layers attend through the runtime, and the cache is one pool of the plan's pages."""

import os
from pathlib import Path
from typing import Any

from tangram_plan.ir import Plan, longest_chunk
from tangram_plan.runtime.generated_kernels import GeneratedKernels
from tangram_plan.runtime.kernel_attention import KernelAttention
from tangram_plan.runtime.reference import torch_dtype
from tangram_plan.runtime.reference_attention import ReferenceAttention
from tangram_plan.runtime.serving_scorers import ServingScorer, load_scorer

from . import PLAN_KEY
from .backend import CompressedBackend, CompressedImpl
from .compat import (
    Worker,
    attention_form,
    attention_layers,
    errors_in_one_line,
    memory_of_model,
    on_cpu,
    prompt_tokens_of,
    tensor_parallel_rank,
    use_v1_runner,
    without_output_tokens,
)
from .engine import Engine
from .refusals import check_attention_form, check_engine
from .spec import PageSpec, load_plan, spec_head_size


class CompressedWorker(Worker):
    """The `worker_cls` of an engine with a plan."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        self.artefact = str(vllm_config.additional_config[PLAN_KEY])
        with errors_in_one_line():
            check_engine(vllm_config, load_plan(self.artefact), os.environ)
        super().__init__(vllm_config, *args, **kwargs)
        use_v1_runner(self)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, then put the runtime in the place of the attention of its planned layers."""
        super().load_model(*args, **kwargs)
        without_output_tokens(self.model_runner)
        plan = load_plan(self.artefact)
        attention = self.make_attention(plan)
        self._attention = attention
        engine = Engine(plan, attention, lambda num_reqs: prompt_tokens_of(self.model_runner, num_reqs))
        layers = list(attention_layers(self.model_runner))
        for index, name, layer in layers:
            with errors_in_one_line():
                check_attention_form(attention_form(layer), plan, layer=name)
            layer.impl = CompressedImpl(engine, index, getattr(layer.impl, "sinks", None))
            layer.attn_backend = CompressedBackend
        self._owner, *others = [(name, layer) for _, name, layer in layers]
        for _, layer in others:
            layer.kv_sharing_target_layer_name = self._owner[0]

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """One pool for all planned layers: the first one's, which the others share as vLLM lets layers share a cache."""
        super().get_kv_cache_spec()  # notes which layers share
        layout = load_plan(self.artefact).layout
        name, _ = self._owner
        spec = PageSpec(
            block_size=layout.page_slots,
            num_kv_heads=1,
            head_size=spec_head_size(layout),
            dtype=torch_dtype(layout),
            artefact=self.artefact,
        )
        assert spec.page_size_bytes == layout.page_bytes
        return {name: spec}

    def compile_or_warm_up_model(self, *args: Any, **kwargs: Any) -> Any:
        """Compile and load the kernels before the first request, and before CUDA graphs are captured."""
        if isinstance(self._attention, KernelAttention):
            self._attention.warm_up(self._owner[1].kv_cache.view(-1))
        return super().compile_or_warm_up_model(*args, **kwargs)

    def make_attention(self, plan: Plan) -> ReferenceAttention | KernelAttention:
        """The reference on CPUs, the kernels on GPUs."""
        return self.make_reference(plan) if on_cpu() else self.make_kernels(plan)

    def make_reference(self, plan: Plan) -> ReferenceAttention:
        """Attention in plain torch."""
        return ReferenceAttention(plan, tensor_parallel_rank(), self._load_scorer(plan))

    def make_kernels(self, plan: Plan) -> KernelAttention:
        """Attention by the generated kernels; what they allocate is counted as the model's."""
        limits = self.vllm_config.scheduler_config
        answer_chunk = min(limits.max_num_batched_tokens, plan.max_new_tokens)  # of a preempted request
        scorer = self._load_scorer(plan)
        with memory_of_model(self.model_runner):
            return KernelAttention(
                GeneratedKernels(Path(self.artefact), plan, str(self.device)),
                scorer,
                rank=tensor_parallel_rank(),
                max_requests=limits.max_num_seqs,
                max_tokens=self.vllm_config.model_config.max_model_len,
                max_chunk_tokens=max(longest_chunk(plan.compress_chunk_tokens), answer_chunk),
            )

    def _load_scorer(self, plan: Plan) -> ServingScorer:
        return load_scorer(plan, Path(self.artefact), tensor_parallel_rank(), self.device)
