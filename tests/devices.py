"""Device descriptions with round numbers."""

from tangram_plan.device import Device


def make_device(**changes: object) -> Device:
    """Four CTAs; a token of 1000 bytes takes 1 us in one CTA, and half of that in the whole device."""
    numbers: dict[str, object] = {
        "name": "hand",
        "num_sms": 2,
        "ctas_per_sm": 2,
        "tile_tokens": 16,
        "segment_tiles": 0,
        "step_tokens": 32,
        "num_warps": 4,
        "num_stages": 3,
        "read_bandwidth_gb_s": 2.0,
        "cta_bandwidth_gb_s": 1.0,
        "static_splits_overhead_us": 10.0,
        "tile_queue_overhead_us": 12.0,
        "source": "hand",
    }
    return Device.model_validate(numbers | changes)
