"""`profile import`: anyone's retained fractions, as arrays in an `.npz` file, become a profile."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tangram_plan.ir import KVHead, ModelShape, TangramError
from tangram_plan.profiles import Level, Profile, Sample, check_profile

DEFAULT_RATIO = 0.3


@dataclass(frozen=True)
class ArrayKeys:
    """Names of the arrays in the file.

    Args:
        retained: float [samples, layers, kv_heads], retained fractions; leading axes of size 1 are dropped.
        layer_ids: int [layers], which layers of the model the rows are; None: the planned layers in order.
        ratio: float [1], the requested ratio; None: `requested_ratio` of the call.
        meta: [samples, ...], rows that are equal for samples of one context; None: every sample is its own context.
    """

    retained: str
    layer_ids: str | None = None
    ratio: str | None = None
    meta: str | None = None


def import_arrays(
    path: Path,
    keys: ArrayKeys,
    shape: ModelShape,
    *,
    model: str,
    scorer: str,
    level: Level,
    requested_ratio: float | None,
) -> Profile:
    """Read a profile from arrays.

    Args:
        path: the `.npz` (or `.npy`, for the retained fractions alone) file.
        keys: names of the arrays in it.
        shape: the model that was measured.
        model: its name.
        scorer: the scorer that was measured.
        level: scope of the pooled top-k that the arrays hold.
        requested_ratio: retention ratio that was asked for, if the file does not hold it.

    Raises:
        TangramError: the file cannot be read, lacks an array, or an array does not fit the model.
    """
    arrays = _read(path)
    retained = _drop_leading(
        _array(arrays, keys.retained, path, option="--key").astype(np.float64), path, keys.retained
    )
    layer_ids = list(shape.planned_layers)
    if keys.layer_ids is not None:
        ids = _array(arrays, keys.layer_ids, path, option="--layer-ids").astype(np.float64).ravel()
        if not np.all(np.isfinite(ids) & (ids == np.round(ids))):
            raise TangramError(
                "layers are not whole numbers", where=f"{path}, array {keys.layer_ids}", got=ids.tolist()
            )
        layer_ids = [int(layer) for layer in ids]
    if len(layer_ids) != retained.shape[1]:
        raise TangramError(
            "layers of the array do not match the model",
            where=f"{path}, array {keys.retained}",
            got=f"{retained.shape[1]} rows",
            expected=f"{len(layer_ids)} layers ({'--layer-ids' if keys.layer_ids else 'full-attention layers of the model'})",
            fix="name the layers by --layer-ids" if keys.layer_ids is None else "",
        )
    for layer in layer_ids:
        if layer not in shape.planned_layers:
            raise TangramError(
                f"layer {layer} keeps no full KV cache in this model",
                where=f"{path}, array {keys.layer_ids}",
                expected=f"layers of {list(shape.planned_layers)}",
            )
        if (num_heads := shape.layers[layer].num_kv_heads) != retained.shape[2]:
            raise TangramError(
                f"KV heads of layer {layer} do not match the model",
                where=f"{path}, array {keys.retained}",
                got=retained.shape[2],
                expected=str(num_heads),
            )
    if len(set(layer_ids)) != len(layer_ids):
        raise TangramError("a layer is named twice", where=f"{path}, array {keys.layer_ids}", got=layer_ids)
    order = np.argsort(layer_ids, kind="stable")
    kv_heads = tuple(KVHead(layer, head) for layer in sorted(layer_ids) for head in range(retained.shape[2]))
    profile = Profile(
        model=model,
        model_fingerprint=shape.fingerprint,
        scorer=scorer,
        kv_heads=kv_heads,
        ratios=(_ratio(arrays, keys, path, requested_ratio),),
        samples=_samples(arrays, keys, path, len(retained)),
        retained={level: retained[:, order].reshape(len(retained), 1, -1)},
    )
    check_profile(profile, where=f"{path}, array {keys.retained}")
    return profile


def _read(path: Path) -> dict[str, npt.NDArray[np.generic]]:
    try:
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                return {"": loaded}
            with loaded:
                return {name: loaded[name] for name in loaded.files}
    except FileNotFoundError as error:
        raise TangramError("file does not exist", where=str(path), expected="an .npz or .npy file") from error
    except Exception as error:  # numpy, zipfile and zlib raise a dozen kinds for what is damaged or no .npz
        raise TangramError(
            "file cannot be read",
            where=str(path),
            got=str(error).partition("\n")[0] or type(error).__name__,
            expected="an .npz or .npy file without pickled objects",
        ) from error


def _array(
    arrays: dict[str, npt.NDArray[np.generic]], name: str, path: Path, *, option: str
) -> npt.NDArray[np.generic]:
    if set(arrays) == {""} and option == "--key":
        name = ""
    if name not in arrays:
        raise TangramError(
            "file has no such array",
            where=f"{path}, {option}",
            got=name,
            expected=f"one of {', '.join(sorted(arrays))}",
        )
    if np.asarray(arrays[name]).dtype.kind not in "iuf":
        raise TangramError(
            "array does not hold numbers",
            where=f"{path}, {option} {name}".rstrip(),
            got=np.asarray(arrays[name]).dtype,
            expected="integers or floating-point numbers",
        )
    return arrays[name]


def _drop_leading(values: npt.NDArray[np.float64], path: Path, name: str) -> npt.NDArray[np.float64]:
    shape = values.shape
    while values.ndim > 3 and values.shape[0] == 1:
        values = values[0]
    if values.ndim != 3 or not values.size:
        raise TangramError(
            "array has the wrong shape",
            where=f"{path}, array {name}",
            got=list(shape),
            expected="[samples, layers, kv_heads], none of them 0",
        )
    return values


def _ratio(
    arrays: dict[str, npt.NDArray[np.generic]], keys: ArrayKeys, path: Path, requested_ratio: float | None
) -> float:
    if keys.ratio is None:
        return DEFAULT_RATIO if requested_ratio is None else requested_ratio
    ratios = _array(arrays, keys.ratio, path, option="--ratio-key").astype(np.float64).ravel()
    if len(ratios) != 1:
        raise TangramError(
            "array holds several ratios",
            where=f"{path}, --ratio-key {keys.ratio}",
            got=ratios.tolist(),
            expected="one",
            fix="import one ratio at a time",
        )
    return round(float(ratios[0]), 6)


def _samples(
    arrays: dict[str, npt.NDArray[np.generic]], keys: ArrayKeys, path: Path, num_samples: int
) -> tuple[Sample, ...]:
    if keys.meta is None:
        return tuple(Sample(f"{path.name}[{index}]", index, 0) for index in range(num_samples))
    meta = _array(arrays, keys.meta, path, option="--meta-key")
    if not meta.ndim or len(meta) != num_samples:
        raise TangramError(
            "array has the wrong length",
            where=f"{path}, --meta-key {keys.meta}",
            got=list(meta.shape),
            expected=f"{num_samples} rows, one per sample",
        )
    rows = [tuple(row) for row in meta.reshape(num_samples, -1).tolist()]
    context_of = {row: index for index, row in enumerate(dict.fromkeys(rows))}
    return tuple(Sample(f"{path.name}[{index}]", context_of[row], 0) for index, row in enumerate(rows))
