import hashlib
import math
from dataclasses import replace

import pytest

from tangram_plan.ir import AttentionForm, KVHead, LayerKind, LayerShape, ModelShape
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


def test_attention_is_plain_unless_it_is_said_to_be_otherwise() -> None:
    assert SHAPE.attention == AttentionForm(1 / math.sqrt(8), logit_softcap=None, has_sinks=False)
    assert ModelShape("hand", SHAPE.layers, 64).attention == AttentionForm.plain(64) == AttentionForm(0.125)


@pytest.mark.parametrize(
    ("form", "plain"),
    [
        (AttentionForm(0.125), True),
        (AttentionForm(0.12500001), True),
        (AttentionForm(0.1251), False),
        (AttentionForm(1 / 64), False),
        (AttentionForm(0.125, logit_softcap=50.0), False),
        (AttentionForm(0.125, has_sinks=True), False),
    ],
)
def test_plain_means_the_scale_of_the_width_and_nothing_else(form: AttentionForm, plain: bool) -> None:
    assert form.is_plain(head_dim=64) is plain
    assert not form.is_plain(head_dim=0)


def test_fingerprint_has_the_attention_that_is_not_plain() -> None:
    text = CANONICAL[:-1] + ',["0.0625","50",false]]'
    other = replace(SHAPE, attention=AttentionForm(1 / 16, logit_softcap=50.0))
    assert other.fingerprint == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    "other",
    [
        replace(SHAPE, model_type="hand2"),
        replace(SHAPE, head_dim=16),
        replace(SHAPE, identity=(("hidden_size", "64"), ("rope", "10000.0"))),
        replace(SHAPE, layers=SHAPE.layers[:3]),
        replace(SHAPE, layers=(LayerShape(LayerKind.FULL, 2, 8, 0), *SHAPE.layers[1:])),
        replace(SHAPE, layers=(*SHAPE.layers[:3], LayerShape(LayerKind.SHARED, 0, 4, 2))),
        replace(SHAPE, attention=AttentionForm(1.0)),
        replace(SHAPE, attention=AttentionForm(1 / math.sqrt(8), logit_softcap=50.0)),
        replace(SHAPE, attention=AttentionForm(1 / math.sqrt(8), has_sinks=True)),
    ],
)
def test_fingerprint_tells_architectures_apart(other: ModelShape) -> None:
    assert other.fingerprint != SHAPE.fingerprint
