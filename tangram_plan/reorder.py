"""Rewrite a checkpoint so that the KV heads of each layer stand in the order of a plan.

A KV head takes its whole block along: its rows of k and v, and the rows of q, the columns of o and the sinks of the query
heads that read it. The model computes the same; but a tensor-parallel rank, which owns a run of consecutive heads, now owns
the heads that the plan wants on it.

A permutation leaves every tensor's shape, dtype and place in its file as they were. So files are copied whole and the moved
tensors are then rewritten in place, as bytes: one tensor in memory at a time, any dtype, no torch.
"""

import json
import math
import re
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from tangram_plan.ir import HeadOrder, LayerKind, LayerShape, MismatchError, ModelShape, TangramError

from .model_config import load_model_config

HEAD_ORDER_KEY = "tangram_head_order"

_INDEX_NAME, _SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"
# Weights that no index names (consolidated.safetensors, original/*.pth) hold the original order: they are left behind.
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pth", ".pt", ".gguf", ".onnx", ".h5", ".msgpack"}
_MAX_HEADER_BYTES = 100 << 20

_ATTENTION_TENSOR = re.compile(r"(?P<prefix>(?:[^.]+\.)*)layers\.(?P<layer>\d+)\.self_attn\.(?P<part>.+)")
# What may stand before `layers` in the decoder's names; towers for vision and audio, talkers and MTP heads have other words.
_DECODER_PREFIXES = {"model", "language_model", "text_model", "llm", "thinker", "decoder"}

_O_PROJ = ("o_proj", "out_proj", "dense")
_NORMS = {"q_norm": "q", "q_layernorm": "q", "k_norm": "k", "k_layernorm": "k"}
_WEIGHT_DTYPES = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I8"}  # one element per weight: not packed
_MATRIX_SCALES = {"weight_scale", "weight_scale_inv", "weight_zero_point"}
_TENSOR_SCALES = {"input_scale", "output_scale", "k_scale", "v_scale"}
_GATED_MODELS = {"qwen3_next", "qwen3_5", "qwen3_5_moe"}  # q_proj gives each head its query, then its gate
_FUSED_MODELS = {"phi3"}  # qkv_proj has the rows of q, then of k, then of v


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
    _check_fresh(config, str(config_path))
    try:
        _check_output(model, output)
    except OSError as error:
        raise TangramError("cannot use the output", where=str(output), got=error.strerror) from None
    shards = _shards(model)
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


def check_head_order(config: Mapping[str, Any], order: HeadOrder, where: str) -> None:
    """That a model's heads stand in the order a plan was made for.

    Args:
        config: the model's whole `config.json`.
        order: the plan's order.
        where: what to call the config in the error.

    Raises:
        MismatchError: they do not.
    """
    found = config.get(HEAD_ORDER_KEY) or ""
    if found == order.hash:
        return
    if not order.hash:
        fix = "serve the original checkpoint, or the plan that this one was reordered for"
    else:
        fix = "reorder the original checkpoint for this plan and serve the result"
    got, expected = found or "the original order", order.hash or "the original order"
    raise MismatchError(
        "KV heads are in another order", where=f"{where}: {HEAD_ORDER_KEY}", got=got, expected=expected, fix=fix
    )


# --- what is asked for ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _MovedLayer:
    """A layer whose heads move: one that the order names, or one that reads such a layer's KV cache."""

    index: int
    layer: LayerShape
    heads: tuple[int, ...]
    head_dim: int


def _moved_layers(shape: ModelShape, order: HeadOrder) -> dict[int, _MovedLayer]:
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
            moved[i] = _MovedLayer(i, layer, heads, shape.head_dim)
    return moved


def _check_fresh(config: Mapping[str, Any], where: str) -> None:
    if config.get(HEAD_ORDER_KEY):
        raise TangramError(
            "the model was reordered before",
            where=f"{where}: {HEAD_ORDER_KEY}",
            got=config[HEAD_ORDER_KEY],
            fix="start from the original checkpoint",
        )


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


