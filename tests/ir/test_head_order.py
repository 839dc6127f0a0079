import hashlib

from tangram_plan.ir import ORIGINAL_ORDER, HeadOrder, KVHead


def test_the_original_order_has_no_hash() -> None:
    assert ORIGINAL_ORDER.hash == ""
    assert HeadOrder({0: (0, 1), 7: (0, 1, 2)}).hash == ""


def test_hash_is_that_of_the_layers_in_order() -> None:
    text = "[[0,[0,1]],[2,[1,0]],[10,[2,0,1]]]"
    assert HeadOrder({10: (2, 0, 1), 2: (1, 0), 0: (0, 1)}).hash == hashlib.sha256(text.encode()).hexdigest()


def test_every_place_names_the_head_that_goes_there() -> None:
    order = HeadOrder({2: (2, 0, 1)})
    assert [order.original(KVHead(2, head)) for head in range(3)] == [KVHead(2, 2), KVHead(2, 0), KVHead(2, 1)]
    assert order.original(KVHead(1, 1)) == KVHead(1, 1)
