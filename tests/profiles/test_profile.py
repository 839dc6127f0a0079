import contextlib
import errno
import io
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from tangram_plan.ir import KVHead, TangramError
from tangram_plan.profiles import Level, Profile, Sample, check_profile, find_profile, load_profile, save_profile
from tests.small_plans import SHAPE, small_profile

PROFILE = small_profile(SHAPE, num_samples=3)
BOTH = replace(
    PROFILE,
    retained={**PROFILE.retained, Level.LAYER: PROFILE.retained[Level.MODEL][:, :, ::-1].copy()},
    statistics={
        "mean_keys": np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8),
        "gate": np.linspace(-2, 2, 24, dtype=np.float32).reshape(4, 3, 2),
    },
)


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(TangramError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


def with_values(change: Callable[[Any], object], level: Level = Level.MODEL) -> Profile:
    """The profile after a change of its retained fractions in place."""
    values = PROFILE.retained[Level.MODEL].copy()
    change(values)
    return replace(PROFILE, retained={level: values})


def put(*place: int, value: float) -> Callable[[Any], object]:
    return lambda values: values.__setitem__(place, value)


def same(one: Profile, other: Profile) -> bool:
    """Equal content; arrays have no truth value, so `==` of profiles has none either."""
    fields = ("model", "model_fingerprint", "scorer", "kv_heads", "ratios", "samples")
    return (
        all(getattr(one, field) == getattr(other, field) for field in fields)
        and one.retained.keys() == other.retained.keys()
        and all(np.array_equal(one.retained[level], other.retained[level]) for level in one.retained)
        and one.statistics.keys() == other.statistics.keys()
        and all(np.array_equal(one.statistics[name], other.statistics[name]) for name in one.statistics)
    )


# --- the value


def test_layers_are_those_measured() -> None:
    assert PROFILE.layers == (0, 2)
    assert PROFILE.layer_table(np.array([0.1, 0.2, 0.3, 0.4])) == [[0.1, 0.2], [0.3, 0.4]]


def test_a_measured_ratio_is_returned_as_measured() -> None:
    for index, ratio in enumerate(PROFILE.ratios):
        assert np.array_equal(PROFILE.at_ratio(Level.MODEL, ratio), PROFILE.retained[Level.MODEL][:, index])


def test_a_ratio_in_between_is_interpolated() -> None:
    values = np.zeros((1, 3, 2))
    values[0] = [[0.1, 0.2], [0.3, 0.2], [0.9, 1.0]]
    profile = Profile(
        "m", "f", "s", (KVHead(0, 0), KVHead(0, 1)), (0.2, 0.4, 0.8), (Sample("t", 0, 1),), {Level.MODEL: values}
    )
    np.testing.assert_allclose(profile.at_ratio(Level.MODEL, 0.25), [[0.15, 0.2]])
    np.testing.assert_allclose(profile.at_ratio(Level.MODEL, 0.7), [[0.75, 0.8]])


@pytest.mark.parametrize("ratio", [0.0, -0.3, 0.2499, 0.5001, 1.0, float("nan"), float("inf")])
def test_a_ratio_outside_the_measured_ones_is_refused(ratio: float) -> None:
    message = refusal(lambda: PROFILE.at_ratio(Level.MODEL, ratio))
    assert f"retention ratio was not measured: got {ratio:g}, expected 0.25 to 0.5" in message


def test_a_level_that_was_not_measured_is_refused() -> None:
    assert "got layer, expected model" in refusal(lambda: PROFILE.at_ratio(Level.LAYER, 0.25))


@pytest.mark.parametrize(
    "other",
    [
        replace(PROFILE, model="other"),
        replace(PROFILE, model_fingerprint="other"),
        replace(PROFILE, scorer="other"),
        replace(PROFILE, ratios=(0.25, 0.75)),
        replace(PROFILE, samples=(*PROFILE.samples[:2], Sample("other", 2, 102))),
        with_values(put(0, 0, 0, value=0.123)),
        replace(PROFILE, statistics={"gate": np.ones((4, 8), dtype=np.float32)}),
        replace(PROFILE, statistics={"other": np.ones((4, 8), dtype=np.float32)}),
        BOTH,
    ],
)
def test_the_hash_tells_profiles_apart(other: Profile) -> None:
    assert other.hash != PROFILE.hash


def test_the_hash_tells_statistics_apart_by_name_and_shape() -> None:
    values = np.ones((4, 8), dtype=np.float32)
    found = [("one", values), ("two", values), ("one", values.reshape(4, 2, 4)), ("one", values * 2)]
    assert len({replace(PROFILE, statistics={name: array}).hash for name, array in found}) == 4


def test_the_hash_is_that_of_the_content() -> None:
    assert small_profile(SHAPE, num_samples=3).hash == PROFILE.hash
    transposed = np.asfortranarray(PROFILE.retained[Level.MODEL])
    assert replace(PROFILE, retained={Level.MODEL: transposed}).hash == PROFILE.hash


# --- files


@pytest.mark.parametrize("profile", [PROFILE, BOTH], ids=["one level", "two levels and statistics"])
def test_a_profile_survives_its_file(tmp_path: Path, profile: Profile) -> None:
    save_profile(profile, tmp_path / "deep" / "p.npz")
    loaded = load_profile(tmp_path / "deep" / "p.npz")
    assert same(loaded, profile)
    assert loaded.hash == profile.hash
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["p.npz"]


def test_equal_profiles_give_equal_bytes(tmp_path: Path) -> None:
    save_profile(BOTH, tmp_path / "one.npz")
    retained = dict(reversed(list(BOTH.retained.items())))
    statistics = dict(reversed(list(BOTH.statistics.items())))
    save_profile(replace(BOTH, retained=retained, statistics=statistics), tmp_path / "two.npz")
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "two.npz").read_bytes()


