"""`model.yaml`: everything that a user decides, as one schema."""

import difflib
import math
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from tangram_plan.ir import PAGE_TOKEN_ALIGNMENT, KVDtype, TangramError
from tangram_plan.profiles import Level

_MOST_TOKENS = 2**31  # a context or an answer above this is a typing error
_MOST_REQUESTS = 2**16  # likewise


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        # YAML reads `yes` and `on` as true, which pydantic would take for 1.
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError("expected a number or a name")
        return value


class RetentionConfig(_Section):
    """Which part of its history each KV head keeps."""

    rule: Literal["target", "mean_std"] = Field(
        "target", description="`target` meets the ratio exactly; `mean_std` is the paper's mean + alpha * std"
    )
    ratio: float = Field(
        0.3, description="retention ratio: part of the compressible tokens that is kept; 1.0 keeps everything"
    )
    level: Level = Field(Level.MODEL, description="scope of the pooled top-k that the profile measured")
    alpha: float = Field(
        2.0, description="`mean_std` only: standard deviations above the mean", ge=0, allow_inf_nan=False
    )
    sink_tokens: int = Field(4, description="first tokens, always kept", ge=0)
    window_tokens: int = Field(32, description="most recent tokens, always kept", ge=0)

    @field_validator("ratio")
    @classmethod
    def _ratio_is_a_part(cls, ratio: float) -> float:
        if math.isnan(ratio) or not 0 < ratio <= 1:
            raise ValueError("expected a number above 0 and at most 1 (1.0 keeps everything)")
        return ratio


class GroupingConfig(_Section):
    """Which KV heads share pages."""

    solver: Literal["adjacent", "sorted", "graph", "cp_sat"] = Field("cp_sat", description="clustering solver")
    scope: Literal["model", "layer"] = Field(
        "model", description="`model`: a group may span layers; `layer`: it may not"
    )
    max_groups: int = Field(24, description="most page tables per rank", ge=1)
    max_groups_per_layer: int | None = Field(None, description="most groups that may touch one layer", ge=1)
    page_slots: int | Literal["auto"] = Field(
        "auto", description="head-token slots of a page, a multiple of 16; `auto`: chosen by the solver"
    )
    reorder_heads: bool = Field(
        False,
        description="choose which tensor-parallel rank owns which KV head; the checkpoint must then be rewritten by `tangram-plan reorder`",
    )

    @field_validator("page_slots")
    @classmethod
    def _page_slots_are_aligned(cls, page_slots: int | str) -> int | str:
        if isinstance(page_slots, int) and (page_slots < PAGE_TOKEN_ALIGNMENT or page_slots % PAGE_TOKEN_ALIGNMENT):
            raise ValueError(f"expected a positive multiple of {PAGE_TOKEN_ALIGNMENT}, or auto")
        return page_slots


