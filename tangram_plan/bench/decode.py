"""`bench decode`: the generated decode kernels on a GPU, and what the cost model said of them.

One CUDA graph holds the whole attention of a decode step (the tile queue's plan, then decode and merge of every layer),
as an engine runs it. Every layer reads its own columns of one pool whose pages are scattered at random. Before anything
is timed, outputs are poisoned with NaN, and both schedules must agree.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from tangram_plan.ir import QUEUE_NAME, Plan, Schedule, TangramError, kernel_name, load_artefact
from tangram_plan.terminal import log, new_table

from .timing import read_bandwidth, require_gpu, time_graph

if TYPE_CHECKING:
    import torch

    from tangram_plan.runtime.head_tables import SplitTables

MEMORY_SHARE = 0.8  # of the GPU's free memory that a case may take
AGREEMENT = 2e-2  # largest relative difference of the two schedules' outputs, as norms


def bench_decode(artefact: Path, *, quiet: bool) -> dict[str, Any]:
    """Time every (batch, context) of a plan.

    Returns:
        `gpu`, `read_bandwidth_gb_s`, and `cases` = list of {batch, context, schedule, measured_us, predicted_us, bytes,
        share_of_bandwidth}, rank 0, median of replays, all layers.

    Raises:
        TangramError: no CUDA device, or the schedules disagree.
    """
    torch = require_gpu("bench decode")
    plan = load_artefact(artefact)
    bandwidth = read_bandwidth()
    cases = []
    for choice in plan.partition.choices:
        pool_bytes = plan.num_pages(choice.context, choice.context) * choice.batch * plan.layout.page_bytes
        if pool_bytes > MEMORY_SHARE * torch.cuda.mem_get_info()[0]:
            log(
                f"batch {choice.batch}, context {choice.context}: {pool_bytes >> 30} GiB do not fit, skipped",
                quiet=quiet,
            )
            continue
        step = DecodeStep(artefact, plan, choice.batch, choice.context, device="cuda")
        step.check_agreement()
        for schedule in Schedule:
            measured_us = time_graph(partial(step.run, schedule))
            cases.append(
                {
                    "batch": choice.batch,
                    "context": choice.context,
                    "schedule": schedule.value,
                    "measured_us": measured_us,
                    "predicted_us": choice.estimates[schedule].predicted_us,
                    "bytes": step.read_bytes,
                    "share_of_bandwidth": step.read_bytes / (bandwidth * 1e3) / measured_us,
                }
            )
            log(f"{cases[-1]}", quiet=quiet)
        del step
        torch.cuda.empty_cache()
    return {
        "gpu": torch.cuda.get_device_name(),
        "read_bandwidth_gb_s": bandwidth,
        "plan": str(artefact),
        "cases": cases,
    }


def decode_tables(result: dict[str, Any]) -> RenderableType:
    """The result for a person."""
    title = f"Decode attention of one step, all layers, on {result['gpu']} (plain read {result['read_bandwidth_gb_s']:.0f} GB/s)"
    table = new_table(
        title,
        "requests",
        "prompt tokens",
        "schedule",
        "measured us",
        "predicted us",
        "predicted / measured",
        "share of bandwidth",
    )
    for case in result["cases"]:
        table.add_row(
            str(case["batch"]),
            f"{case['context']:,}",
            case["schedule"],
            f"{case['measured_us']:,.0f}",
            f"{case['predicted_us']:,.0f}",
            f"{case['predicted_us'] / case['measured_us']:.2f}",
            f"{case['share_of_bandwidth']:.0%}",
        )
    return table


class DecodeStep:
    """Decode attention of rank 0 for a batch at the end of prompts of `context` tokens: launches only, no host work in `run`."""

    def __init__(self, artefact: Path, plan: Plan, batch: int, context: int, *, device: str) -> None:
        import torch

        from tangram_plan.runtime.head_tables import load_head_tables
        from tangram_plan.runtime.kernel_modules import load_module
        from tangram_plan.runtime.reference import lay_out_pages, torch_dtype

        lengths = [context] * batch
        num_pages = plan.num_pages(context, context) * batch
        dtype = torch_dtype(plan.layout)
        pool = torch.empty(num_pages * plan.layout.page_elements, dtype=dtype, device=device).normal_()
        page_table = lay_out_pages(plan, lengths, lengths, free_pages=torch.randperm(num_pages))
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        tables = load_head_tables(artefact)
        self.rho, tokens_per_page = tables.group_tables(device)
        self.queue_tables = tables.queue_tables(0, device)
        self.tile_indptr = torch.empty(tables.queue_size(0, batch), dtype=torch.int32, device=device)
        self.plan_queue = load_module(artefact, QUEUE_NAME)
        paged = (pool, *(tensor.to(device) for tensor in page_table), self.lengths, self.lengths)
        self.layers = []
        for layer in plan.model.planned_layers:
            heads = tables.layer_tables(0, layer, device)
            queue = self.tile_indptr[slice(*tables.queue_range(0, layer, batch))]
            gqa_ratio = plan.model.layers[layer].gqa_ratio
            q = torch.randn(batch, heads.column.numel() * gqa_ratio, plan.layout.head_dim, device=device).to(dtype)
            inputs = (q, *paged, *heads, self.rho, tokens_per_page)
            splits = tables.split_tables(0, layer, batch, device)
            self.layers.append(_Layer(artefact, plan, gqa_ratio, inputs, splits, queue))
        tokens = sum(plan.group_tokens(int(group_id), context, context) for group_id in self.queue_tables.group_id)
        self.read_bytes = batch * tokens * 2 * plan.layout.head_dim * plan.layout.dtype.itemsize

    def run(self, schedule: Schedule) -> None:
        """Launch the step."""
        if schedule is Schedule.TILE_QUEUE:
            self.plan_queue.launch(self.lengths, self.lengths, *self.queue_tables, self.rho, self.tile_indptr)
        for layer in self.layers:
            layer.run(schedule)

    def check_agreement(self) -> None:
        """Both schedules, from poisoned outputs.

        Raises:
            TangramError: their outputs differ by more than rounding.
        """
        for schedule in Schedule:
            self.run(schedule)
        for index, layer in enumerate(self.layers):
            static, queue = (layer.out[schedule].double() for schedule in (Schedule.STATIC_SPLITS, Schedule.TILE_QUEUE))
            error = float((static - queue).norm() / queue.norm())
            if not error <= AGREEMENT:
                raise TangramError(
                    "the schedules disagree",
                    where=f"planned layer number {index}",
                    got=error,
                    expected=f"at most {AGREEMENT}",
                )


class _Layer:
    """One layer's kernels and buffers; `inputs` are the decode kernels' common arguments."""

    def __init__(
        self,
        artefact: Path,
        plan: Plan,
        gqa_ratio: int,
        inputs: tuple[Any, ...],
        splits: "SplitTables",
        queue: "torch.Tensor",
    ) -> None:
        import torch

        from tangram_plan.runtime.kernel_modules import load_module

        q, num_kv_heads = inputs[0], inputs[0].shape[1] // gqa_ratio
        device = q.device

        def buffers(*slots: int) -> tuple["torch.Tensor", "torch.Tensor"]:
            rows = (*slots, gqa_ratio)
            return torch.full((*rows, plan.layout.head_dim), float("nan"), device=device), torch.full(
                rows, float("nan"), device=device
            )

        self.inputs, self.splits, self.queue, self.num_kv_heads = inputs, splits, queue, num_kv_heads
        self.kernels = {
            schedule: [
                load_module(artefact, kernel_name(role, schedule, plan.layout, gqa_ratio))
                for role in ("decode", "merge")
            ]
            for schedule in Schedule
        }
        self.partials = {
            Schedule.STATIC_SPLITS: buffers(len(q), splits.split_head.numel()),
            Schedule.TILE_QUEUE: buffers(plan.partition.num_ctas + len(q) * num_kv_heads),
        }
        self.out = {schedule: torch.full_like(q, float("nan")) for schedule in Schedule}

    def run(self, schedule: Schedule) -> None:
        decode, merge = self.kernels[schedule]
        partials, out = self.partials[schedule], self.out[schedule]
        if schedule is Schedule.STATIC_SPLITS:
            decode.launch(*self.inputs, *self.splits, *partials)
            merge.launch(*partials, self.splits.split_indptr, out)
        else:
            decode.launch(*self.inputs, self.queue, *partials)
            merge.launch(*partials, self.queue, out, num_kv_heads=self.num_kv_heads)