def header_with(**changes: Any) -> dict[str, Any]:
    header = {
        "format": "tangram-profile/2",
        "model": "m",
        "model_fingerprint": "f",
        "scorer": "s",
        "kv_heads": [[0, 0], [0, 1]],
        "ratios": [0.5],
        "samples": [["t", 0, 1]],
    }
    return {key: value for key, value in (header | changes).items() if value is not None}


def write_arrays(path: Path, header: dict[str, Any], retained: Any) -> Path:
    with path.open("wb") as file:
        np.savez(file, header=np.array(json.dumps(header)), retained_model=retained)
    return path


def test_the_file_form_is_as_documented(tmp_path: Path) -> None:
    path = write_arrays(tmp_path / "p.npz", header_with(), np.array([[[0.25, 0.75]]]))
    assert load_profile(path).at_ratio(Level.MODEL, 0.5).tolist() == [[0.25, 0.75]]


@pytest.mark.parametrize(
    ("header", "retained", "parts"),
    [
        (header_with(format="tangram-profile/3"), [[[0.5, 0.5]]], ("got tangram-profile/3",)),
        (header_with(surprise=1), [[[0.5, 0.5]]], ("not a profile file",)),
        (header_with(scorer=None), [[[0.5, 0.5]]], ("not a profile file",)),
        (header_with(kv_heads=[[0], [1]]), [[[0.5, 0.5]]], ("not a profile file",)),
        (header_with(kv_heads=[[0, 0, 0], [0, 1, 0]]), [[[0.5, 0.5]]], ("not a profile file",)),
        (header_with(kv_heads=[[0, 0.5], [0, 1]]), [[[0.5, 0.5]]], ("not a profile file",)),
        (header_with(samples=[["t"]]), [[[0.5, 0.5]]], ("not a profile file",)),
        (header_with(samples=[["t", "first", 1]]), [[[0.5, 0.5]]], ("not a profile file",)),
        (header_with(kv_heads=[[0, 1], [0, 0]]), [[[0.5, 0.5]]], ("KV heads are not in order",)),
        (header_with(kv_heads=[[0, 0], [0, 0]]), [[[0.5, 0.5]]], ("KV heads are not in order",)),
        (header_with(kv_heads=[]), np.zeros((1, 1, 0)), ("profile is empty",)),
        (header_with(samples=[]), np.zeros((0, 1, 2)), ("profile is empty",)),
        (header_with(ratios=[0.0]), [[[0.5, 0.5]]], ("requested ratios", "got [0.0]")),
        (header_with(ratios=[1.1]), [[[0.5, 0.5]]], ("requested ratios", "got [1.1]")),
        (header_with(ratios=[float("nan")]), [[[0.5, 0.5]]], ("p.npz",)),
        (header_with(ratios=[0.5, 0.25]), [[[0.5, 0.5]] * 2], ("requested ratios", "rising")),
        (header_with(ratios=[0.25, 0.5]), [[[0.5, 0.5]]], ("got [1, 1, 2]", "= [1, 2, 2]")),
        (header_with(), [[0.5, 0.5]], ("got [1, 2]", "= [1, 1, 2]")),
        (header_with(), [[[1, 0]]], ("not floating-point numbers", "got int64")),
        (header_with(), [[["a", "b"]]], ("not floating-point numbers",)),
        (header_with(), [[[0.5 + 1j, 0.5]]], ("not floating-point numbers",)),
        (header_with(), [[[0.0, 0.0]]], ("sample 0 retains nothing",)),
        (header_with(statistics=["gate"]), [[[0.5, 0.5]]], ("not a profile file", "statistics_gate")),
    ],
    ids=range(23),
)
def test_arrays_that_are_no_profile_are_refused_in_one_line(
    tmp_path: Path, header: dict[str, Any], retained: Any, parts: tuple[str, ...]
) -> None:
    path = write_arrays(tmp_path / "p.npz", header, np.array(retained))
    message = refusal(lambda: load_profile(path))
    for part in (str(path), *parts):
        assert part in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.001, 1.001])
