import json
from pathlib import Path

import pytest

from tangram_plan.device import Device, load_device
from tangram_plan.ir import TangramError
from tests.devices import make_device


def write(path: Path, **changes: object) -> Path:
    path.write_text(json.dumps(make_device().model_dump() | changes))
    return path


def refusal(name: str, relative_to: Path) -> str:
    with pytest.raises(TangramError) as error:
        load_device(name, relative_to=relative_to)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(("name", "num_ctas"), [("h200", 396), ("a100-80gb", 324)])
def test_shipped_device_is_found_by_its_name_from_anywhere(name: str, num_ctas: int, tmp_path: Path) -> None:
    device = load_device(name, relative_to=tmp_path)
    assert device.name == name
    assert device.num_ctas == num_ctas


def test_path_is_relative_to_the_folder_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "devices").mkdir()
    write(tmp_path / "devices" / "mine.json", name="mine")
    assert load_device("devices/mine.json", relative_to=tmp_path).name == "mine"


def test_absolute_path_is_taken_as_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.json", name="mine")
    assert load_device(str(path), relative_to=tmp_path / "elsewhere").name == "mine"


def test_name_of_a_shipped_device_wins_over_a_file_of_that_name(tmp_path: Path) -> None:
    write(tmp_path / "h200", name="mine")
    assert load_device("h200", relative_to=tmp_path).name == "h200"
    assert load_device("./h200", relative_to=tmp_path).name == "mine"


@pytest.mark.parametrize("name", ["h100", "mine.json", "", ".", "h200.json"])
def test_missing_device_is_refused_with_those_that_exist(name: str, tmp_path: Path) -> None:
    message = refusal(name, tmp_path)
    assert "partition.device" in message
    assert "a100-80gb, h200, or a path" in message


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '{"name": "x"}', "\u00e4"])
def test_file_that_is_no_description_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text, encoding="latin-1")
    assert str(path) in refusal("mine.json", tmp_path)


@pytest.mark.parametrize("field", list(Device.model_fields))
def test_missing_field_is_named(field: str, tmp_path: Path) -> None:
    description = make_device().model_dump()
    del description[field]
    (tmp_path / "mine.json").write_text(json.dumps(description))
    assert f"got {field}: Field required" in refusal("mine.json", tmp_path)


@pytest.mark.parametrize("value", [0, -1, "many", None, 1.5])
@pytest.mark.parametrize("field", ["num_sms", "ctas_per_sm", "tile_tokens"])
def test_count_that_is_none_is_refused(field: str, value: object, tmp_path: Path) -> None:
    write(tmp_path / "mine.json", **{field: value})
    assert f"got {field}: " in refusal("mine.json", tmp_path)


@pytest.mark.parametrize("value", [0, -1.0, "fast", float("nan")])
@pytest.mark.parametrize("field", ["read_bandwidth_gb_s", "cta_bandwidth_gb_s", "static_splits_overhead_us"])
def test_rate_that_is_none_is_refused(field: str, value: object, tmp_path: Path) -> None:
    write(tmp_path / "mine.json", **{field: value})
    assert f"got {field}: " in refusal("mine.json", tmp_path)


def test_unknown_field_is_named(tmp_path: Path) -> None:
    write(tmp_path / "mine.json", bandwith=3)
    assert "bandwith" in refusal("mine.json", tmp_path)


@pytest.mark.parametrize("tile_tokens", [1, 8, 17, 100])
def test_tile_that_is_no_multiple_of_16_is_refused(tile_tokens: int, tmp_path: Path) -> None:
    write(tmp_path / "mine.json", tile_tokens=tile_tokens)
    message = refusal("mine.json", tmp_path)
    assert f"got {tile_tokens}, expected a multiple of 16" in message


@pytest.mark.parametrize("name", ["x" * 300, "~no-such-user/mine.json", "a\0b"])
def test_name_that_no_file_can_have_is_refused(name: str, tmp_path: Path) -> None:
    refusal(name, tmp_path)


def test_endless_bandwidth_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "mine.json", read_bandwidth_gb_s=float("inf"))
    refusal("mine.json", tmp_path)
