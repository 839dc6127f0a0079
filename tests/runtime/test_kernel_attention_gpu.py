"""Steps of an engine through the generated kernels on a GPU, against the reference. Triton must not interpret in this process."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from tangram_plan.ir import KVDtype
from tests.plans import valid_plan
from tests.serving_runs import Arrival, run_engine

pytestmark = pytest.mark.gpu

ARRIVALS = [
    Arrival(0, 1, 40),
    Arrival(0, 700, 60, preempted_at=730),
    Arrival(1, 1500, 3),
    Arrival(1, 257, 1),
    Arrival(2, 33, 90),
    Arrival(5, 256, 2),
]


@pytest.mark.parametrize("scorer", ["recent", "key_anchor"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_batch_that_changes_from_step_to_step_on_a_gpu(head_dim: int, scorer: str) -> None:
    """In float32 the kept positions are those of the reference; `run_engine` compares every byte of the pool."""
    plan = valid_plan(
        num_layers=3,
        head_dim=head_dim,
        page_slots=128,
        rho=[40000, 9000, 0],
        compress_chunk_tokens=256,
        max_new_tokens=128,
    )
    assert run_engine(plan, ARRIVALS, device="cuda", scorer=scorer) < 2e-5


def test_bfloat16_on_a_gpu() -> None:
    plan = valid_plan(
        num_layers=2,
        head_dim=128,
        dtype=KVDtype.BFLOAT16,
        page_slots=128,
        rho=[40000, 9000, 0],
        compress_chunk_tokens=256,
        max_new_tokens=128,
    )
    assert run_engine(plan, ARRIVALS, device="cuda") < 1.6e-2
