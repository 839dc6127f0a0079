from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="scorers take torch tensors")

import torch

from tangram_plan.artefact import write_artefact
from tangram_plan.ir import SCORER_STATISTICS, MismatchError
from tangram_plan.runtime.serving_scorers import SERVING_SCORERS, KeyAnchor, Recent, ServingScorer, load_scorer
from tests.small_plans import hand_plan


def _keys(num_tokens: int = 12) -> torch.Tensor:
    return torch.randn(num_tokens, 3, 8, generator=torch.Generator().manual_seed(0))


def _scorers() -> list[ServingScorer]:
    return [Recent(), KeyAnchor({0: _keys()[0], 1: _keys()[1]})]


def test_the_more_recent_the_higher_for_every_kv_head() -> None:
    scores = Recent().scores(0, _keys(3), torch.tensor([5, 900_000, 7]))
    assert scores.tolist() == [[5.0, 900_000.0, 7.0]] * 3


def test_the_opposite_of_an_anchor_scores_highest_whatever_its_length() -> None:
    anchor = torch.tensor([[3.0, 4.0]])
    keys = torch.tensor([[[6.0, 8.0]], [[-0.3, -0.4]], [[-4.0, 3.0]], [[1.0, 0.0]]])
    scores = KeyAnchor({7: anchor}).scores(7, keys, torch.arange(4))
    torch.testing.assert_close(scores, torch.tensor([[-1.0, 1.0, 0.0, -0.6]]))


def test_every_layer_has_its_own_anchors() -> None:
    _, scorer = _scorers()
    assert not torch.equal(scorer.scores(0, _keys(), torch.arange(12)), scorer.scores(1, _keys(), torch.arange(12)))


@pytest.mark.parametrize("scorer", _scorers(), ids=["recent", "key_anchor"])
def test_scores_are_dense_float32_and_a_token_has_its_score_in_whatever_chunk(scorer: ServingScorer) -> None:
    keys, positions = _keys().bfloat16(), torch.arange(40, 52)
    scores = scorer.scores(1, keys, positions)
    assert (scores.dtype, tuple(scores.shape), scores.is_contiguous()) == (torch.float32, (3, 12), True)
    apart = [scorer.scores(1, keys[part], positions[part]) for part in (slice(0, 5), slice(5, 12))]
    assert torch.equal(scores, torch.cat(apart, 1))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_loads_the_anchors_of_its_own_kv_heads(tmp_path: Path, rank: int) -> None:
    plan = replace(hand_plan(tensor_parallel=2), scorer="key_anchor")
    anchors = np.arange(32, dtype=np.float32).reshape(4, 8)
    write_artefact(plan, {}, tmp_path / "plan", statistics={"mean_keys": anchors})
    scorer = load_scorer(plan, tmp_path / "plan", rank, "cpu")
    assert isinstance(scorer, KeyAnchor)
    found = {layer: anchor.tolist() for layer, anchor in scorer.anchors.items()}
    assert found == {0: [anchors[rank].tolist()], 2: [anchors[2 + rank].tolist()]}


def test_statistics_of_another_plan_do_not_load(tmp_path: Path) -> None:
    plan = replace(hand_plan(), scorer="key_anchor")
    write_artefact(plan, {}, tmp_path / "plan", statistics={"mean_keys": np.ones((4, 6), np.float32)})
    with pytest.raises(MismatchError, match="statistics do not fit the plan"):
        load_scorer(plan, tmp_path / "plan", 0, "cpu")


def test_every_scorer_that_is_said_to_serve_does() -> None:
    assert SERVING_SCORERS.keys() == SCORER_STATISTICS.keys()
