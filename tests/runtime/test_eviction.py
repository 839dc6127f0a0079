"""Eviction: the reference against a law written out in Python, the generated kernels against the reference."""

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

torch = pytest.importorskip("torch", reason="kernels take torch tensors")
pytest.importorskip("triton", reason="generated kernels are Triton")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from tangram_plan.ir import RHO_ONE, EvictionRole, KVDtype, Plan, TangramError  # noqa: E402
from tangram_plan.runtime import kernel_check  # noqa: E402
from tangram_plan.runtime.eviction import chunks_by_law, make_chunks  # noqa: E402
from tangram_plan.runtime.eviction_problem import (  # noqa: E402
    ODD_SCORES,
    Problem,
    Request,
    make_problem,
    request_by_law,
    request_of_any,
)
from tangram_plan.runtime.eviction_reference import key_anchor_scores, survivors  # noqa: E402
from tangram_plan.runtime.kernel_check import ARCHITECTURES, SHARED_MEMORY_BYTES  # noqa: E402
from tangram_plan.runtime.reference import local_heads, page_views, slots_of  # noqa: E402
from tests import eviction_runs as runs  # noqa: E402
from tests.plans import build_plan, valid_plan  # noqa: E402

NO_DEADLINE = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
CHECKED_PLAN = valid_plan(num_layers=2, num_kv_heads=1, head_dim=16, group_sizes=[2], rho=[20000])


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    """A worker in which TRITON_INTERPRET was set before triton was imported; what this process imported does not matter."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
            executor.submit(os.getpid).result()
        executor.submit(torch.set_num_threads, 1).result()
        yield executor


class Token(NamedTuple):
    """What a slot holds; key and value by their bytes."""

    position: int
    score: float
    key: bytes
    value: bytes


def slots_by_the_law(past: Sequence[Token], chunk: Sequence[Token], kept: int, plan: Plan) -> list[Token]:
    """Slots after eviction, one rule a line."""
    end = chunk[-1].position + 1

    def rank(token: Token) -> tuple[bool, bool, float, int]:
        sink, window = plan.budgets.sink_tokens, plan.budgets.window_tokens
        if token.position < sink or token.position >= end - window:
            return True, True, 0.0, -token.position
        return False, not math.isnan(token.score), 0.0 if math.isnan(token.score) else token.score, -token.position

    stay = {token.position for token in sorted([*past, *chunk], key=rank, reverse=True)[:kept]}
    slots: list[Token | None] = [token if token.position in stay else None for token in past[:kept]]
    slots += [None] * (kept - len(slots))
    for token in [*past[kept:], *chunk]:
        if token.position in stay:
            slots[slots.index(None)] = token
    return [token for token in slots if token is not None]


def tokens_of(problem: Problem, plan: Plan, pool: Any, request: int, head: int, count: int) -> list[Token]:
    """The first so many slots of a pair."""
    views = page_views(pool, plan.layout)
    group_id, column = local_heads(plan, problem.rank, problem.layer)[problem.heads[head]]
    pages = problem.page_table.pages(request * len(plan.grouping.groups) + group_id)
    tokens_per_page = plan.layout.tokens_per_page(plan.grouping.groups[group_id].num_members)
    page, slot = slots_of(pages, column, tokens_per_page, count)
    return [
        Token(
            int(views.positions[where]),
            float(views.scores[where]),
            views.keys[where].numpy().tobytes(),
            views.values[where].numpy().tobytes(),
        )
        for where in zip(page.tolist(), slot.tolist(), strict=True)
    ]


def draw_requests(data: st.DataObject, plan: Plan, most: int) -> list[Request]:
    """One to three requests, by the law or of any numbers of tokens."""
    requests = []
    for _ in range(data.draw(st.integers(1, 3))):
        start, new = data.draw(st.integers(0, most)), data.draw(st.integers(0, most))
        if data.draw(st.booleans()):
            requests.append(request_by_law(plan, start + new + data.draw(st.integers(0, 50)), start, new))
        else:
            held = data.draw(st.integers(0, start))
            kept = data.draw(st.integers(min(1, held + new), held + new)) if new else held
            requests.append(request_of_any(plan, start, new, held, kept))
    return requests


@given(data=st.data())
@settings(NO_DEADLINE, max_examples=40)
def test_the_reference_keeps_what_the_law_says_where_it_says(data: st.DataObject) -> None:
    plan = build_plan(
        num_layers=1,
        num_kv_heads=2,
        head_dim=8,
        page_slots=48,
        sink_tokens=data.draw(st.integers(0, 5)),
        window_tokens=data.draw(st.integers(0, 9)),
        rho=[data.draw(st.integers(0, RHO_ONE))],
    )
    requests = draw_requests(data, plan, 40)
    odd_scores = data.draw(st.sampled_from([0.0, 0.7, 1.0]))
    problem = make_problem(plan, requests, odd_scores=odd_scores, seed=data.draw(st.integers(0, 99)))
    first = 0
    for request, (start, new, held, kept) in enumerate(requests):
        for head, (group_id, _) in enumerate(local_heads(plan, 0, 0)):
            past = tokens_of(problem, plan, problem.pool, request, head, held[group_id])
            chunk = [
                Token(
                    start + token,
                    float(problem.scores[head, first + token]),
                    problem.k[first + token, head].numpy().tobytes(),
                    problem.v[first + token, head].numpy().tobytes(),
                )
                for token in range(new)
            ]
            expected = slots_by_the_law(past, chunk, kept[group_id], plan) if new else past
            found = tokens_of(problem, plan, problem.expected_pool, request, head, len(expected))
            assert len(expected) == kept[group_id]
            assert list(map(repr, found)) == list(map(repr, expected))  # NaN is like NaN, and -0.0 unlike 0.0
        first += new


@given(data=st.data())
@settings(NO_DEADLINE, max_examples=40)
def test_who_stays_does_not_depend_on_slots(data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(1, 30))
    positions = torch.randperm(50, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))[:num_tokens]
    scores = torch.tensor(data.draw(st.lists(st.sampled_from(ODD_SCORES), min_size=num_tokens, max_size=num_tokens)))
    order = torch.tensor(data.draw(st.permutations(range(num_tokens))))
    kept, protected = data.draw(st.integers(0, num_tokens)), positions < 3
    stay = positions[survivors(positions, scores, protected, kept)]
    reordered = positions[order][survivors(positions[order], scores[order], protected[order], kept)]
    assert len(stay) == kept
    assert set(stay.tolist()) == set(reordered.tolist())


def test_key_anchor_scores_are_minus_cosines() -> None:
    k = torch.tensor([[[3.0, 4.0], [0.0, 0.0]], [[-1.0, 0.0], [0.0, 2.0]]])
    anchors = torch.tensor([[1.0, 0.0], [0.0, -5.0]])
    assert torch.allclose(key_anchor_scores(k, anchors), torch.tensor([[-0.6, 1.0], [0.0, 1.0]]))


@given(data=st.data())
@settings(NO_DEADLINE, max_examples=8)
def test_kernels_agree_with_the_reference(interpreter: ProcessPoolExecutor, data: st.DataObject) -> None:
    tensor_parallel = data.draw(st.sampled_from([1, 2]))
    plan = build_plan(
        num_layers=2,
        num_kv_heads=2 * tensor_parallel,
        head_dim=data.draw(st.sampled_from([16, 24])),
        page_slots=data.draw(st.sampled_from([48, 64, 112])),
        tensor_parallel=tensor_parallel,
        sink_tokens=data.draw(st.integers(0, 5)),
        window_tokens=data.draw(st.integers(0, 20)),
        rho=sorted(data.draw(st.lists(st.integers(0, RHO_ONE), min_size=1, max_size=4)), reverse=True),
    )
    requests = draw_requests(data, plan, 110)
    rank, layer = data.draw(st.integers(0, tensor_parallel - 1)), data.draw(st.integers(0, 1))
    odd_scores, seed = data.draw(st.sampled_from([0.0, 0.7, 1.0])), data.draw(st.integers(0, 99))
    assert interpreter.submit(runs.run_step, plan, rank, layer, requests, odd_scores, seed).result() == 0.0


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(head_dim, KVDtype.BFLOAT16) for head_dim in (64, 80, 96, 128, 256)]
    + [(80, KVDtype.FLOAT16), (256, KVDtype.FLOAT32)],
)
def test_any_head_dim_and_dtype(interpreter: ProcessPoolExecutor, head_dim: int, dtype: KVDtype) -> None:
    plan = valid_plan(num_layers=1, num_kv_heads=2, head_dim=head_dim, dtype=dtype, page_slots=32)
    requests = [request_by_law(plan, 120, 60, 60), request_of_any(plan, 0, 20, 0, 20)]
    assert interpreter.submit(runs.run_step, plan, 0, 0, requests, 0.3, 0).result() == 0.0
    assert interpreter.submit(runs.run_scores, plan, 70, 2).result() < 1e-5


@pytest.mark.parametrize(
    ("chunk_start", "chunk_tokens", "held", "kept"),
    [
        pytest.param(2100, 30, 1100, 1050, id="lists of several blocks, and a cache that shrinks"),
        pytest.param(1500, 600, 1500, 2100, id="everything stays"),
        pytest.param(2000, 1100, 700, 1, id="one token stays"),
        pytest.param(3000, 1200, 900, 1030, id="most tokens tie"),
    ],
)
def test_more_candidates_than_one_program_has(
    interpreter: ProcessPoolExecutor, chunk_start: int, chunk_tokens: int, held: int, kept: int
) -> None:
    plan = valid_plan(num_layers=1, num_kv_heads=1, head_dim=16)
    request = request_of_any(plan, chunk_start, chunk_tokens, held, kept)
    assert interpreter.submit(runs.run_step, plan, 0, 0, [request], 1.0, 0).result() == 0.0


def test_buffers_serve_steps_of_any_size_in_turn(interpreter: ProcessPoolExecutor) -> None:
    plan = valid_plan(num_layers=1, num_kv_heads=2, head_dim=16)
    steps = [
        [request_of_any(plan, 90, 60, 90, 75)],
        [request_of_any(plan, 90, 10, 80, 40), request_of_any(plan, 9, 0, 9, 9), request_of_any(plan, 70, 80, 60, 50)],
        [request_of_any(plan, 9, 0, 9, 9)],
        [request_of_any(plan, 90, 10, 80, 40), request_of_any(plan, 70, 80, 60, 140)],
    ]
    assert interpreter.submit(runs.run_steps_in_turn, plan, steps).result() == [True] * 4


def test_pool_beyond_2_to_31_elements(interpreter: ProcessPoolExecutor) -> None:
    plan = valid_plan(num_layers=1, num_kv_heads=1, head_dim=64, page_slots=256, dtype=KVDtype.FLOAT16)
    request = request_of_any(plan, 700, 100, 650, 640)
    assert interpreter.submit(runs.run_beyond_31_bits, plan, request).result()


def test_the_check_accepts_kernels_as_generated(interpreter: ProcessPoolExecutor) -> None:
    errors = interpreter.submit(runs.run_check, CHECKED_PLAN).result()
    assert len(errors) == 4
    assert max(errors.values()) < 1e-5
    assert [name for name, error in errors.items() if error > 0] in ([], ["score_key_anchor_d16_float32"])


def test_more_lists_than_are_counted_at_once(interpreter: ProcessPoolExecutor) -> None:
    few = interpreter.submit(
        runs.run_check,
        CHECKED_PLAN,
        "evict_copy",
        "COUNTED_LISTS = tl.constexpr(64)",
        "COUNTED_LISTS = tl.constexpr(1)",
    )
    assert few.result()["evict_copy_d16_float32"] == 0.0


@pytest.mark.parametrize(
    ("kernel", "old", "new"),
    [
        pytest.param("evict_", "tl.where(magnitude > 0x7F800000, -0x80000000, rising)", "rising", id="NaN"),
        pytest.param("evict_", "tl.where(magnitude == 0, 0, rising)", "rising", id="negative zero"),
        pytest.param("evict_", "tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)", "bits", id="negative scores"),
        pytest.param("evict_", "(0xFFFFFF - position)", "position", id="ties"),
        pytest.param("evict_", "(position < SINK_TOKENS) |", "", id="sinks"),
        pytest.param("evict_", "| (position >= window_start)", "", id="window"),
        pytest.param("evict_", "slot = column * tokens_per_page + ", "slot = ", id="column"),
        pytest.param("evict_", "(remaining == tl.sum(", "(remaining != tl.sum(", id="last of a digit"),
        pytest.param("evict_histogram", "(candidate < num_candidates) &", "", id="candidates that are none"),
        pytest.param(
            "evict_histogram", "tl.store(histogram_ptr + NUM_BINS", "(histogram_ptr + NUM_BINS", id="counts left"
        ),
        pytest.param(
            "evict_place", "tl.store(first_digit_ptr", "(first_digit_ptr", id="counts left for the next layer"
        ),
        pytest.param("evict_place", "keys >= lowest_key", "keys > lowest_key", id="lowest key"),
        pytest.param("evict_place", "hole = (candidate < kept)", "hole = (candidate < held)", id="new slots"),
        pytest.param("evict_place", "((candidate >= held) | (candidate >= kept))", "(candidate >= held)", id="movers"),
        pytest.param("evict_copy", "list_number * BLOCK_CANDIDATES + move - earlier_entries", "move", id="which list"),
        pytest.param("evict_copy", "tl.where(past, past_position, new_position)", "new_position", id="position"),
        pytest.param("evict_copy", "PAGE_SLOTS * HEAD_DIM + target", "target", id="value"),
        pytest.param("evict_copy", "(token * v_stride", "(chunk_token * v_stride", id="token of another chunk"),
        pytest.param("score_key_anchor", "-products", "products", id="sign"),
    ],
)
def test_the_check_sees_a_broken_kernel(interpreter: ProcessPoolExecutor, kernel: str, old: str, new: str) -> None:
    errors = interpreter.submit(runs.run_check, CHECKED_PLAN, kernel, old, new).result()
    assert max(error for name, error in errors.items() if name.startswith(kernel)) > 1e-3


def test_chunks_follow_the_page_law() -> None:
    plan = valid_plan(num_layers=1, num_kv_heads=4)
    chunks = chunks_by_law(plan, [1000, 1, 300], [512, 40, 0], [256, 0, 300], "cpu")
    held, kept = ([plan.group_tokens(g, 1000, n) for g in range(chunks.held.shape[1])] for n in (512, 768))
    assert chunks.requests.tolist() == [0, 2]
    assert (chunks.held[0].tolist(), chunks.kept[0].tolist()) == (held, kept)
    assert torch.equal(chunks.held[1], chunks.kept[1])
    assert chunks.chunk_indptr.tolist() == [0, 256, 256, 556]
    assert chunks.max_candidates == max(*held, 44) + 256
    assert chunks.max_moves >= 256


def test_numbers_of_tokens_that_cannot_be_are_refused() -> None:
    with pytest.raises(TangramError, match="request 0, group 1: so many tokens cannot stay: got 16, expected 1 to 15"):
        make_chunks([(5, 5)], [(15, 16)], [9], [10], "cpu")
    with pytest.raises(TangramError, match="got 0, expected 1 to 15"):
        make_chunks([(5,)], [(0,)], [9], [10], "cpu")
    with pytest.raises(TangramError, match="context is too long"):
        make_chunks([(5,)], [(5,)], [1 << 24], [1], "cpu")


def test_a_step_larger_than_the_buffers_is_refused(interpreter: ProcessPoolExecutor) -> None:
    plan = valid_plan(num_layers=1, num_kv_heads=1, head_dim=16)
    steps = [[request_of_any(plan, 600, 300, 300, 300)]]
    with pytest.raises(TangramError, match="larger than the buffers of eviction: got 1 chunks, 600 candidates"):
        interpreter.submit(runs.run_steps_in_turn, plan, steps).result()


def _compile(folder: Path, shapes: Sequence[tuple[int, KVDtype]], roles: Sequence[EvictionRole]) -> None:
    for head_dim, dtype in shapes:
        plan = valid_plan(head_dim=head_dim, dtype=dtype, page_slots=256, tile_tokens=128)
        runs.write_kernels(plan, folder, roles)
    compiled = kernel_check.compile_kernels(folder)
    assert len(compiled) == len(roles) * len(shapes)
    for by_arch in compiled.values():
        for arch in ARCHITECTURES:
            assert by_arch[arch].shared_memory_bytes <= SHARED_MEMORY_BYTES[arch]
            assert by_arch[arch].spill_bytes == 0


def test_kernels_compile_and_fit_everywhere(tmp_path: Path) -> None:
    _compile(tmp_path, [(80, KVDtype.BFLOAT16)], list(EvictionRole))


@pytest.mark.slow
def test_kernels_of_any_head_dim_and_dtype_compile_and_fit_everywhere(tmp_path: Path) -> None:
    shapes = [(head_dim, dtype) for head_dim in (64, 80, 96, 128, 256) for dtype in KVDtype]
    _compile(tmp_path, shapes, [EvictionRole.SCORE_KEY_ANCHOR, EvictionRole.COPY])  # the others read no keys
