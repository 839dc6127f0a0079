"""Generated kernels on a GPU, against the reference. Triton must not interpret in this process."""

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from tangram_plan.codegen import emit  # noqa: E402
from tangram_plan.ir import AttentionForm, KVDtype, Plan  # noqa: E402
from tangram_plan.runtime.kernel_check import run_kernels, tolerance  # noqa: E402
from tests.plans import valid_plan  # noqa: E402

pytestmark = pytest.mark.gpu

# Every case builds ten kernels, and all of them take minutes. The dtype that engines serve comes first, so that a run that
# is cut short has seen it; float32, which none serves, makes do with two head dimensions here. The compiler and the
# interpreter see more of them without a GPU (tests/runtime/test_kernels.py).
HEAD_DIMS = {
    KVDtype.BFLOAT16: (64, 72, 80, 96, 112, 128, 192, 256),
    KVDtype.FLOAT16: (64, 72, 80, 96, 112, 128, 192, 256),
    KVDtype.FLOAT32: (64, 128),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """The reference's products are tiny: several workers with a thread per core each would wait for each other."""
    torch.set_num_threads(1)


def errors_on_gpu(plan: Plan, folder: Path) -> dict[str, dict[str, object]]:
    emit(plan, "0" * 64, folder)
    return run_kernels(folder, plan, "cuda")


@pytest.mark.parametrize(
    ("dtype", "head_dim", "gqa_ratio"),
    [
        (dtype, head_dim, gqa_ratio)
        for dtype, head_dims in HEAD_DIMS.items()
        for head_dim in head_dims
        for gqa_ratio in (1, 4, 5, 16)
    ],
)
def test_every_kernel_is_right_on_a_gpu(dtype: KVDtype, head_dim: int, gqa_ratio: int, tmp_path: Path) -> None:
    plan = valid_plan(dtype=dtype, head_dim=head_dim, gqa_ratio=gqa_ratio, tile_tokens=128)
    found = errors_on_gpu(plan, tmp_path)
    assert len(found) == 10
    for name, result in found.items():
        assert "failure" not in result, (name, result)
        assert float(str(result["max_error"])) <= tolerance(name, dtype), (name, result)


@pytest.mark.parametrize("gqa_ratio", [6, 7, 71])
def test_odd_gqa_ratios_are_right_on_a_gpu(gqa_ratio: int, tmp_path: Path) -> None:
    plan = valid_plan(dtype=KVDtype.BFLOAT16, head_dim=128, gqa_ratio=gqa_ratio, num_kv_heads=2, tensor_parallel=2)
    for name, result in errors_on_gpu(plan, tmp_path).items():
        assert float(str(result["max_error"])) <= tolerance(name, KVDtype.BFLOAT16), (name, result)


def test_soft_cap_and_sinks_are_right_on_a_gpu(tmp_path: Path) -> None:
    plan = valid_plan(dtype=KVDtype.BFLOAT16, head_dim=64, gqa_ratio=8, tile_tokens=16, step_tokens=64)
    form = AttentionForm(0.125, logit_softcap=20.0, has_sinks=True)
    for name, result in errors_on_gpu(replace(plan, model=replace(plan.model, attention=form)), tmp_path).items():
        assert float(str(result["max_error"])) <= tolerance(name, KVDtype.BFLOAT16), (name, result)
