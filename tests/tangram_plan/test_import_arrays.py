from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tangram_plan.import_arrays import DEFAULT_RATIO, ArrayKeys, import_arrays
from tangram_plan.ir import KVHead, LayerKind, LayerShape, ModelShape, TangramError
from tangram_plan.profiles import Level, Profile

NUM_SAMPLES, NUM_CONTEXTS = 28, 18
PUBLISHED = ArrayKeys("raw_ratio", "static_layer_ids", "base_ratios", "sample_meta")
QWEN = ModelShape("qwen3", tuple(LayerShape(LayerKind.FULL, 8, 32, layer) for layer in range(36)), 128)
GEMMA_LAYERS = (5, 11, 17, 23, 29, 35, 41, 47)
GEMMA = ModelShape(
    "gemma3",
    tuple(
        LayerShape(LayerKind.FULL if layer in GEMMA_LAYERS else LayerKind.SLIDING, 8, 16, layer) for layer in range(48)
    ),
    256,
)


def published_arrays(layers: tuple[int, ...], seed: int = 0) -> dict[str, Any]:
    """Arrays of the form in which the method's authors publish theirs."""
    generator = np.random.default_rng(seed)
    contexts = generator.integers(14_000, 26_000, NUM_CONTEXTS)
    meta = np.array(
        [[contexts[index % NUM_CONTEXTS], 32, contexts[index % NUM_CONTEXTS] + 32, 4096] for index in range(28)]
    )
    retained = generator.uniform(0.01, 0.6, (1, NUM_SAMPLES, len(layers), 8))
    return {
        "raw_ratio": retained,
        "raw_kept": (retained * 10_000).astype(np.int32),
        "sample_meta": meta.astype(np.int32),
        "base_ratios": np.array([0.3], dtype=np.float32),
        "static_layer_ids": np.array(layers),
        "meta": np.frombuffer(b'{"scorer": "kvzip"}', dtype=np.uint8),
    }


def read(
    folder: Path,
    arrays: dict[str, Any],
    keys: ArrayKeys = PUBLISHED,
    shape: ModelShape = QWEN,
    ratio: float | None = None,
    level: Level = Level.MODEL,
) -> Profile:
    np.savez(folder / "arrays.npz", **arrays)
    return import_arrays(
        folder / "arrays.npz", keys, shape, model="m", scorer="kvzip", level=level, requested_ratio=ratio
    )


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(TangramError) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


# --- arrays as published


def test_published_arrays_become_a_profile(tmp_path: Path) -> None:
    arrays = published_arrays(tuple(range(36)))
    profile = read(tmp_path, arrays)
    assert profile.kv_heads == tuple(KVHead(layer, head) for layer in range(36) for head in range(8))
    assert (profile.model, profile.scorer, profile.model_fingerprint) == ("m", "kvzip", QWEN.fingerprint)
    assert profile.ratios == (0.3,)  # although float32 holds 0.30000001
    assert list(profile.retained) == [Level.MODEL]
    retained = profile.at_ratio(Level.MODEL, 0.3)
    assert retained.shape == (28, 288)
    for sample, layer, head in ((0, 0, 0), (3, 17, 5), (27, 35, 7)):
        assert retained[sample, layer * 8 + head] == arrays["raw_ratio"][0, sample, layer, head]


def test_samples_of_one_context_are_told_by_their_meta_row(tmp_path: Path) -> None:
    profile = read(tmp_path, published_arrays(tuple(range(36))))
    assert [sample.context for sample in profile.samples] == [*range(18), *range(10)]
    assert [sample.source for sample in profile.samples][:2] == ["arrays.npz[0]", "arrays.npz[1]"]


def test_rows_belong_to_the_layers_that_the_file_names(tmp_path: Path) -> None:
    arrays = published_arrays(GEMMA_LAYERS)
    profile = read(tmp_path, arrays, shape=GEMMA)
    assert profile.layers == GEMMA_LAYERS
    assert profile.at_ratio(Level.MODEL, 0.3)[4, 8 * 2 + 3] == arrays["raw_ratio"][0, 4, 2, 3]