def test_a_value_that_nothing_measures_is_refused_by_sample_layer_and_head(tmp_path: Path, value: float) -> None:
    message = refusal(lambda: save_profile(with_values(put(1, 0, 3, value=value)), tmp_path / "p.npz"))
    assert "sample 1, layer 2, head 1" in message
    assert f"got {value}" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("values", "part"),
    [
        (np.full((4, 8), np.nan, np.float32), "finite"),
        (np.full((4, 8), np.inf, np.float32), "finite"),
        (np.ones((4, 8)), "got float64, expected finite float32"),
        (np.ones((4, 8), np.int32), "got int32"),
        (np.ones((3, 8), np.float32), "got [3, 8], expected [4, ...]"),
        (np.float32(1), "got [], expected [4, ...]"),
    ],
)
def test_a_statistic_must_be_numbers_of_every_head(values: Any, part: str) -> None:
    message = refusal(lambda: check_profile(replace(PROFILE, statistics={"gate": values}), where="p"))
    assert message.startswith("p, statistic gate: ")
    assert part in message


@pytest.mark.parametrize("num_rows", [0, 2])
def test_a_file_of_format_1_still_loads(tmp_path: Path, num_rows: int) -> None:
    arrays: dict[str, Any] = {"mean_keys": np.ones((num_rows, 8), np.float32)} if num_rows else {}
    with (tmp_path / "p.npz").open("wb") as file:
        header = np.array(json.dumps(header_with(format="tangram-profile/1")))
        np.savez(file, header=header, retained_model=np.array([[[0.25, 0.75]]]), **arrays)
    loaded = load_profile(tmp_path / "p.npz")
    assert loaded.statistics.keys() == arrays.keys()
    save_profile(loaded, tmp_path / "q.npz")
    assert same(load_profile(tmp_path / "q.npz"), loaded)


def test_zero_and_one_can_be_measured() -> None:
    check_profile(with_values(lambda values: values.__setitem__((slice(None), 0), [0.0, 1.0, 1.0, 0.0])), where="p")


def npz_of_an_object() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=True, header=np.array({"a": 1}, dtype=object))
    return buffer.getvalue()


def npy() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.ones((2, 3, 4)))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "content",
    [b"", b"garbage", b"PK\x03\x04", pickle.dumps({"header": 1}), npz_of_an_object(), npy(), b"\x93NUMPY"],
    ids=["empty", "text", "start of a zip", "pickle", "pickle inside", "npy", "start of an npy"],
)
def test_a_file_that_is_no_profile_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "p.npz").write_bytes(content)
    assert f"{tmp_path / 'p.npz'}: not a profile file: got " in refusal(lambda: load_profile(tmp_path / "p.npz"))


