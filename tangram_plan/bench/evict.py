"""`bench evict`: score, select and evict after a prefill chunk on a GPU, per layer.

One request's prompt is cut into chunks; the first, a middle and the last one are timed. One CUDA graph holds all layers, as an
engine runs them, and every layer has its own columns, keys and values, so that none finds them in the L2 cache. A replay changes
the cache, so it is put back before the next one, outside of what is timed. Nothing is timed before scores and caches of some KV
heads of every layer agree with the reference.
"""

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from tangram_plan.ir import Plan, TangramError, load_artefact
from tangram_plan.terminal import log, new_table

from .timing import REPLAYS, read_bandwidth, require_gpu, time_graph

if TYPE_CHECKING:
    import torch

    from tangram_plan.runtime.generated_kernels import GeneratedKernels

PROMPT_TOKENS = 102400
CHUNK_TOKENS = 8192
SAMPLED_HEADS = 2  # KV heads of every layer that are compared with the reference
SCORE_TOLERANCE = 1e-4  # largest relative error of a KV head's scores
MEMORY_SHARE = 0.8  # of the GPU's free memory that a case may take
POOLS = 3  # the cache, what it was, and what the reference makes of it


def bench_evict(
    artefact: Path, *, prompt_tokens: int = PROMPT_TOKENS, chunk_tokens: int = CHUNK_TOKENS, quiet: bool = False
) -> dict[str, Any]:
    """Time compression after the first, a middle and the last chunk of a prompt, rank 0, all layers of a plan.

    Returns:
        `gpu`, `read_bandwidth_gb_s`, `plan`, `prompt_tokens`, `layers`, and `cases` = list of {chunk, chunk_start, chunk_tokens,
        held_tokens, moved_tokens, score_us, us, overlapped_us, bytes, share, overlapped_share, workspace_bytes}. All but the
        workspace are of all KV heads of a layer, as means over layers; times are medians of replays, `us` is score, selection and eviction together,
        `overlapped_us` the same where a kernel starts while the one before it ends. Bytes are those of the chunk's keys, of
        the positions and scores of all candidates, and of the tokens that move, read and written. Shares are of the bandwidth
        of a plain read.

    Raises:
        TangramError: no CUDA device, a chunk does not fit its memory, or an output is wrong.
    """
    torch = require_gpu("bench evict")
    from tangram_plan.runtime.generated_kernels import GeneratedKernels

    plan = load_artefact(artefact)
    kernels = GeneratedKernels(artefact, plan, "cuda")
    bandwidth = read_bandwidth()
    cases = []
    for name, start, new in timed_chunks(prompt_tokens, chunk_tokens):
        needed = case_bytes(plan, prompt_tokens, start, new)
        if needed > MEMORY_SHARE * torch.cuda.mem_get_info()[0]:
            raise TangramError("does not fit the GPU", where=f"{name} chunk", got=f"{needed >> 30} GiB")
        case = EvictionCase(kernels, prompt_tokens, start, new)
        case.check()
        cases.append({"chunk": name, **time_case(case, bandwidth)})
        log(f"{name} chunk: {cases[-1]['us']:.0f} us a layer, overlapped {cases[-1]['overlapped_us']:.0f}", quiet=quiet)
        del case
        torch.cuda.empty_cache()
    return {
        "gpu": torch.cuda.get_device_name(),
        "read_bandwidth_gb_s": bandwidth,
        "plan": str(artefact),
        "prompt_tokens": prompt_tokens,
        "layers": len(plan.model.planned_layers),
        "cases": cases,
    }


def evict_tables(result: dict[str, Any]) -> RenderableType:
    """The result for a person."""
    table = new_table(
        f"Score, select and evict after a chunk of a prompt of {result['prompt_tokens']:,} tokens, per layer, on "
        f"{result['gpu']} (plain read {result['read_bandwidth_gb_s']:.0f} GB/s)",
        "chunk",
        "tokens",
        "held before",
        "moved",
        "score us",
        "all us",
        "overlapped us",
        "MB",
        "share of bandwidth",
    )
    for case in result["cases"]:
        table.add_row(
            case["chunk"],
            f"{case['chunk_tokens']:,}",
            f"{case['held_tokens']:,.0f}",
            f"{case['moved_tokens']:,.0f}",
            f"{case['score_us']:.1f}",
            f"{case['us']:.1f}",
            f"{case['overlapped_us']:.1f}",
            f"{case['bytes'] / 1e6:.1f}",
            f"{case['share']:.0%}, overlapped {case['overlapped_share']:.0%}",
        )
    return table