def test_rows_in_another_order_give_the_same_profile(tmp_path: Path) -> None:
    arrays = published_arrays(GEMMA_LAYERS)
    straight = read(tmp_path, arrays, shape=GEMMA)
    arrays |= {
        "raw_ratio": arrays["raw_ratio"][:, :, ::-1],
        "static_layer_ids": np.array(GEMMA_LAYERS[::-1], dtype=np.float32),
    }
    assert read(tmp_path, arrays, shape=GEMMA).hash == straight.hash


def test_without_layer_ids_rows_are_the_full_attention_layers(tmp_path: Path) -> None:
    arrays = published_arrays(GEMMA_LAYERS)
    with_ids = read(tmp_path, arrays, shape=GEMMA)
    assert read(tmp_path, arrays, ArrayKeys("raw_ratio", None, "base_ratios", "sample_meta"), GEMMA).hash == (
        with_ids.hash
    )


# --- arrays of other tools


def test_retained_fractions_alone_are_enough(tmp_path: Path) -> None:
    retained = np.random.default_rng(1).uniform(0, 1, (5, 36, 8)).astype(np.float32)
    np.save(tmp_path / "mine.npy", retained)
    profile = import_arrays(
        tmp_path / "mine.npy",
        ArrayKeys("retained"),
        QWEN,
        model="m",
        scorer="s",
        level=Level.LAYER,
        requested_ratio=None,
    )
    assert profile.ratios == (DEFAULT_RATIO,)
    assert np.array_equal(profile.retained[Level.LAYER][:, 0], retained.reshape(5, 288).astype(np.float64))
    assert [sample.context for sample in profile.samples] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("option", "expected"), [(None, 0.3), (0.45, 0.45), (1.0, 1.0)])
def test_the_requested_ratio_may_come_from_the_caller(tmp_path: Path, option: float | None, expected: float) -> None:
    keys = ArrayKeys("raw_ratio", "static_layer_ids")
    assert read(tmp_path, published_arrays(tuple(range(36))), keys, ratio=option).ratios == (expected,)


# --- what is refused


def changed(**changes: Any) -> dict[str, Any]:
    return published_arrays(tuple(range(36))) | changes


def with_value(value: float) -> dict[str, Any]:
    arrays = published_arrays(tuple(range(36)))
    arrays["raw_ratio"][0, 9, 30, 6] = value
    return arrays


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.01, 1.01])
def test_a_value_that_is_no_fraction_is_named_by_sample_layer_and_head(tmp_path: Path, value: float) -> None:
    message = refusal(lambda: read(tmp_path, with_value(value)))
    assert "retained fraction of sample 9, layer 30, head 6 is not valid" in message
    assert f"got {value}" in message


