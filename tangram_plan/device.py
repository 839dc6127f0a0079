"""Device descriptions: the constants of the cost model, one JSON file per GPU.

`tangram-plan bench tune` measures another GPU and writes its description.
"""

from importlib import resources
from pathlib import Path

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError, field_validator

from tangram_plan.ir import PAGE_TOKEN_ALIGNMENT, TangramError, user_path


class Device(BaseModel):
    """One GPU.

    Args:
        name: how plans call it.
        num_sms: streaming multiprocessors.
        ctas_per_sm: CTAs of a decode kernel in flight on each.
        tile_tokens: tokens of a tile of the queue, a multiple of 16.
        segment_tiles: tiles that stand for what it costs a CTA to begin a (request, KV head) pair.
        step_tokens: tokens that a decode kernel reads at once, a power of two and at least 16.
        num_warps: warps of a decode kernel's CTA, a power of two.
        num_stages: loads in flight of its inner loop.
        read_bandwidth_gb_s: bandwidth of a plain read, in GB/s.
        cta_bandwidth_gb_s: most that one CTA alone reads, in GB/s.
        static_splits_overhead_us: time of one layer's attention beyond its bytes, static splits.
        tile_queue_overhead_us: the same for the tile queue.
        source: where the numbers come from.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str
    num_sms: PositiveInt
    ctas_per_sm: PositiveInt
    tile_tokens: PositiveInt
    segment_tiles: NonNegativeInt
    step_tokens: PositiveInt
    num_warps: PositiveInt
    num_stages: PositiveInt
    read_bandwidth_gb_s: PositiveFloat
    cta_bandwidth_gb_s: PositiveFloat
    static_splits_overhead_us: PositiveFloat
    tile_queue_overhead_us: PositiveFloat
    source: str

    @field_validator("tile_tokens", "step_tokens")
    @classmethod
    def _aligned(cls, tokens: int) -> int:
        if tokens % PAGE_TOKEN_ALIGNMENT:
            raise ValueError(f"got {tokens}, expected a multiple of {PAGE_TOKEN_ALIGNMENT}")
        return tokens

    @field_validator("step_tokens", "num_warps")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value.bit_count() != 1:
            raise ValueError(f"got {value}, expected a power of two")
        return value

    @property
    def num_ctas(self) -> int:
        """CTAs in flight on the device (N_CTA)."""
        return self.num_sms * self.ctas_per_sm


def shipped_devices() -> dict[str, Path]:
    """Descriptions that come with the package: name -> file."""
    folder = Path(str(resources.files("tangram_plan"))) / "devices"
    return {file.stem: file for file in sorted(folder.glob("*.json"))}


def load_device(name: str, *, relative_to: Path = Path()) -> Device:
    """A shipped description by its name, or one from a file.

    Raises:
        TangramError: there is none, or it is not valid.
    """
    shipped = shipped_devices()
    path = shipped.get(name) or user_path(name, relative_to=relative_to, where="partition.device")
    try:
        return Device.model_validate_json(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise TangramError("device description is not text", where=str(path), got=str(error)) from error
    except OSError as error:
        known = ", ".join(shipped)
        raise TangramError(
            "no such device", where="partition.device", got=name, expected=f"{known}, or a path to a description"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        fault = f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
        raise TangramError("device description is not valid", where=str(path), got=fault) from error
