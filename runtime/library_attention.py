"""Attention of prefill chunks by a library: FlashAttention 3 where vLLM brings it for this GPU, else torch's own.

Keys and values are contiguous here: either a chunk's alone, or what `gather_past` made of past and chunk. Causal masks are
aligned to the ends of queries and keys, so that a chunk's query sees all of the past. In shapes, D is the head dimension.
"""

import importlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch

from tangram_plan.ir import AttentionForm, PageLayout, TangramError

from .reference import torch_dtype

# What FlashAttention 3 is told where nothing else is: every argument that is not named is None.
PLAIN_ARGUMENTS = {
    "is_causal": True,
    "window_size_left": -1,
    "window_size_right": -1,
    "is_rotary_interleaved": True,
    "num_splits": 0,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}


class LibraryAttention(Protocol):
    """What the gather path needs of a library."""

    def chunks(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        chunk_indptr: torch.Tensor,
        chunk_starts: Sequence[int],
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Causal attention of chunks that have no past.

        Args:
            q: [num_tokens, num_kv_heads * gqa_ratio, D].
            k: [num_tokens, num_kv_heads, D].
            v: the same, their values.
            chunk_indptr: int32, where each of these chunks begins, and where the last ends.
            chunk_starts: the same, on the host.
            sinks: float32 [num_kv_heads * gqa_ratio], if the model has them.
            out: as q; rows of these chunks are written.
        """

    def gathered(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_tokens: Sequence[int],
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Causal attention of one chunk, whose KV heads are sequences of their own.

        Args:
            q: [num_kv_heads, chunk_tokens, gqa_ratio, D], elements dense; a view.
            keys: [sum of kv_tokens, 1, D], dense; every head's past and chunk.
            values: the same, their values.
            kv_indptr: int32 [num_kv_heads + 1], where in `keys` each head begins.
            kv_tokens: tokens of every head.
            sinks: float32 [num_kv_heads * gqa_ratio], if the model has them.
            out: as q; written.
        """


class FlashAttention3:
    """FlashAttention 3 as vLLM builds it.

    Its sinks are those of a sequence's query heads; here sequences differ in them, so that they are put into the output
    afterwards: a logit more divides it by `1 + exp(sink - lse)`.

    Args:
        layout: head dimension and dtype.
        form: of the model's attention.
        device: a GPU.

    Raises:
        Exception: of any kind, if it is not installed, or not made for this GPU, dtype or head dimension.
    """

    def __init__(self, layout: PageLayout, form: AttentionForm, device: torch.device | str) -> None:
        importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")  # registers the operator
        self._forward = torch.ops._vllm_fa3_C.fwd.default  # noqa: SLF001  the operator's name
        self._names = [argument.name for argument in self._forward._schema.arguments]  # noqa: SLF001  nowhere else
        self._plain = PLAIN_ARGUMENTS | {
            "softmax_scale": form.softmax_scale,
            "softcap": form.logit_softcap or 0.0,
        }
        q = torch.zeros(3, 2, 2, layout.head_dim, dtype=torch_dtype(layout), device=device).transpose(0, 1)
        keys = torch.zeros(8, 1, layout.head_dim, dtype=q.dtype, device=device)
        indptr = torch.arange(0, 9, 4, dtype=torch.int32, device=device)
        self.gathered(q, keys, keys, indptr, (4, 4), None, torch.empty_like(q))

    def chunks(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        chunk_indptr: torch.Tensor,
        chunk_starts: Sequence[int],
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """See `LibraryAttention`."""
        longest = max(end - start for start, end in pairwise(chunk_starts))
        lse = self._call(
            q=q,
            k=k,
            v=v,
            out=out,
            cu_seqlens_q=chunk_indptr,
            cu_seqlens_k=chunk_indptr,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
        )
        if sinks is not None:
            rows = slice(chunk_starts[0], chunk_starts[-1])
            out[rows].mul_(torch.sigmoid(lse[:, rows] - sinks[:, None]).T[..., None])

    def gathered(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_tokens: Sequence[int],
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """See `LibraryAttention`."""
        num_kv_heads, chunk_tokens, gqa_ratio, _ = q.shape
        lse = self._call(
            q=q,
            k=keys,
            v=values,
            out=out,
            cu_seqlens_k=kv_indptr,
            max_seqlen_q=chunk_tokens,
            max_seqlen_k=max(kv_tokens),
        )
        if sinks is not None:
            shares = torch.sigmoid(lse - sinks.view(num_kv_heads, gqa_ratio, 1))
            out.mul_(shares.transpose(1, 2)[..., None])

    def _call(self, **given: object) -> torch.Tensor:
        """Log-sum-exp float32 of the rows: [num_q_heads, num_tokens], or [sequences, num_q_heads, num_tokens]."""
        arguments = self._plain | given
        result: Sequence[torch.Tensor] = self._forward(*(arguments.get(name) for name in self._names))
        return result[1]


class TorchAttention:
    """Attention of torch, head by head; for GPUs without FlashAttention 3, and for CPUs.

    Args:
        form: of the model's attention.

    Raises:
        TangramError: if it has a soft cap or sinks, which torch does not know.
    """

    def __init__(self, form: AttentionForm) -> None:
        if form.logit_softcap is not None or form.has_sinks:
            raise TangramError(
                "no library attention has this form here",
                got=f"{form}",
                expected="no soft cap and no sinks, unless FlashAttention 3 is there",
                fix="let the generated kernel attend",
            )
        self._scale = form.softmax_scale

    def chunks(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        chunk_indptr: torch.Tensor,  # noqa: ARG002  not read on the host
        chunk_starts: Sequence[int],
        sinks: torch.Tensor | None,  # noqa: ARG002  refused above
        out: torch.Tensor,
    ) -> None:
        """See `LibraryAttention`."""
        for start, end in pairwise(chunk_starts):
            queries, keys, values = (part[None, start:end].transpose(1, 2) for part in (q, k, v))
            found = torch.nn.functional.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=self._scale, enable_gqa=True
            )
            out[start:end] = found[0].transpose(0, 1)

    def gathered(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        kv_indptr: torch.Tensor,  # noqa: ARG002  not read on the host
        kv_tokens: Sequence[int],
        sinks: torch.Tensor | None,  # noqa: ARG002  refused above
        out: torch.Tensor,
    ) -> None:
        """See `LibraryAttention`."""
        from torch.nn.attention.bias import causal_lower_right

        start = 0
        for head, tokens in enumerate(kv_tokens):
            queries = q[head].transpose(0, 1)[None]
            key, value = (
                part[start : start + tokens].transpose(0, 1)[None].expand(-1, queries.shape[1], -1, -1)
                for part in (keys, values)
            )
            mask = causal_lower_right(queries.shape[2], tokens)
            found = torch.nn.functional.scaled_dot_product_attention(
                queries, key, value, attn_mask=mask, scale=self._scale
            )
            out[head] = found[0].transpose(0, 1)
            start += tokens


def flash_attention_3(layout: PageLayout, form: AttentionForm, device: torch.device | str) -> FlashAttention3 | None:
    """FlashAttention 3, if it works for this head dimension and dtype on this GPU."""
    if torch.device(device).type != "cuda" or torch.version.hip is not None:
        return None
    try:
        return FlashAttention3(layout, form, device)
    except Exception:  # not installed, or not for this GPU: whatever is raised is the answer
        return None
