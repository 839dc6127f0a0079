from dataclasses import replace

import pytest

from tangram_plan.codegen import DecodeKernel, specialize
from tangram_plan.ir import KVDtype, LayerKind, LayerShape
from tests.plans import valid_plan


def decode_kernels(**shape: object) -> list[DecodeKernel]:
    return [spec for spec in specialize(valid_plan(**shape)) if isinstance(spec, DecodeKernel)]  # type: ignore[arg-type]


def test_kernels_of_a_plan() -> None:
    names = [spec.name for spec in specialize(valid_plan(gqa_ratio=3, dtype=KVDtype.BFLOAT16))]
    assert names == [
        "decode_attention_d64_gqa3_bfloat16",
        "evict_copy_d64_bfloat16",
        "evict_histogram_d64_bfloat16",
        "evict_place_d64_bfloat16",
        "gather_past_d64_bfloat16",
        "page_table",
        "plan_static_splits",
        "plan_tile_queue",
        "prefill_attention_d64_gqa3_bfloat16",
        "score_key_anchor_d64_bfloat16",
    ]


def test_layers_that_share_a_planned_cache_have_kernels_and_others_have_none() -> None:
    plan = valid_plan(num_layers=2, num_kv_heads=4, gqa_ratio=3)
    shared = LayerShape(LayerKind.SHARED, 4, 20, 1)  # five query heads per KV head of layer 1
    sliding = LayerShape(LayerKind.SLIDING, 4, 28, 3)
    reads_sliding = LayerShape(LayerKind.SHARED, 4, 32, 3)
    no_attention = LayerShape(LayerKind.NONE, 0, 0, 5)
    model = replace(plan.model, layers=(*plan.model.layers, shared, sliding, reads_sliding, no_attention))
    specs = specialize(replace(plan, model=model))
    assert {spec.gqa_ratio for spec in specs if isinstance(spec, DecodeKernel)} == {3, 5}


@pytest.mark.parametrize(("gqa_ratio", "rows"), [(1, 16), (7, 16), (16, 16), (17, 32), (71, 128)])
def test_query_rows_fill_a_tensor_core(gqa_ratio: int, rows: int) -> None:
    assert {spec.padded_gqa_ratio for spec in decode_kernels(gqa_ratio=gqa_ratio)} == {rows}


@pytest.mark.parametrize(
    ("head_dim", "padded"), [(8, 16), (64, 64), (72, 128), (80, 128), (96, 128), (192, 256), (256, 256)]
)
def test_head_dim_is_padded_to_a_power_of_two(head_dim: int, padded: int) -> None:
    assert {spec.padded_head_dim for spec in decode_kernels(head_dim=head_dim)} == {padded}


@pytest.mark.parametrize(
    ("shape", "step_tokens"),
    [
        ({"step_tokens": 16}, 16),
        ({"step_tokens": 128}, 128),
        ({"step_tokens": 512}, 256),
        ({"step_tokens": 128, "gqa_ratio": 33}, 64),
    ],
)
def test_a_step_is_what_was_measured_as_far_as_registers_hold_it(shape: dict[str, int], step_tokens: int) -> None:
    kernels = decode_kernels(dtype=KVDtype.BFLOAT16, **shape)
    assert {spec.step_tokens for spec in kernels} == {step_tokens}


def test_page_geometry_is_the_plans() -> None:
    (spec,) = decode_kernels(page_slots=112, dtype=KVDtype.FLOAT16)
    assert (spec.page_slots, spec.page_elements) == (112, 112 * (2 * 64 + 4))
    assert (spec.group_sizes, spec.tokens_per_page) == ((1, 2, 3), (32, 48, 112))


@pytest.mark.parametrize(("head_dim", "row_stride"), [(64, "i32:16"), (72, "i32"), (80, "i32:16")])
def test_strides_are_declared_aligned_only_if_they_must_be(head_dim: int, row_stride: str) -> None:
    strides = {(spec.row_stride_type, spec.page_stride_type) for spec in decode_kernels(head_dim=head_dim)}
    assert strides == {(row_stride, "i32:16")}
