"""What a scorer needs of the model, from the profile to the artefact and to the rank that serves."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tangram_plan.artefact import write_artefact
from tangram_plan.ir import (
    ORIGINAL_ORDER,
    STATISTICS_FILE,
    HeadOrder,
    MismatchError,
    Plan,
    TangramError,
    check_scorer,
    load_artefact,
    missing_statistics,
)
from tangram_plan.profiles import Profile, StatisticArray, load_profile, save_profile
from tangram_plan.select_statistics import select_statistics
from tangram_plan.verify_artefact import verify_artefact
from tests.command_line import CommandLine
from tests.small_plans import SHAPE, hand_plan, small_profile

KEYS = np.arange(32, dtype=np.float32).reshape(4, 8)
MEASURED = replace(small_profile(SHAPE), statistics={"mean_keys": KEYS, "gate": np.ones((4, 3), np.float32)})


def planned(scorer: str = "key_anchor", *, head_order: HeadOrder = ORIGINAL_ORDER) -> Plan:
    return replace(hand_plan(), scorer=scorer, head_order=head_order)


def written(plan: Plan, folder: Path, **statistics: StatisticArray) -> Path:
    write_artefact(plan, {}, folder / "plan", statistics=statistics)
    return folder / "plan"


def failed(artefact: Path) -> list[str]:
    return [check["name"] for check in verify_artefact(artefact)["checks"] if not check["ok"]]


def test_what_the_scorer_needs_is_selected_and_nothing_else() -> None:
    selected = select_statistics(MEASURED, planned())
    assert list(selected) == ["mean_keys"]
    np.testing.assert_array_equal(selected["mean_keys"], KEYS)
    assert select_statistics(MEASURED, planned("recent")) == {}
    assert select_statistics(replace(MEASURED, statistics={}), planned()) == {}


def test_rows_follow_the_heads_of_a_reordered_checkpoint() -> None:
    order = HeadOrder({2: (1, 0)})
    selected = select_statistics(MEASURED, planned(head_order=order))
    np.testing.assert_array_equal(selected["mean_keys"], KEYS[[0, 1, 3, 2]])


def test_statistics_of_another_shape_are_refused() -> None:
    other = replace(MEASURED, statistics={"mean_keys": KEYS[:, :6]})
    with pytest.raises(MismatchError, match="statistics do not fit the plan"):
        select_statistics(other, planned())


def test_build_writes_what_the_profile_has_and_says_what_it_lacks(cli: CommandLine, model_yaml: Path) -> None:
    words = ("build", model_yaml, "--json", "--set", "scorer=key_anchor", "-q", "-o", model_yaml.parent / "plan")
    artefact = model_yaml.parent / "plan"
    assert json.loads(cli(*words).out)["missing_statistics"] == ["mean_keys"]
    assert "cannot be served: the profile lacks mean_keys" in " ".join(cli("show", artefact).out.split())
    assert missing_statistics(load_artefact(artefact), artefact) == ("mean_keys",)

    profile: Profile = load_profile(model_yaml.parent / "tiny.npz")
    keys = np.linspace(-1, 1, 16 * 16, dtype=np.float32).reshape(16, 16)
    save_profile(replace(profile, statistics={"mean_keys": keys}), model_yaml.parent / "tiny.npz")
    assert json.loads(cli(*words).out)["missing_statistics"] == []
    with np.load(artefact / STATISTICS_FILE) as arrays:
        np.testing.assert_array_equal(arrays["mean_keys"], keys)
    first = (artefact / STATISTICS_FILE).read_bytes()
    cli(*words)
    assert (artefact / STATISTICS_FILE).read_bytes() == first


def test_a_scorer_that_lacks_its_statistics_does_not_serve(tmp_path: Path) -> None:
    plan = planned()
    check_scorer(plan, written(plan, tmp_path, mean_keys=KEYS))
    check_scorer(planned("recent"), written(planned("recent"), tmp_path))
    with pytest.raises(TangramError, match=r"key_anchor lacks mean_keys.*tangram-plan calibrate"):
        check_scorer(plan, written(plan, tmp_path))
    with pytest.raises(TangramError, match="got hand, expected recent or key_anchor"):
        check_scorer(hand_plan(), written(hand_plan(), tmp_path))


def test_statistics_of_an_artefact_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tangram_plan.runtime.kernel_check.check_kernels", lambda *_: [])  # slow, and tested elsewhere
    assert failed(written(planned(), tmp_path, mean_keys=KEYS)) == []
    assert failed(written(planned(), tmp_path)) == []  # can be looked at, but not served
    assert failed(written(planned(), tmp_path, mean_keys=KEYS[:3])) == ["statistics"]
    assert failed(written(planned(), tmp_path, gate=KEYS)) == ["statistics"]
    assert failed(written(planned("recent"), tmp_path, mean_keys=KEYS)) == ["statistics"]
    artefact = written(planned(), tmp_path, mean_keys=KEYS)
    (artefact / STATISTICS_FILE).write_bytes(b"broken")
    assert failed(artefact) == ["artefact"]