def timed_chunks(prompt_tokens: int, chunk_tokens: int) -> list[tuple[str, int, int]]:
    """(name, first token, tokens) of the chunks that are timed."""
    starts = range(0, prompt_tokens, chunk_tokens)
    chunks = {starts[len(starts) // 2]: "middle", starts[-1]: "last", starts[0]: "first"}  # the later name counts
    return [(name, start, min(chunk_tokens, prompt_tokens - start)) for start, name in sorted(chunks.items())]


def case_bytes(plan: Plan, prompt_tokens: int, chunk_start: int, chunk_tokens: int) -> int:
    """Bytes of the tensors of a case, roughly."""
    num_pages = sum(_pages_of_groups(plan, prompt_tokens, chunk_start, chunk_tokens))
    num_heads = sum(
        len(plan.model.local_kv_heads(layer, 0, plan.tensor_parallel)) for layer in plan.model.planned_layers
    )
    return POOLS * num_pages * plan.layout.page_bytes + num_heads * chunk_tokens * plan.layout.slot_bytes


def time_case(case: "EvictionCase", bandwidth: float) -> dict[str, Any]:
    """Times of a case, and what it read and wrote, as `bench_evict` returns them."""
    num_layers = len(case.layers)
    score_us = time_graph(case.score) / num_layers
    us, overlapped_us = (
        _time_restored(partial(case.run, overlap=overlap), case.restore) / num_layers for overlap in (False, True)
    )
    used = case.used_bytes() / num_layers
    return {
        "chunk_start": case.chunk_start,
        "chunk_tokens": case.chunk_tokens,
        "held_tokens": case.held_tokens / num_layers,
        "moved_tokens": case.moved_tokens() / num_layers,
        "score_us": score_us,
        "us": us,
        "overlapped_us": overlapped_us,
        "bytes": used,
        "share": used / (bandwidth * 1e3) / us,
        "overlapped_share": used / (bandwidth * 1e3) / overlapped_us,
        "workspace_bytes": case.eviction.workspace_bytes,
    }


class EvictionCase:
    """Compression of all layers of rank 0 after one chunk of one request; random keys, past tokens that such scores would keep.

    Args:
        kernels: of the artefact.
        prompt_tokens: of the request.
        chunk_start: tokens before the chunk.
        chunk_tokens: tokens of the chunk.
    """

    def __init__(self, kernels: "GeneratedKernels", prompt_tokens: int, chunk_start: int, chunk_tokens: int) -> None:
        import torch

        from tangram_plan.runtime.eviction import Eviction, chunks_by_law
        from tangram_plan.runtime.reference import PageTable, local_heads, torch_dtype

        plan, device = kernels.plan, kernels.device
        self.plan, self.device = plan, device
        self.chunk_start, self.chunk_tokens = chunk_start, chunk_tokens
        self.chunks = chunks_by_law(plan, [prompt_tokens], [chunk_start], [chunk_tokens], device)
        self.eviction = Eviction(kernels, 1, self.chunks.max_candidates)
        counts = _pages_of_groups(plan, prompt_tokens, chunk_start, chunk_tokens)
        page_indptr = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        page_ids = torch.randperm(sum(counts)).to(torch.int32)
        self.page_table = PageTable(page_ids.to(device), page_indptr.to(device))
        layout, dtype = plan.layout, torch_dtype(plan.layout)
        self.pool = torch.empty(sum(counts) * layout.page_elements, dtype=dtype, device=device).normal_()
        self.layers = plan.model.planned_layers
        self.places = {layer: local_heads(plan, 0, layer) for layer in self.layers}
        num_heads = {layer: len(places) for layer, places in self.places.items()}

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device)

        self.k, self.v = (
            {layer: normal(chunk_tokens, heads, layout.head_dim).to(dtype) for layer, heads in num_heads.items()}
            for _ in range(2)
        )
        self.anchors = {layer: normal(heads, layout.head_dim) for layer, heads in num_heads.items()}
        self.scores = {layer: torch.empty(heads, chunk_tokens, device=device) for layer, heads in num_heads.items()}
        self._fill()
        self.before = self.pool.clone()

    @property
    def held_tokens(self) -> int:
        """Tokens before the chunk, in all slots of all layers."""
        held = self.chunks.held[0].tolist()
        return sum(held[place.group_id] for places in self.places.values() for place in places)

    def score(self, *, overlap: bool = False) -> None:
        """Launch the scorer of all layers."""
        for layer in self.layers:
            self.eviction.score_key_anchor(self.k[layer], self.anchors[layer], self.scores[layer], overlap=overlap)

    def run(self, *, overlap: bool = False) -> None:
        """Launch score, selection and eviction of all layers."""
        for layer in self.layers:
            k, v, scores = self.k[layer], self.v[layer], self.scores[layer]
            self.eviction.score_key_anchor(k, self.anchors[layer], scores, overlap=overlap)
            self.eviction.evict(layer, k, v, scores, self.pool, self.page_table, self.chunks, overlap=overlap)

    def restore(self) -> None:
        """Put the cache back to before the chunk."""
        self.pool.copy_(self.before)

    def moved_tokens(self) -> int:
        """Slots of all layers that a run writes; there must have been one since the cache was put back."""
        from tangram_plan.runtime.reference import page_views

        before, after = (page_views(pool, self.plan.layout).positions for pool in (self.before, self.pool))
        return int((before != after).sum())

    def used_bytes(self) -> int:
        """Bytes that a run of all layers has to read and write."""
        layout = self.plan.layout
        num_heads = sum(map(len, self.places.values()))
        keys = num_heads * self.chunk_tokens * layout.head_dim * layout.dtype.itemsize
        candidates = self.held_tokens + num_heads * self.chunk_tokens
        return keys + candidates * 8 + self.moved_tokens() * 2 * layout.slot_bytes

    def check(self) -> None:
        """Compare a run's scores and cache with the reference: some KV heads of every layer.

        Raises:
            TangramError: a score differs by more than rounding, or a cache at all.
        """
        from tangram_plan.runtime.eviction_reference import evict, key_anchor_scores
        from tangram_plan.runtime.kernel_problem import max_error
        from tangram_plan.runtime.reference import page_views

        self.restore()
        self.run()
        found = page_views(self.pool, self.plan.layout)
        expected_pool = self.before.clone()
        expected = page_views(expected_pool, self.plan.layout)
        held, kept = self.chunks.held.tolist(), self.chunks.kept.tolist()
        for number, layer in enumerate(self.layers):
            places, k, v = self.places[layer], self.k[layer], self.v[layer]
            error = max_error(self.scores[layer], key_anchor_scores(k, self.anchors[layer]))
            if not error <= SCORE_TOLERANCE:
                raise TangramError("scores are wrong", where=f"layer {layer}", got=f"relative error {error:.2g}")
            for head in sorted({(number + sample) % len(places) for sample in range(SAMPLED_HEADS)}):
                one = slice(head, head + 1)
                table, chunk = self.page_table, ([self.chunk_start], [self.chunk_tokens])
                inputs = (k[:, one], v[:, one], self.scores[layer][one], expected_pool, table, held, kept, *chunk)
                evict(self.plan, [places[head]], *inputs)
                where = self._slots(layer, head, kept[0][places[head].group_id])
                parts = zip(found, expected, strict=True)
                if not all(bool((one_part[where] == other[where]).all()) for one_part, other in parts):
                    raise TangramError("eviction is wrong", where=f"layer {layer}, KV head {head}")

    def _fill(self) -> None:
        """Positions and scores of past tokens, in random slots."""
        import torch

        from tangram_plan.runtime.eviction_reference import survivors
        from tangram_plan.runtime.reference import page_views

        views, held = page_views(self.pool, self.plan.layout), self.chunks.held[0].tolist()
        positions = torch.arange(self.chunk_start, device=self.device)
        budgets = self.plan.budgets
        protected = (positions < budgets.sink_tokens) | (positions >= self.chunk_start - budgets.window_tokens)
        for layer in self.layers:
            for head, place in enumerate(self.places[layer]):
                count = held[place.group_id]
                scores = torch.randn(self.chunk_start, device=self.device) / self.plan.layout.head_dim**0.5
                stay = survivors(positions, scores, protected, count).nonzero()[:, 0]
                stay = stay[torch.randperm(count, device=self.device)]
                where = self._slots(layer, head, count)
                views.positions[where] = stay.to(torch.int32)
                views.scores[where] = scores[stay]

    def _slots(self, layer: int, head: int, count: int) -> tuple["torch.Tensor", "torch.Tensor"]:
        from tangram_plan.runtime.reference import slots_of

        group_id, column = self.places[layer][head]
        tokens_per_page = self.plan.layout.tokens_per_page(self.plan.grouping.groups[group_id].num_members)
        page, slot = slots_of(self.page_table.pages(group_id).cpu(), column, tokens_per_page, count)
        return page.to(self.device), slot.to(self.device)


def _pages_of_groups(plan: Plan, prompt_tokens: int, chunk_start: int, chunk_tokens: int) -> list[int]:
    """Pages of every group, for what is held before the chunk and what stays after it."""
    return [
        max(plan.group_pages(group_id, prompt_tokens, total) for total in (chunk_start, chunk_start + chunk_tokens))
        for group_id in range(len(plan.grouping.groups))
    ]


def _time_restored(run: Callable[[], object], restore: Callable[[], object]) -> float:
    """Median microseconds of replays of one graph, before each of which something is put back."""
    import torch

    restore()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(REPLAYS):
        restore()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return float(statistics.median(times))
