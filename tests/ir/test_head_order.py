import hashlib
from typing import Any

import pytest

from tangram_plan.ir import ORIGINAL_ORDER, HeadOrder, KVHead, MismatchError, check_head_order


def test_the_original_order_has_no_hash() -> None:
    assert ORIGINAL_ORDER.hash == ""
    assert HeadOrder({0: (0, 1), 7: (0, 1, 2)}).hash == ""


def test_hash_is_that_of_the_layers_in_order() -> None:
    text = "[[2,[1,0]],[10,[2,0,1]]]"
    assert HeadOrder({10: (2, 0, 1), 2: (1, 0)}).hash == hashlib.sha256(text.encode()).hexdigest()


def test_layers_that_do_not_move_are_not_in_the_hash() -> None:
    assert HeadOrder({0: (1, 0), 2: (0, 1)}).hash == HeadOrder({0: (1, 0)}).hash
    assert HeadOrder({0: (1, 0), 2: (1, 0)}).hash != HeadOrder({0: (1, 0)}).hash


def test_what_is_no_permutation_is_not_the_original_order() -> None:
    assert HeadOrder({0: (0, 0)}).hash


def test_every_place_names_the_head_that_goes_there() -> None:
    order = HeadOrder({2: (2, 0, 1)})
    assert [order.original(KVHead(2, head)) for head in range(3)] == [KVHead(2, 2), KVHead(2, 0), KVHead(2, 1)]
    assert order.original(KVHead(1, 1)) == KVHead(1, 1)


def test_model_must_stand_in_the_order_of_the_plan() -> None:
    order = HeadOrder({0: (1, 0)})
    check_head_order({}, ORIGINAL_ORDER, "model")
    check_head_order({}, HeadOrder({0: (0, 1)}), "model")
    check_head_order({"tangram_head_order": order.hash}, order, "model")


@pytest.mark.parametrize("found", [{}, {"tangram_head_order": "abc"}, {"tangram_head_order": 3}])
def test_model_in_another_order_is_refused(found: dict[str, Any]) -> None:
    with pytest.raises(MismatchError, match="tangram_head_order"):
        check_head_order(found, HeadOrder({0: (1, 0)}), "model")


def test_reordered_model_is_refused_by_a_plan_for_the_original() -> None:
    with pytest.raises(MismatchError, match="use the original checkpoint"):
        check_head_order({"tangram_head_order": "abc"}, ORIGINAL_ORDER, "model")
