from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tangram_plan.bench.serve import (
    PLAN,
    Answer,
    Workload,
    arrivals,
    full_token_bytes,
    kv_share,
    measure,
    retained_bytes,
    serve_table,
)
from tangram_plan.ir import TangramError
from tests.command_line import CommandLine, assert_refused
from tests.plans import valid_plan

TWO_GROUPS = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 64, "group_sizes": (2, 2), "sink_tokens": 4}


def test_a_workload_is_read_as_it_is_written() -> None:
    assert Workload.parse("16x65536+1024") == Workload(16, 65536, 1024)
    assert str(Workload(16, 65536, 1024)) == "16x65536+1024"
    assert Workload(16, 65536, 1024).tokens == 66560


@pytest.mark.parametrize("text", ["", "16x65536", "0x65536+1024", "16x65536+0", "16 x 65536 + 1024", "16x65536+1024x"])
def test_a_workload_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(TangramError, match="REQUESTSxPROMPT"):
        Workload.parse(text)


def test_all_requests_arrive_at_once_without_a_rate() -> None:
    assert arrivals(3, None, 0) == [0.0, 0.0, 0.0]


def test_arrivals_are_a_poisson_process_of_the_seed() -> None:
    times = arrivals(20_001, 4.0, 7)
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert times[0] == 0.0
    assert mean == pytest.approx(0.25, rel=0.03)
    assert deviation == pytest.approx(mean, rel=0.03)
    assert times == arrivals(20_001, 4.0, 7) != arrivals(20_001, 4.0, 8)


def test_times_by_hand() -> None:
    # Two requests, 1 s apart: first tokens after 1 s and 3 s, then a token every 10 ms and every 30 ms.
    answers = [Answer(10.0, [11.0, 11.01, 11.02]), Answer(11.0, [14.0, 14.03, 14.06, 14.09])]
    assert measure(answers) == {
        "seconds": pytest.approx(4.09),
        "prefill_seconds": pytest.approx(4.0),
        "requests_per_second": pytest.approx(2 / 4.09),
        "step_ms": pytest.approx(30.0),
        "ttft_median": pytest.approx(2.0),
        "ttft_p99": pytest.approx(3.0),
    }


def test_bytes_by_hand() -> None:
    # 2 layers x 2 KV heads in float32: a token's keys and values are 4 * 2 * 64 * 4 bytes. Of 100 + 10 tokens one group keeps
    # all, the other 4 sinks, 8 in the window, half of 88, and all 10 decoded.
    plan = valid_plan(rho=(65536, 32768), **TWO_GROUPS)  # type: ignore[arg-type]
    assert full_token_bytes(plan) == 2048
    assert retained_bytes(plan, 100, 110) == (2 * 110 + 2 * (4 + 8 + 44 + 10)) * 512
    pages = plan.num_pages(100, 110)
    assert kv_share(plan, Workload(3, 100, 10)) == pytest.approx(pages * plan.layout.page_bytes / (110 * 2048))


def test_both_ranks_count() -> None:
    plan = valid_plan(rho=(65536,), num_layers=2, num_kv_heads=4, head_dim=64, tensor_parallel=2)
    assert retained_bytes(plan, 100, 110) == 110 * full_token_bytes(plan) == 110 * 8 * 512


def test_a_table_says_what_was_measured() -> None:
    run: dict[str, Any] = {
        "workload": "2x900+8",
        "engine": PLAN,
        "seconds": 6.0,
        "prefill_seconds": 5.0,
        "requests_per_second": 1 / 3,
        "step_ms": 12.0,
        "bound_ms": 10.0,
        "ttft_median": 4.0,
        "ttft_p99": 5.0,
        "in_flight": 2,
        "kv_share": 0.387,
        "preemptions": 0,
        "speedup": 1.5,
    }
    table = serve_table({"kv_gib": 60, "gpu": None, "runs": [run]})
    cells = [next(iter(column.cells)) for column in table.columns]
    assert cells == ["2x900+8", "plan", "38.7%", "6.00", "5.00", "1.50x", "2", "12.00", "1.20x", "4.00, 5.00"]


def test_what_cannot_be_measured_is_refused_before_an_engine_is_looked_for(
    cli: CommandLine, model_yaml: Path, tmp_path: Path
) -> None:
    set_to = ("--set", "max_new_tokens=16", "--set", "scorer=recent")
    assert cli("build", model_yaml, "-o", tmp_path / "plan", "-q", *set_to).code == 0
    base = ("bench", "serve", tmp_path / "plan", "--model", "some/model")
    serve = (*base, "--kv-gib", "1", "-w")
    assert_refused(cli(*serve, "2x100+17"), "--workload", "got 17", "at most 16")
    assert_refused(cli(*serve, "100+16"), "REQUESTSxPROMPT+NEW")
    assert_refused(cli(*serve, "2x100+16", "--only", "mine"), "--only", "stock or plan")
    assert_refused(cli(*base, "--kv-gib", "0.0001", "-w", "2x100+16"), "--kv-gib", "not one request fits")