class PartitionConfig(_Section):
    """How decode work is cut over CTAs."""

    solver: Literal["even", "proportional", "greedy", "cp_sat"] = Field(
        "cp_sat", description="solver of the static splits"
    )
    device: str = Field("h200", description="name of a device description, or a path to one")
    batch_sizes: tuple[int, ...] = Field((1, 4, 16, 64), description="requests decoded together")
    contexts: tuple[int, ...] = Field(
        (2048, 8192, 32768, 131072), description="prompt lengths, in tokens, that the plan is optimised for"
    )

    @field_validator("batch_sizes", "contexts")
    @classmethod
    def _rising_and_positive(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        if not values or min(values) < 1 or list(values) != sorted(set(values)):
            raise ValueError("expected rising positive integers")
        return values

    @model_validator(mode="after")
    def _sizes_are_real(self) -> "PartitionConfig":
        if self.batch_sizes[-1] > _MOST_REQUESTS or self.contexts[-1] > _MOST_TOKENS:
            raise ValueError(f"expected batch_sizes up to {_MOST_REQUESTS} and contexts up to {_MOST_TOKENS}")
        return self


class BuildConfig(_Section):
    """One `model.yaml`."""

    model: str = Field(description="folder, config.json or hub id; only config.json is read")
    profile: str = Field(description="`builtin:MODEL/SCORER` or a path")
    scorer: str = Field(
        "key_anchor", description="ranks tokens at serving time; the profile decides budgets", min_length=1
    )
    retention: RetentionConfig = RetentionConfig()
    compress_chunk_tokens: int = Field(
        8192, description="eviction happens at multiples of this, and at the prompt's end", ge=2
    )
    max_new_tokens: int = Field(8192, description="longest answer that the runtime admits", ge=1, le=_MOST_TOKENS)
    grouping: GroupingConfig = GroupingConfig()
    partition: PartitionConfig = PartitionConfig()
    tensor_parallel: int = Field(1, description="ranks that share every layer's KV heads", ge=1)
    kv_dtype: KVDtype = Field(KVDtype.BFLOAT16, description="element type of keys and values in the cache")

    @model_validator(mode="after")
    def _chunk_holds_protected_tokens(self) -> "BuildConfig":
        protected = self.retention.sink_tokens + self.retention.window_tokens
        if protected > self.compress_chunk_tokens:
            raise ValueError(
                f"compress_chunk_tokens of at least sink_tokens + window_tokens = {protected}, not {self.compress_chunk_tokens}"
            )
        return self


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML in which a key that is written twice is a fault, not a silent override."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping with each key once."""
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value} is written twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def load_config(path: Path, overrides: tuple[str, ...] = ()) -> BuildConfig:
    """Read `model.yaml` and apply `--set key.path=value` overrides.

    Raises:
        TangramError: missing or broken file, unknown key (with the nearest one that exists), value out of range.
    """
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except FileNotFoundError as error:
        raise TangramError(
            "configuration does not exist",
            where=str(path),
            expected="a model.yaml",
            fix="see examples/quickstart/model.yaml",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise TangramError("configuration cannot be read", where=str(path), got=str(error)) from error
    except (yaml.YAMLError, RecursionError) as error:
        raise TangramError(
            "configuration is not YAML", where=str(path), got=str(error), fix="mend the syntax at that place"
        ) from error
    if not isinstance(raw, dict):
        raise TangramError(
            "configuration is not a mapping",
            where=str(path),
            got=type(raw).__name__,
            expected="keys such as model and profile",
        )
    for override in overrides:
        _apply_override(raw, override)
    try:
        return BuildConfig.model_validate(raw)
    except ValidationError as error:
        raise _first_error(error, path) from error


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise TangramError(
            "override cannot be read", where="--set", got=override, expected="KEY=VALUE, such as grouping.max_groups=16"
        )
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise TangramError("override is not YAML", where=f"--set {key}", got=text) from error
    *sections, last = key.split(".")
    for section in sections:
        raw = raw.setdefault(section, {})
        if not isinstance(raw, dict):
            raise TangramError(
                "override names a key inside a plain value", where=f"--set {key}", got=section, expected="a section"
            )
    raw[last] = value


def _first_error(error: ValidationError, path: Path) -> TangramError:
    """One line for the first fault that pydantic found."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("int", "literal", "constrained")))
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        *sections, unknown = [str(part) for part in first["loc"]]
        known = _keys_of(tuple(sections))
        nearest = difflib.get_close_matches(unknown, known, n=1, cutoff=0.4)
        fix = f"did you mean {nearest[0]}?" if nearest else f"known keys: {', '.join(known)}"
        return TangramError(f"unknown key {'.'.join((*sections, unknown))}{more}", where=str(path), fix=fix)
    if first["type"] == "missing":
        return TangramError(
            f"key {key} is missing{more}", where=str(path), fix=f"add `{key}:`; see examples/quickstart/model.yaml"
        )
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    got = first["input"] if key else None
    return TangramError(
        f"{key or 'configuration'} is not valid{more}",
        where=str(path),
        got=got,
        expected=message.removeprefix("expected "),
    )


def _keys_of(sections: tuple[str, ...]) -> list[str]:
    """Keys of the schema, or of one of its sections."""
    schema: type[BaseModel] = BuildConfig
    for section in sections:
        annotation = schema.model_fields[section].annotation
        assert isinstance(annotation, type)
        assert issubclass(annotation, BaseModel)
        schema = annotation
    return list(schema.model_fields)
