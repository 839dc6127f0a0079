"""A plan small enough to check by hand, and the input files of a small build."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tangram_plan.artefact import write_artefact
from tangram_plan.ir import (
    ORIGINAL_ORDER,
    BudgetTable,
    CtaPartition,
    HeadGroup,
    HeadGrouping,
    KVDtype,
    KVHead,
    LayerKind,
    LayerShape,
    ModelShape,
    PageLayout,
    Plan,
    Provenance,
    Schedule,
    ScheduleChoice,
    ScheduleEstimate,
    StaticSplits,
)
from tangram_plan.model_config import model_shape_from_config
from tangram_plan.profiles import Level, Profile, Sample, save_profile

SHAPE = ModelShape(
    "hand",
    (
        LayerShape(LayerKind.FULL, 2, 4, 0),
        LayerShape(LayerKind.SLIDING, 2, 4, 1),
        LayerShape(LayerKind.FULL, 2, 4, 2),
        LayerShape(LayerKind.SHARED, 0, 4, 0),
    ),
    head_dim=8,
    identity=(("hidden_size", "32"), ("rope", "10000.0")),
)
RHO = {KVHead(0, 0): 32768, KVHead(0, 1): 16384, KVHead(2, 0): 8192, KVHead(2, 1): 655}
GROUPS = {
    1: (
        HeadGroup(32768, ((KVHead(0, 0),),)),
        HeadGroup(16384, ((KVHead(2, 1), KVHead(0, 1)),)),
        HeadGroup(8192, ((KVHead(2, 0),),)),
    ),
    2: (
        HeadGroup(32768, ((KVHead(0, 0),), (KVHead(2, 1),))),
        HeadGroup(16384, ((KVHead(2, 0),), (KVHead(0, 1),))),
    ),
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 100,
    "max_position_embeddings": 131072,
    "rope_theta": 10000.0,
}


def hand_plan(tensor_parallel: int = 1) -> Plan:
    """A valid plan of four KV heads in layers 0 and 2; layer 1 slides, layer 3 reads the cache of layer 0."""
    batches = {1: (3, 2, 1, 1), 4: (1, 1, 1, 1)}
    estimates = {
        Schedule.STATIC_SPLITS: ScheduleEstimate(12.5, 1.25),
        Schedule.TILE_QUEUE: ScheduleEstimate(13.0, 1.0625),
    }
    return Plan(
        model=SHAPE,
        tensor_parallel=tensor_parallel,
        head_order=ORIGINAL_ORDER,
        budgets=BudgetTable(sink_tokens=4, window_tokens=8, rho=dict(RHO)),
        grouping=HeadGrouping(GROUPS[tensor_parallel], page_slots=32),
        layout=PageLayout(32, SHAPE.head_dim, KVDtype.BFLOAT16),
        partition=CtaPartition(
            device="hand",
            num_ctas=8,
            tile_tokens=16,
            segment_tiles=2,
            step_tokens=32,
            num_warps=4,
            num_stages=3,
            static_splits=tuple(
                StaticSplits(batch, dict(zip(RHO, splits, strict=True))) for batch, splits in batches.items()
            ),
            choices=tuple(ScheduleChoice(batch, 2048, Schedule.STATIC_SPLITS, estimates) for batch in batches),
        ),
        scorer="hand",
        compress_chunk_tokens=8192,
        max_new_tokens=1024,
        provenance=Provenance("hand/kvzip", "0" * 64, "by hand", "hand", "hand", 0),
    )


def small_profile(
    shape: ModelShape, *, ratios: Sequence[float] = (0.25, 0.5), num_samples: int = 4, model: str = "tiny"
) -> Profile:
    """Rank-stable retention of a model, from a seeded generator, with the requested mean in every sample."""
    generator = np.random.default_rng(0)
    wanted = np.linspace(0.1, 1.9, shape.num_kv_heads)
    retained = np.empty((num_samples, len(ratios), shape.num_kv_heads))
    for sample in range(num_samples):
        for index, ratio in enumerate(ratios):
            drawn = np.clip(wanted + generator.normal(0, 0.05, len(wanted)), 0.01, None)
            retained[sample, index] = np.clip(drawn / drawn.mean() * ratio, 0, 1)
    return Profile(
        model=model,
        model_fingerprint=shape.fingerprint,
        scorer="kvzip",
        kv_heads=tuple(shape.kv_heads()),
        ratios=tuple(ratios),
        samples=tuple(Sample(f"text {index}", index, 100 + index) for index in range(num_samples)),
        retained={Level.MODEL: retained},
    )


def write_inputs(folder: Path, **model_changes: Any) -> Path:
    """`config.json`, `tiny.npz` and `model.yaml` of a model with 4 layers of 4 KV heads; returns the last."""
    folder.mkdir(parents=True, exist_ok=True)
    config = LLAMA | model_changes
    (folder / "config.json").write_text(json.dumps(config))
    save_profile(small_profile(model_shape_from_config(config, "config.json")), folder / "tiny.npz")
    (folder / "model.yaml").write_text(
        "model: config.json\n"
        "profile: tiny.npz\n"
        "retention: {ratio: 0.3}\n"
        "grouping: {solver: graph, max_groups: 6}\n"
        "partition: {solver: greedy, batch_sizes: [1, 4]}\n"
    )
    return folder / "model.yaml"


def write_often(plan: Plan, output: Path, times: int) -> int:
    """Write one artefact again and again; stands at module level so that another process can run it."""
    for _ in range(times):
        write_artefact(plan, {"build": {}}, output)
    return times
