"""The kernels of compression after a prefill chunk: what selects the tokens that stay, what moves them, and a pointwise scorer.

Selection is a radix select over all (request, KV head) pairs of a layer at once: a token's key is a strict total order in
56 bits, and each launch finds 8 bits of the lowest key that stays. A histogram of so few bins is made in registers, and few
of its counts go to global memory; wider digits would save launches, but a histogram's work grows with its bins.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tangram_plan.ir import EvictionRole, KVDtype, Plan, eviction_kernel_name

from .kernel_spec import (
    TRITON_DTYPES,
    KernelSpec,
    LawConstants,
    law_constants,
    next_power_of_two,
    page_stride_type,
    stride_type,
)

BLOCK_CANDIDATES = 1024  # of one program of the selection, and of one list of what moves
COUNTED_LISTS = 64  # whose counts are summed at once
COPY_BYTES = 8192  # of keys, and of values, that one program of the copy moves
COPY_MOVES = 32  # at most, of one program of the copy: each is compared with all counts of lists, in registers
SCORE_BYTES = 16384  # of keys that one program of the scorer reads
SCORE_TOKENS = 128  # at most, of one program of the scorer


@dataclass(frozen=True)
class SelectionKernel(KernelSpec):
    """One of the kernels that read positions and scores, and neither keys nor values.

    Args:
        page_slots: head-token slots of a page.
        position_word: where the positions of a page begin, in 4-byte words.
        page_words: distance of two pages, in 4-byte words.
        page_stride_type: Triton's type of that distance.
        block_candidates: candidates of one program.
        dtype: element type of keys and values.
        law: constants of the page law; only sinks and window matter here.
    """

    page_slots: int
    position_word: int
    page_words: int
    page_stride_type: str
    block_candidates: int
    dtype: KVDtype
    law: LawConstants


@dataclass(frozen=True)
class CopyKernel(KernelSpec):
    """Keys, values, positions and scores of the tokens that move.

    Args:
        head_dim: elements of a head.
        padded_head_dim: the power of two that `tl.arange` counts to.
        dtype: element type of keys and values.
        triton_dtype: the same, as Triton spells it.
        row_stride_type: Triton's type of the distance of two tokens of the chunk, which is in whole heads.
        page_slots: head-token slots of a page; where its values begin.
        position_word: where the positions of a page begin, in 4-byte words.
        page_elements: distance of two pages, in elements.
        page_stride_type: Triton's type of that distance.
        block_moves: tokens that one program moves.
        block_candidates: candidates of one list of what moves.
        counted_lists: lists whose counts are summed at once.
    """

    head_dim: int
    padded_head_dim: int
    dtype: KVDtype
    triton_dtype: str
    row_stride_type: str
    page_slots: int
    position_word: int
    page_elements: int
    page_stride_type: str
    block_moves: int
    block_candidates: int
    counted_lists: int


@dataclass(frozen=True)
class ScoreKernel(KernelSpec):
    """Scores of a chunk's tokens by their keys alone.

    Args:
        head_dim: elements of a head.
        padded_head_dim: the power of two that `tl.arange` counts to.
        dtype: element type of the keys.
        triton_dtype: the same, as Triton spells it.
        row_stride_type: Triton's type of the distance of two tokens, which is in whole heads.
        block_tokens: tokens of one program.
    """

    head_dim: int
    padded_head_dim: int
    dtype: KVDtype
    triton_dtype: str
    row_stride_type: str
    block_tokens: int


def eviction_kernels(plan: Plan) -> Iterator[KernelSpec]:
    """The kernels of compression after a prefill chunk."""
    for role in (EvictionRole.HISTOGRAM, EvictionRole.PLACE):
        yield _selection_kernel(plan, role)
    yield _copy_kernel(plan)
    yield _score_kernel(plan)


def _selection_kernel(plan: Plan, role: EvictionRole) -> SelectionKernel:
    layout = plan.layout
    return SelectionKernel(
        name=eviction_kernel_name(role, layout),
        template=f"{role}.py.j2",
        num_warps=4,
        num_stages=1,
        page_slots=layout.page_slots,
        position_word=layout.position_word,
        page_words=layout.page_bytes // 4,
        page_stride_type=stride_type(layout.page_bytes // 4),
        block_candidates=BLOCK_CANDIDATES,
        dtype=layout.dtype,
        law=law_constants(plan),
    )


def _copy_kernel(plan: Plan) -> CopyKernel:
    layout = plan.layout
    padded_head_dim = next_power_of_two(layout.head_dim)
    return CopyKernel(
        name=eviction_kernel_name(EvictionRole.COPY, layout),
        template=f"{EvictionRole.COPY}.py.j2",
        num_warps=4,
        num_stages=1,
        head_dim=layout.head_dim,
        padded_head_dim=padded_head_dim,
        dtype=layout.dtype,
        triton_dtype=TRITON_DTYPES[layout.dtype],
        row_stride_type=stride_type(layout.head_dim),
        page_slots=layout.page_slots,
        position_word=layout.position_word,
        page_elements=layout.page_elements,
        page_stride_type=page_stride_type(layout),
        block_moves=_rows(COPY_MOVES, COPY_BYTES, padded_head_dim, layout.dtype),
        block_candidates=BLOCK_CANDIDATES,
        counted_lists=COUNTED_LISTS,
    )


def _score_kernel(plan: Plan) -> ScoreKernel:
    layout = plan.layout
    padded_head_dim = next_power_of_two(layout.head_dim)
    return ScoreKernel(
        name=eviction_kernel_name(EvictionRole.SCORE_KEY_ANCHOR, layout),
        template=f"{EvictionRole.SCORE_KEY_ANCHOR}.py.j2",
        num_warps=4,
        num_stages=1,
        head_dim=layout.head_dim,
        padded_head_dim=padded_head_dim,
        dtype=layout.dtype,
        triton_dtype=TRITON_DTYPES[layout.dtype],
        row_stride_type=stride_type(layout.head_dim),
        block_tokens=_rows(SCORE_TOKENS, SCORE_BYTES, padded_head_dim, layout.dtype),
    )


def _rows(most: int, most_bytes: int, padded_head_dim: int, dtype: KVDtype) -> int:
    """Keys that one program handles: a power of two."""
    return max(1, min(most, most_bytes // (padded_head_dim * dtype.itemsize)))
