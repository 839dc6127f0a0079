from dataclasses import replace
from pathlib import Path

import pytest

from tangram_plan.artefact import write_artefact
from tangram_plan.ir import AttentionForm, CheckFailedError, Plan
from tangram_plan.verify_artefact import verify_artefact
from tests.small_plans import hand_plan

KERNEL_CHECK = "tangram_plan.runtime.kernel_check"


def written(plan: Plan, folder: Path) -> Path:
    write_artefact(plan, {}, folder / "plan")
    return folder / "plan"


def test_missing_triton_is_a_failed_check_not_a_skip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise CheckFailedError("triton is not installed")

    monkeypatch.setattr(f"{KERNEL_CHECK}.check_kernels", missing)
    result = verify_artefact(written(hand_plan(), tmp_path))
    assert not result["ok"]
    assert [(check["name"], check["ok"]) for check in result["checks"]] == [("artefact", True), ("kernels", False)]
    assert result["checks"][1]["detail"] == "triton is not installed"


def test_changed_file_is_a_failed_check(tmp_path: Path) -> None:
    plan = written(hand_plan(), tmp_path)
    (plan / "allocator.json").write_text("{}", encoding="utf-8")
    result = verify_artefact(plan)
    assert (result["ok"], result["plan_hash"], result["kernels"]) == (False, None, [])
    assert "allocator.json: file was changed after the build" in result["checks"][0]["detail"]


@pytest.mark.slow
def test_every_form_of_attention_is_verified(tmp_path: Path) -> None:
    plan = hand_plan()
    form = AttentionForm(0.125, logit_softcap=5.0, has_sinks=True)
    result = verify_artefact(written(replace(plan, model=replace(plan.model, attention=form)), tmp_path))
    assert result["ok"], result
    assert [check["name"] for check in result["checks"]] == ["artefact"]
