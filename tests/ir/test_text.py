import contextlib
import copy
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangram_plan.ir import (
    AttentionForm,
    HeadOrder,
    KVDtype,
    Plan,
    Schedule,
    ScheduleChoice,
    ScheduleEstimate,
    TangramError,
    parse_plan,
    plan_hash,
    print_json,
    print_plan,
)
from tests.plans import build_plan
from tests.small_plans import hand_plan

GOLDEN = Path(__file__).parents[1] / "golden" / "plan.json"
TEXT = print_plan(hand_plan())
RAW: dict[str, Any] = json.loads(TEXT)
NAMES = st.text(st.characters(codec="utf-8"), max_size=8)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans of any content that the text must carry; not all of them are valid."""
    ranks = draw(st.sampled_from([1, 2]))
    plan = build_plan(
        num_layers=draw(st.integers(1, 12)),
        num_kv_heads=ranks * draw(st.integers(1, 4)),
        gqa_ratio=draw(st.integers(1, 5)),
        dtype=draw(st.sampled_from(list(KVDtype))),
        page_slots=draw(st.integers(1, 2048)),
        tensor_parallel=ranks,
        rho=draw(st.lists(st.integers(0, 65536), min_size=1, max_size=5)),
        splits=draw(st.lists(st.integers(1, 264), min_size=1, max_size=5)),
        batches=draw(st.lists(st.integers(1, 1024), max_size=3)),
    )
    estimates = st.builds(ScheduleEstimate, st.floats(0, 1e9), st.floats(1, 1e3))
    choices = st.builds(
        ScheduleChoice,
        st.integers(1, 1024),
        st.integers(1, 2**31),
        st.sampled_from(list(Schedule)),
        st.dictionaries(st.sampled_from(list(Schedule)), estimates),
    )
    return replace(
        plan,
        model=replace(
            plan.model,
            identity=tuple(draw(st.dictionaries(NAMES, NAMES, max_size=3)).items()),
            attention=draw(
                st.builds(AttentionForm, st.floats(1e-3, 1e3), st.none() | st.floats(1, 1e3), st.booleans())
            ),
        ),
        head_order=HeadOrder(draw(st.dictionaries(st.integers(0, 11), st.permutations(range(3)).map(tuple)))),
        scorer=draw(NAMES),
        partition=replace(plan.partition, choices=tuple(draw(st.lists(choices, max_size=3)))),
    )


def refusal(text: str) -> str:
    with pytest.raises(TangramError) as error:
        parse_plan(text, where="OUT/plan.json")
    assert "\n" not in str(error.value)
    assert "OUT/plan.json" in str(error.value)
    return str(error.value)


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from paths(item, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


# --- there and back


@settings(deadline=None)
@given(plans())
def test_a_plan_survives_its_text(plan: Plan) -> None:
    assert parse_plan(print_plan(plan), where="plan.json") == plan


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_a_valid_plan_survives_its_text(tensor_parallel: int) -> None:
    plan = hand_plan(tensor_parallel)
    assert parse_plan(print_plan(plan), where="plan.json") == plan


def test_the_text_is_as_reviewed() -> None:
    """After a wanted change: TANGRAM_UPDATE_GOLDEN=1 pytest tests/ir, and review the difference as code."""
    if os.environ.get("TANGRAM_UPDATE_GOLDEN"):
        GOLDEN.write_text(TEXT)
    assert GOLDEN.read_text() == TEXT


def test_the_text_does_not_depend_on_the_order_of_tables() -> None:
    plan = hand_plan()
    budgets = replace(plan.budgets, rho=dict(reversed(list(plan.budgets.rho.items()))))
    order = HeadOrder({2: (1, 0), 0: (1, 0)})
    assert print_plan(replace(plan, budgets=budgets)) == TEXT
    assert print_plan(replace(plan, head_order=order)) == print_plan(
        replace(plan, head_order=HeadOrder({0: (1, 0), 2: (1, 0)}))
    )


def test_the_text_has_no_line_beyond_the_width_and_ends_with_a_newline() -> None:
    text = print_plan(build_plan(num_layers=40, num_kv_heads=8))
    assert max(map(len, text.splitlines())) <= 120
    assert text.endswith("}\n")


def test_canonical_json_breaks_up_what_does_not_fit_and_nothing_else() -> None:
    assert print_json({"a": [1, 2], "b": {}}) == '{"a": [1, 2], "b": {}}\n'
    wide = ["x" * 60, "y" * 60]
    assert print_json({"a": wide, "b": [1]}) == f'{{\n "a": [\n  "{wide[0]}",\n  "{wide[1]}"\n ],\n "b": [1]\n}}\n'


# --- the hash


def test_plan_hash_is_stable() -> None:
    """Plans in the field are known by it: it changes with the schema, and with nothing else."""
    assert plan_hash(hand_plan()) == "3f7031b00fb872a649aea966938d06decfb3d01453c97a68bedcde18efe8df77"


@pytest.mark.parametrize(
    "change",
    [
        {"scorer": "other"},
        {"compress_chunk_tokens": 4096},
        {"max_new_tokens": 1},
        {"head_order": HeadOrder({0: (1, 0)})},
        {"model": replace(hand_plan().model, attention=AttentionForm(1.0))},
        {"provenance": replace(hand_plan().provenance, seed=1)},
        {"budgets": replace(hand_plan().budgets, window_tokens=9)},
        {"layout": replace(hand_plan().layout, dtype=KVDtype.FLOAT16)},
        {"partition": replace(hand_plan().partition, device="other")},
    ],
    ids=lambda change: next(iter(change)),
)
def test_plan_hash_changes_with_every_part_of_the_plan(change: dict[str, Any]) -> None:
    assert plan_hash(replace(hand_plan(), **change)) != plan_hash(hand_plan())


# --- damaged text


def test_every_cut_of_a_text_is_refused() -> None:
    for length in range(len(TEXT)):
        refusal(TEXT[:length])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ("plan.json:1", "plan is not JSON")),
        ("garbage", ("plan.json:1", "plan is not JSON")),
        (TEXT.replace("\n", "\n}", 3), ("plan.json:2", "plan is not JSON")),
        ("[]", ("unknown plan schema", "got list", "expected tangram-plan/2")),
        ("null", ("unknown plan schema", "got NoneType")),
        ("{}", ("unknown plan schema", "expected tangram-plan/2")),
        (TEXT.replace("tangram-plan/2", "tangram-plan/1"), ("got tangram-plan/1", "expected tangram-plan/2")),
        ("[" * 100_000, ("nested too deeply",)),
        (json.dumps(RAW), ("unknown fields or was edited",)),
        (TEXT + "\n", ("unknown fields or was edited",)),
        (TEXT.replace('"page_slots": 32', '"page_slots": 032'), ("plan is not JSON",)),
        (TEXT.replace('"page_slots": 32', '"page_slots": 32, "page_slots": 32'), ("was edited",)),
        (print_json(RAW | {"surprise": 1}), ("unknown fields",)),
        (print_json(RAW | {"page": RAW["page"] | {"surprise": 1}}), ("unknown fields",)),
        (print_json(RAW | {"provenance": RAW["provenance"] | {"surprise": 1}}), ("plan is damaged", "surprise")),
        (print_json({key: RAW[key] for key in RAW if key != "groups"}), ("plan is damaged", "groups")),
        (print_json(RAW | {"page": RAW["page"] | {"dtype": "float8"}}), ("plan is damaged", "float8")),
    ],
    ids=range(17),
)
def test_text_that_build_did_not_write_is_refused_in_one_line(text: str, parts: tuple[str, ...]) -> None:
    message = refusal(text)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("junk", [None, [], {}, "x", [[]], {"x": 1}], ids=repr)
def test_junk_anywhere_in_a_plan_never_ends_in_a_traceback(junk: Any) -> None:
    for path in paths(RAW):
        raw = copy.deepcopy(RAW)
        at(raw, path[:-1])[path[-1]] = junk
        text = print_json(raw)
        with contextlib.suppress(TangramError):
            assert print_plan(parse_plan(text, where="plan.json")) == text


def test_no_part_of_a_plan_may_be_missing() -> None:
    named = [path for path in paths(RAW) if isinstance(path[-1], str)]
    optional = {"identity", "estimates", "head_order"}  # tables, which may be empty
    for path in named:
        raw = copy.deepcopy(RAW)
        del at(raw, path[:-1])[path[-1]]
        if len(path) < 2 or path[-2] not in optional:
            refusal(print_json(raw))
