"""The attention backend: hands every step's requests to the runtime, and every layer's queries, keys and values."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tangram_plan.runtime.batch import Batch

from .compat import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from .engine import Engine


@dataclass
class StepMetadata(AttentionMetadata):
    """A step of the runtime."""

    step: Any


class CompressedMetadataBuilder(AttentionMetadataBuilder[StepMetadata]):
    """Makes a step's metadata, once for all layers."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold: int | None = 1  # requests with one token come first

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]
        self._engine: Engine = layer.impl.engine

    def build(
        self,
        common_prefix_len: int,  # noqa: ARG002 - vLLM's signature
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,  # noqa: ARG002 - vLLM's signature
    ) -> StepMetadata:
        """See `AttentionMetadataBuilder.build`."""
        common = common_attn_metadata
        prompt_tokens = self._engine.prompt_tokens(common.num_reqs)
        lengths = common.seq_lens_cpu_upper_bound[: common.num_reqs].tolist()  # exact: nothing is speculated
        num_tokens = [total if prompt else 0 for total, prompt in zip(lengths, prompt_tokens, strict=True)]
        batch = Batch(prompt_tokens, num_tokens, common.query_start_loc_cpu[: common.num_reqs + 1].tolist())
        return StepMetadata(self._engine.attention.begin(batch, common.block_table_tensor))


class CompressedImpl(AttentionImpl[StepMetadata]):
    """Attention of one layer.

    Args:
        engine: of this worker.
        layer: index in the model.
        sinks: logits of the query heads, if the model has them.
    """

    def __init__(self, engine: Engine, layer: int, sinks: torch.Tensor | None) -> None:
        self.engine, self._layer = engine, layer
        self._sinks = None if sinks is None else sinks.float()

    def forward(
        self,
        layer: Any,  # noqa: ARG002 - vLLM's signature
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: StepMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,  # noqa: ARG002 - vLLM's signature
        output_block_scale: torch.Tensor | None = None,  # noqa: ARG002 - vLLM's signature
    ) -> torch.Tensor:
        """See `AttentionImpl.forward`; there is no metadata while vLLM measures memory."""
        if attn_metadata is None:
            return output.zero_()
        out = output.view(query.shape)
        self.engine.attention.attend(
            self._layer, query, key, value, kv_cache.view(-1), attn_metadata.step, out, sinks=self._sinks
        )
        return output


class CompressedBackend(AttentionBackend):
    """What planned layers name as their backend."""

    accept_output_buffer = True
    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        """Of vLLM's names, the one for backends from outside."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[CompressedImpl]:
        """Of layers."""
        return CompressedImpl

    @staticmethod
    def get_builder_cls() -> type[CompressedMetadataBuilder]:
        """Of metadata."""
        return CompressedMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:  # noqa: ARG004 - vLLM's signature
        """Any page of a plan; it is never split."""
        return [MultipleOf(16)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",  # noqa: ARG004
    ) -> tuple[int, ...]:
        """Pages, and elements of a page (0.26; later versions take it from the spec)."""
        return num_blocks, num_kv_heads * block_size * 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """As they stand."""
        return (0, 1, 2) if include_num_layers_dimension else (0, 1)
