import hashlib
from dataclasses import replace

import pytest

from tangram_plan.ir import KVHead, LayerKind, LayerShape, ModelShape
from tests.small_plans import SHAPE

CANONICAL = (
    '["hand",[["full",2,4,0],["sliding",2,4,1],["full",2,4,2],["shared",0,4,0]],8,'
    '[["hidden_size","32"],["rope","10000.0"]]]'
)


def test_planned_are_full_layers_with_a_cache_of_their_own() -> None:
    assert SHAPE.planned_layers == (0, 2)
    assert list(SHAPE.kv_heads()) == [KVHead(0, 0), KVHead(0, 1), KVHead(2, 0), KVHead(2, 1)]
    assert SHAPE.num_kv_heads == 4
    assert SHAPE.layers[0].gqa_ratio == 2


def test_a_full_layer_without_kv_heads_is_not_planned() -> None:
    layers = (LayerShape(LayerKind.FULL, 2, 4, 0), LayerShape(LayerKind.FULL, 0, 0, 1))
    assert ModelShape("hand", layers, 8).planned_layers == (0,)


def test_fingerprint_is_the_hash_of_its_canonical_text() -> None:
    assert SHAPE.fingerprint == hashlib.sha256(CANONICAL.encode()).hexdigest()


@pytest.mark.parametrize(
    "other",
    [
        replace(SHAPE, model_type="hand2"),
        replace(SHAPE, head_dim=16),
        replace(SHAPE, identity=(("hidden_size", "64"), ("rope", "10000.0"))),
        replace(SHAPE, layers=SHAPE.layers[:3]),
        replace(SHAPE, layers=(LayerShape(LayerKind.FULL, 2, 8, 0), *SHAPE.layers[1:])),
        replace(SHAPE, layers=(*SHAPE.layers[:3], LayerShape(LayerKind.SHARED, 0, 4, 2))),
    ],
)
def test_fingerprint_tells_architectures_apart(other: ModelShape) -> None:
    assert other.fingerprint != SHAPE.fingerprint