# --- what the checkpoint holds ----------------------------------------------------------------------------------------


class _Tensor(NamedTuple):
    """One entry of a safetensors header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # of its bytes, in the file
    num_bytes: int


class _Move(NamedTuple):
    """How one tensor changes: along `dim`, each of the consecutive segments `widths` is cut into one block per KV head."""

    tensor: _Tensor
    dim: int
    widths: tuple[int, ...]
    heads: tuple[int, ...]


def _shards(model: Path) -> list[Path]:
    """The safetensors files of the checkpoint."""
    index = model / _INDEX_NAME
    if not index.is_file():
        if not (model / _SINGLE_NAME).is_file():
            raise TangramError(
                "no safetensors checkpoint", where=str(model), expected=f"{_SINGLE_NAME} or {_INDEX_NAME}"
            )
        return [model / _SINGLE_NAME]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        raise TangramError("broken index of shards", where=str(index), expected="an object with weight_map") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (model / name).is_file():
            raise TangramError("a shard is missing", where=str(index), got=repr(name))
    return sorted(model / name for name in names)


def _tensors(shard: Path) -> Iterator[_Tensor]:
    """The header of a safetensors file: its length in 8 bytes, then JSON; offsets count from the header's end."""
    try:
        with shard.open("rb") as file:
            (num_header_bytes,) = struct.unpack("<Q", file.read(8))
            if num_header_bytes > _MAX_HEADER_BYTES:
                raise ValueError
            header = json.loads(file.read(num_header_bytes))
        size = shard.stat().st_size - 8 - num_header_bytes
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            sizes = tuple(entry["shape"])
            if not 0 <= start <= end <= size or not all(isinstance(n, int) and n >= 0 for n in sizes):
                raise ValueError
            yield _Tensor(name, str(entry["dtype"]), sizes, 8 + num_header_bytes + start, end - start)
    except OSError as error:
        raise TangramError("cannot read the checkpoint", where=str(shard), got=error.strerror) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error):
        fix = "is it cut short? fetch it again"
        raise TangramError("broken safetensors file", where=str(shard), fix=fix) from None


def _plan_moves(
    shards: list[Path], shape: ModelShape, moved: Mapping[int, _MovedLayer], config: Mapping[str, Any]
) -> dict[Path, list[_Move]]:
    """Shard -> what moves in it. Looks at every name and shape before anything is written."""
    moves: dict[Path, list[_Move]] = {shard: [] for shard in shards}
    modules: dict[int, set[str]] = {i: set() for i in moved}
    prefixes: set[str] = set()
    layout = _Layout(shape.model_type, _scale_block(config))
    for shard in shards:
        for tensor in _tensors(shard):
            match = _ATTENTION_TENSOR.fullmatch(tensor.name)
            if match is None or not set(match["prefix"].split(".")[:-1]) <= _DECODER_PREFIXES:
                continue
            if int(match["layer"]) not in moved:
                continue
            prefixes.add(match["prefix"])
            layer = moved[int(match["layer"])]
            modules[layer.index].add(match["part"].split(".")[0])
            found = layout.head_segments(tensor, match["part"], layer)
            if found is None:
                continue
            num_elements = math.prod(tensor.shape)
            if num_elements == 0 or tensor.num_bytes % num_elements:
                raise TangramError(
                    "broken safetensors file", where=f"{shard}: {tensor.name}", got=f"{tensor.num_bytes} bytes"
                )
            moves[shard].append(_Move(tensor, *found, layer.heads))
    if len(prefixes) > 1:
        raise TangramError(
            "several decoders in one checkpoint", where=str(shards[0].parent), got=", ".join(sorted(prefixes))
        )
    for i, names in modules.items():
        _check_complete(moved[i], names, str(shards[0].parent))
    return moves


