"""Rewrite a checkpoint: what must hold before, which tensors move, and the new folder."""

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tangram_plan.ir import (
    HEAD_ORDER_KEY,
    ORIGINAL_ORDER,
    HeadOrder,
    MismatchError,
    ModelShape,
    TangramError,
    check_head_order,
)
from tangram_plan.model_config import load_model_config

from .attention_layout import Layout, MovedLayer, attention_part, check_complete, scale_block
from .safetensors_file import Move, read_tensors, rewrite, shards_of

# Weights that no index names (consolidated.safetensors, original/*.pth) hold the original order: they are left behind.
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pth", ".pt", ".gguf", ".onnx", ".h5", ".msgpack"}


def reorder_checkpoint(
    model: Path,
    shape: ModelShape,
    order: HeadOrder,
    output: Path,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the checkpoint in `model`, reordered, to the new folder `output`, with the order's hash in its `config.json`.

    Tokenizer and other files are copied; other formats of the weights are left behind, as they would keep the old order.
    Until all is written the folder is called `<output>.partial`, and a failure removes it.

    Args:
        model: folder with `config.json` and `model.safetensors`, or shards and their index.
        shape: the model's shape.
        order: planned layer -> the original KV head for every new place; not the original order.
        output: a folder that does not exist or is empty.
        progress: called with (bytes done, bytes in all) after each file.

    Raises:
        TangramError: the checkpoint, the order or the output is not fit for it, an attention tensor of a moved layer has a
            name or a layout that we do not know, or a file could not be written.
    """
    config, config_path = load_model_config(str(model), relative_to=Path())
    moved = _moved_layers(shape, order)
    check_head_order(config, ORIGINAL_ORDER, str(config_path))
    try:
        _check_output(model, output)
    except OSError as error:
        raise TangramError("cannot use the output", where=str(output), got=error.strerror) from None
    shards = shards_of(model)
    moves = _plan_moves(shards, shape, moved, config)
    files = [*shards, *_other_files(model)]
    partial = output.with_name(output.name + ".partial")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
    except OSError as error:
        raise TangramError("cannot write", where=str(partial), got=error.strerror) from None
    try:
        _write(model, partial, files, moves, progress)
        (partial / "config.json").write_text(
            json.dumps(config | {HEAD_ORDER_KEY: order.hash}, indent=2) + "\n", encoding="utf-8"
        )
        partial.rename(output)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        fix = "nothing was kept"
        raise TangramError("cannot write the checkpoint", where=str(output), got=error.strerror, fix=fix) from None
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _moved_layers(shape: ModelShape, order: HeadOrder) -> dict[int, MovedLayer]:
    if not order.hash:
        raise TangramError("nothing to reorder", got="the original order", fix="serve the model as it is")
    planned = set(shape.planned_layers)
    for i, heads in order.layers.items():
        if i not in planned:
            raise MismatchError(
                f"head order names layer {i}, which the model does not plan", expected=f"one of {sorted(planned)}"
            )
        if sorted(heads) != list(range(shape.layers[i].num_kv_heads)):
            expected = f"each of 0 ... {shape.layers[i].num_kv_heads - 1} once"
            raise MismatchError(f"head order of layer {i} is no permutation", got=list(heads), expected=expected)
    moved = {}
    for i, layer in enumerate(shape.layers):
        heads = tuple(order.layers.get(layer.kv_owner, ()))
        if heads != tuple(sorted(heads)):
            moved[i] = MovedLayer(i, layer, heads, shape.head_dim)
    return moved


def _check_output(model: Path, output: Path) -> None:
    if output.resolve().is_relative_to(model.resolve()):
        raise TangramError("the output lies inside the model's folder", where=str(output), fix="choose another folder")
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise TangramError(
            "the output exists and is not an empty folder", where=str(output), fix="choose another folder"
        )
    partial = output.with_name(output.name + ".partial")
    if partial.exists():
        raise TangramError("an unfinished output is in the way", where=str(partial), fix="remove it")


def _plan_moves(
    shards: list[Path], shape: ModelShape, moved: Mapping[int, MovedLayer], config: Mapping[str, Any]
) -> dict[Path, list[Move]]:
    """Shard -> what moves in it. Looks at every name and shape before anything is written."""
    moves: dict[Path, list[Move]] = {shard: [] for shard in shards}
    modules: dict[int, set[str]] = {i: set() for i in moved}
    prefixes: set[str] = set()
    layout = Layout(shape.model_type, scale_block(config))
    for shard in shards:
        for tensor in read_tensors(shard):
            name = attention_part(tensor.name)
            if name is None or name.layer not in moved:
                continue
            layer = moved[name.layer]
            prefixes.add(name.prefix)
            modules[layer.index].add(name.part.split(".")[0])
            found = layout.head_segments(tensor, name.part, layer)
            if found is None:
                continue
            num_elements = math.prod(tensor.shape)
            if num_elements == 0 or tensor.num_bytes % num_elements:
                raise TangramError(
                    "broken safetensors file", where=f"{shard}: {tensor.name}", got=f"{tensor.num_bytes} bytes"
                )
            moves[shard].append(Move(tensor, *found, layer.heads))
    if len(prefixes) > 1:
        raise TangramError(
            "several decoders in one checkpoint", where=str(shards[0].parent), got=", ".join(sorted(prefixes))
        )
    for i, names in modules.items():
        check_complete(moved[i], names, str(shards[0].parent))
    return moves


def _other_files(model: Path) -> list[Path]:
    """Tokenizer, code and the like: neither weights nor hidden."""
    files = (path for path in sorted(model.rglob("*")) if path.is_file() and path.suffix not in _WEIGHT_SUFFIXES)
    return [path for path in files if not any(name.startswith(".") for name in path.relative_to(model).parts[:-1])]


def _write(
    model: Path,
    partial: Path,
    files: list[Path],
    moves: Mapping[Path, list[Move]],
    progress: Callable[[int, int], None] | None,
) -> None:
    done_bytes, total_bytes = 0, sum(path.stat().st_size for path in files)
    for path in files:
        copy = partial / path.relative_to(model)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        with copy.open("r+b") as file:
            for move in moves.get(path, []):
                rewrite(file, move)
        done_bytes += path.stat().st_size
        if progress:
            progress(done_bytes, total_bytes)