def test_a_folder_or_missing_file_is_refused_in_one_line(tmp_path: Path) -> None:
    assert "not a profile file" in refusal(lambda: load_profile(tmp_path))
    assert "not a profile file" in refusal(lambda: load_profile(tmp_path / "none.npz"))


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    save_profile(BOTH, tmp_path / "p.npz")
    content = (tmp_path / "p.npz").read_bytes()
    for length in (*range(0, len(content), 7), *range(len(content) - 30, len(content))):
        (tmp_path / "cut.npz").write_bytes(content[:length])
        refusal(lambda: load_profile(tmp_path / "cut.npz"))


def test_no_damaged_byte_is_believed(tmp_path: Path) -> None:
    save_profile(BOTH, tmp_path / "p.npz")
    content = (tmp_path / "p.npz").read_bytes()
    for index in range(0, len(content), 2):
        damaged = bytearray(content)
        damaged[index] ^= 0xFF
        (tmp_path / "damaged.npz").write_bytes(damaged)
        with contextlib.suppress(TangramError):
            loaded = load_profile(tmp_path / "damaged.npz")
            # Believed: a byte that says nothing, such as a time stamp; or one that hides a level.
            levels = {level: BOTH.retained[level] for level in loaded.retained}
            assert same(loaded, replace(BOTH, retained=levels))


# --- a disk that is full, a build that is stopped


@pytest.mark.parametrize("step", ["write_bytes", "replace", "mkdir"])
@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_profile_appears_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, fault: BaseException
) -> None:
    save_profile(PROFILE, tmp_path / "p.npz")

    def fail(path: Path, content: bytes = b"", *_: object, **__: object) -> NoReturn:
        if step == "write_bytes":
            with path.open("wb") as file:
                file.write(content[:100])
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(Path, step, fail)
        with pytest.raises((TangramError, KeyboardInterrupt)) as error:
            save_profile(BOTH, tmp_path / "p.npz")
    if isinstance(fault, OSError):
        assert f"{tmp_path / 'p.npz'}: cannot write the profile: got No space left on device" in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["p.npz"]
    assert same(load_profile(tmp_path / "p.npz"), PROFILE)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file" / "p.npz", tmp_path / "file" / "deep" / "p.npz"):
        assert f"{path}: cannot write the profile" in refusal(lambda path=path: save_profile(PROFILE, path))  # type: ignore[misc]


# --- names


def test_a_profile_is_found_by_file_by_stem_and_by_folder(tmp_path: Path) -> None:
    save_profile(PROFILE, tmp_path / "qwen" / "kvzip.npz")
    save_profile(PROFILE, tmp_path / "qwen" / "snap.v2.npz")
    for name in ("qwen/kvzip.npz", "qwen/kvzip", "qwen", "qwen/", str(tmp_path / "qwen")):
        assert find_profile(name, relative_to=tmp_path) == tmp_path / "qwen" / "kvzip.npz"
    assert find_profile("qwen/snap.v2", relative_to=tmp_path) == tmp_path / "qwen" / "snap.v2.npz"
    for here in (".", ""):
        assert find_profile(here, relative_to=tmp_path / "qwen") == tmp_path / "qwen" / "kvzip.npz"


def test_a_profile_is_found_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_profile(PROFILE, tmp_path / "kvzip.npz")
    monkeypatch.chdir(tmp_path)
    assert find_profile(".").resolve() == tmp_path / "kvzip.npz"


@pytest.mark.parametrize("name", ["none", ".", "", "~no-such-user/p", "x" * 300, "a/" * 3000, "..", "a\0b"])
def test_a_profile_that_is_not_there_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "profile does not exist" in refusal(lambda: find_profile(name))


@pytest.mark.parametrize("name", ["builtin:none", "builtin:", "builtin:none/kvzip"])
def test_an_unknown_builtin_profile_is_refused_with_those_that_ship(name: str) -> None:
    message = refusal(lambda: find_profile(name))
    assert f"no such built-in profile: got {name}, expected " in message