@pytest.mark.parametrize(
    ("arrays", "parts"),
    [
        (changed(raw_ratio=np.full((1, 28, 35, 8), 0.5)), ("got 35 rows", "expected 36 layers (--layer-ids)")),
        (changed(raw_ratio=np.full((1, 28, 36, 4), 0.5)), ("KV heads of layer 0", "got 4, expected 8")),
        (changed(raw_ratio=np.full((28, 36), 0.5)), ("got [28, 36]", "[samples, layers, kv_heads]")),
        (changed(raw_ratio=np.full((2, 28, 36, 8), 0.5)), ("got [2, 28, 36, 8]",)),
        (changed(raw_ratio=np.float64(0.5)), ("got []",)),
        (changed(raw_ratio=np.full((1, 28, 36, 8), "0.5")), ("--key raw_ratio", "does not hold numbers", "got <U3")),
        (changed(raw_ratio=np.full((1, 28, 36, 8), 1j)), ("--key raw_ratio", "got complex128")),
        (changed(raw_ratio=np.zeros((1, 28, 36, 8))), ("sample 0 retains nothing",)),
        (changed(raw_ratio=np.zeros((0, 36, 8)), sample_meta=np.zeros((0, 4))), ("got [0, 36, 8]", "none of them 0")),
        (changed(static_layer_ids=np.arange(1, 37)), ("layer 36 keeps no full KV cache",)),
        (changed(static_layer_ids=np.arange(-1, 35)), ("layer -1 keeps no full KV cache",)),
        (changed(static_layer_ids=np.array([0, *range(35)])), ("a layer is named twice",)),
        (changed(static_layer_ids=np.full(36, np.nan)), ("layers are not whole numbers",)),
        (changed(static_layer_ids=np.arange(36) + 0.5), ("layers are not whole numbers",)),
        (changed(base_ratios=np.array([0.2, 0.3])), ("several ratios", "got [0.2, 0.3]")),
        (changed(base_ratios=np.array([])), ("several ratios", "got []")),
        (changed(base_ratios=np.array([0.0])), ("requested ratios are not valid", "got [0.0]")),
        (changed(base_ratios=np.array([np.nan])), ("requested ratios are not valid", "got [nan]")),
        (changed(base_ratios=np.array([1.5])), ("requested ratios are not valid", "got [1.5]")),
        (changed(sample_meta=np.zeros((27, 4))), ("--meta-key sample_meta", "got [27, 4]", "28 rows")),
        (changed(sample_meta=np.float64(3)), ("--meta-key sample_meta", "got []", "28 rows")),
        ({"raw_ratio": np.full((1, 28, 36, 8), 0.5)}, ("--layer-ids", "got static_layer_ids", "one of raw_ratio")),
        ({"other": np.full((1, 28, 36, 8), 0.5)}, ("--key", "got raw_ratio", "one of other")),
    ],
    ids=range(23),
)
def test_arrays_that_do_not_fit_are_refused_in_one_line(
    tmp_path: Path, arrays: dict[str, Any], parts: tuple[str, ...]
) -> None:
    message = refusal(lambda: read(tmp_path, arrays))
    for part in (str(tmp_path / "arrays.npz"), *parts):
        assert part in message


def test_arrays_of_another_model_are_refused(tmp_path: Path) -> None:
    arrays = published_arrays(tuple(range(36)))
    assert "layer 0 keeps no full KV cache" in refusal(lambda: read(tmp_path, arrays, shape=GEMMA))
    without_ids = ArrayKeys("raw_ratio", None, "base_ratios")
    message = refusal(lambda: read(tmp_path, arrays, without_ids, GEMMA))
    assert "got 36 rows, expected 8 layers (full-attention layers of the model); name the layers by" in message


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04", b"\x93NUMPY\x01\x00"], ids=repr)
@pytest.mark.parametrize("name", ["a.npz", "a.npy"])
def test_a_file_without_arrays_is_refused_in_one_line(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    message = refusal(
        lambda: import_arrays(
            tmp_path / name, PUBLISHED, QWEN, model="m", scorer="s", level=Level.MODEL, requested_ratio=None
        )
    )
    assert f"{tmp_path / name}: file cannot be read: got " in message


def test_a_missing_file_and_pickled_arrays_are_refused(tmp_path: Path) -> None:
    def read_it() -> object:
        return import_arrays(
            tmp_path / "a.npy", PUBLISHED, QWEN, model="m", scorer="s", level=Level.MODEL, requested_ratio=None
        )

    assert f"{tmp_path / 'a.npy'}: file does not exist" in refusal(read_it)
    np.save(tmp_path / "a.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert "without pickled objects" in refusal(read_it)


def test_text_in_a_lone_array_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.full((5, 36, 8), "half"))
    message = refusal(
        lambda: import_arrays(
            tmp_path / "a.npy", PUBLISHED, QWEN, model="m", scorer="s", level=Level.MODEL, requested_ratio=None
        )
    )
    assert "array does not hold numbers" in message