def _check_complete(layer: _MovedLayer, modules: set[str], where: str) -> None:
    """That q, k and o were found: a layer of which only a part moves is wrong. Models that use k as v have no v."""
    fused, shared = "qkv_proj" in modules, layer.layer.kind is LayerKind.SHARED
    needed = {"q": fused or "q_proj" in modules, "k": fused or shared or "k_proj" in modules}
    needed["o"] = not modules.isdisjoint(_O_PROJ)
    missing = [f"{name}_proj" for name, found in needed.items() if not found]
    if missing:
        what = f"layer {layer.index} has no {', '.join(missing)}"
        expected = f"tensors named like model.layers.{layer.index}.self_attn.{missing[0]}.weight"
        raise TangramError(what, where=where, expected=expected)


def _scale_block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a weight that share one scale, if the config says so."""
    quantization = config.get("quantization_config")
    block = quantization.get("weight_block_size") if isinstance(quantization, Mapping) else None
    if isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block):
        return block[0], block[1]
    return None


# --- where the heads stand in a tensor --------------------------------------------------------------------------------

_Segments = tuple[int, tuple[int, ...]] | None  # dimension and widths; None: the tensor is the same for every order


@dataclass(frozen=True)
class _Layout:
    """Where the heads stand in the attention tensors of one architecture."""

    model_type: str
    scale_block: tuple[int, int] | None

    def head_segments(self, tensor: _Tensor, part: str, layer: _MovedLayer) -> _Segments:
        """The dimension along which heads stand, and the widths of the segments (q, k, v of a fused tensor) along it.

        Args:
            tensor: a tensor of the attention module.
            part: its name inside the module, such as `q_proj.weight`.
            layer: whose attention it is.

        Raises:
            TangramError: the name or the layout is not known.
        """
        module, _, leaf = part.rpartition(".")
        if part == "rotary_emb.inv_freq":
            return None
        if part == "sinks":
            _check_shape(tensor, (layer.layer.num_q_heads,))
            return 0, tensor.shape
        if module in _NORMS and leaf in ("weight", "bias"):
            return _norm_segments(tensor, _NORMS[module], layer)
        if leaf in _TENSOR_SCALES and math.prod(tensor.shape) == 1:
            return None
        widths = self._widths(module, layer)
        if widths is None:
            raise _unknown(tensor)
        dim = 1 if module in _O_PROJ else 0
        if leaf == "bias":
            return self._bias_segments(tensor, dim, widths)
        if leaf == "weight":
            return self._weight_segments(tensor, dim, widths)
        if leaf in _MATRIX_SCALES:
            return self._scale_segments(tensor, dim, widths, len(layer.heads))
        raise _unknown(tensor)

    def _widths(self, module: str, layer: _MovedLayer) -> tuple[int, ...] | None:
        q = layer.layer.num_q_heads * layer.head_dim
        kv = layer.layer.num_kv_heads * layer.head_dim
        if module in _O_PROJ:
            return (q,)
        if module == "qkv_proj" and self.model_type in _FUSED_MODELS:
            return q, kv, kv
        gated_q = 2 * q if self.model_type in _GATED_MODELS else q
        return {"q_proj": (gated_q,), "k_proj": (kv,), "v_proj": (kv,)}.get(module)

    def _bias_segments(self, tensor: _Tensor, dim: int, widths: tuple[int, ...]) -> _Segments:
        if dim == 1:  # the bias of o is added after the heads are summed
            return None
        _check_shape(tensor, (sum(widths),))
        return 0, widths

    def _weight_segments(self, tensor: _Tensor, dim: int, widths: tuple[int, ...]) -> _Segments:
        if tensor.dtype not in _WEIGHT_DTYPES:
            raise _unknown(tensor, got=f"packed weights ({tensor.dtype})")
        if len(tensor.shape) != 2:
            raise MismatchError("wrong shape", where=tensor.name, got=list(tensor.shape), expected="a matrix")
        _check_shape(tensor, (sum(widths), tensor.shape[1]) if dim == 0 else (tensor.shape[0], sum(widths)))
        return dim, widths

    def _scale_segments(self, tensor: _Tensor, dim: int, widths: tuple[int, ...], num_kv_heads: int) -> _Segments:
        """Scales stand one per tensor, one per row, or one per block of `scale_block`."""
        length = tensor.shape[dim] if dim < len(tensor.shape) else 1
        if length == 1:
            return None
        if length == sum(widths):
            return dim, widths
        block = self.scale_block[dim] if self.scale_block else 0
        if not block or any(width % (num_kv_heads * block) for width in widths) or length * block != sum(widths):
            raise _unknown(
                tensor, got="scales that several KV heads share, or whose block is not in quantization_config"
            )
        return dim, tuple(width // block for width in widths)


def _norm_segments(tensor: _Tensor, which: str, layer: _MovedLayer) -> _Segments:
    """A norm is `head_dim` wide and shared by all heads, or has values of its own for each head (OLMo 2, Cohere)."""
    num_heads = layer.layer.num_q_heads if which == "q" else layer.layer.num_kv_heads
    if tensor.shape == (layer.head_dim,):
        return None
    if tensor.shape not in {(num_heads * layer.head_dim,), (num_heads, layer.head_dim)}:
        raise _unknown(tensor, got=f"shape {list(tensor.shape)}")
    return 0, tensor.shape[:1]


def _check_shape(tensor: _Tensor, expected: tuple[int, ...]) -> None:
    if tensor.shape != expected:
        raise MismatchError(
            "wrong shape", where=tensor.name, got=list(tensor.shape), expected=f"{list(expected)} by config.json"
        )


def _unknown(tensor: _Tensor, got: object = None) -> TangramError:
    """An attention tensor that would have to move, or not, and we cannot tell how."""
    fix = "plan without a head order (tensor_parallel_size 1), or use a checkpoint in bf16"
    return TangramError("cannot reorder this attention tensor", where=tensor.name, got=got, fix=fix)


# --- writing ----------------------------------------------------------------------------------------------------------


def _other_files(model: Path) -> list[Path]:
    """Tokenizer, code and the like: neither weights nor hidden."""
    files = (path for path in sorted(model.rglob("*")) if path.is_file() and path.suffix not in _WEIGHT_SUFFIXES)
    return [path for path in files if not any(name.startswith(".") for name in path.relative_to(model).parts[:-1])]


def _write(
    model: Path,
    partial: Path,
    files: list[Path],
    moves: Mapping[Path, list[_Move]],
    progress: Callable[[int, int], None] | None,
) -> None:
    done_bytes, total_bytes = 0, sum(path.stat().st_size for path in files)
    for path in files:
        copy = partial / path.relative_to(model)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        with copy.open("r+b") as file:
            for move in moves.get(path, []):
                _rewrite(file, move)
        done_bytes += path.stat().st_size
        if progress:
            progress(done_bytes, total_bytes)


def _rewrite(file: BinaryIO, move: _Move) -> None:
    """Put the blocks of one tensor into their new order, in the file."""
    tensor = move.tensor
    file.seek(tensor.start)
    data = np.frombuffer(file.read(tensor.num_bytes), np.uint8).reshape(*tensor.shape, -1)  # last: bytes of an element
    segments = np.split(data, np.cumsum(move.widths)[:-1], axis=move.dim)
    permuted = np.concatenate([_permute_blocks(segment, move.dim, move.heads) for segment in segments], axis=move.dim)
    file.seek(tensor.start)
    file.write(np.ascontiguousarray(permuted).data)


def _permute_blocks(segment: np.ndarray[Any, np.dtype[np.uint8]], dim: int, heads: tuple[int, ...]) -> Any:
    blocks = segment.reshape(*segment.shape[:dim], len(heads), -1, *segment.shape[dim + 1 :])
    return np.take(blocks, heads, axis=dim).reshape(segment.shape)
