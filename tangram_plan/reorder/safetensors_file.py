"""Safetensors files as bytes: which make up a checkpoint, where each tensor stands, and how its blocks are put in order."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from tangram_plan.ir import TangramError

_INDEX_NAME, _SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"
_MAX_HEADER_BYTES = 100 << 20


class Tensor(NamedTuple):
    """One entry of a safetensors header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # of its bytes, in the file
    num_bytes: int


class Move(NamedTuple):
    """How one tensor changes: along `dim`, each of the consecutive segments `widths` is cut into one block per KV head."""

    tensor: Tensor
    dim: int
    widths: tuple[int, ...]
    heads: tuple[int, ...]


def shards_of(model: Path) -> list[Path]:
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


def read_tensors(shard: Path) -> Iterator[Tensor]:
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
            yield Tensor(name, str(entry["dtype"]), sizes, 8 + num_header_bytes + start, end - start)
    except OSError as error:
        raise TangramError("cannot read the checkpoint", where=str(shard), got=error.strerror) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error):
        fix = "is it cut short? fetch it again"
        raise TangramError("broken safetensors file", where=str(shard), fix=fix) from None


def rewrite(file: BinaryIO, move: Move) -> None:
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
