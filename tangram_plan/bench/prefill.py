"""`bench prefill`: attention while one long prompt is prefilled chunk by chunk, over a compressed past and over the full one.

The past of every chunk is what the plan's law keeps of the tokens before it, in pages scattered at random. Each path is timed with
everything that it takes (the gathered copy is made anew for every chunk), and nothing is timed before sampled rows of its output,
poisoned with NaN, agree with the reference. The full past lies in pages of 16 tokens, as a stock engine keeps it.
"""

import importlib
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from tangram_plan.ir import Plan, TangramError, load_artefact
from tangram_plan.terminal import log, new_table

from .timing import require_gpu, time_graph

if TYPE_CHECKING:
    import torch

    from tangram_plan.runtime.generated_kernels import GeneratedKernels
    from tangram_plan.runtime.prefill import PrefillStep

STOCK_PAGE_TOKENS = 16
NUM_SAMPLED_LAYERS = 3
TOLERANCE = 2e-2  # largest relative error of an output row
PATHS = ("full", "gather", "paged")


def bench_prefill(
    artefact: Path,
    *,
    prompt_tokens: int = 102400,
    chunk_tokens: int = 8192,
    all_layers: bool = False,
    quiet: bool,
) -> dict[str, Any]:
    """Time the attention of all chunks of a prompt, rank 0, in a few layers or in all.

    Returns:
        `gpu`, `plan`, `prompt_tokens`, `chunk_tokens`, `library` (what attends to the full and to the gathered past), `speedup` by
        path, and `layers` = list of {layer, kept, full_ms, gather_ms, paged_ms, copy_ms, chunks}, where `kept` is the part of the
        prompt's tokens that its KV heads hold at the end, `copy_ms` the part of `gather_ms` that copies, and `chunks` = list of
        {start, full_ms, gather_ms, paged_ms, copy_ms, full_tflops, gather_tflops, paged_tflops}. Milliseconds are medians.

    Raises:
        TangramError: no CUDA device, or an output is wrong.
    """
    torch = require_gpu("bench prefill")
    from tangram_plan.runtime.generated_kernels import GeneratedKernels

    plan = load_artefact(artefact)
    kernels = GeneratedKernels(artefact, plan, "cuda")
    layers: list[dict[str, Any]] = []
    library = ""
    for layer in plan.model.planned_layers if all_layers else sampled_layers(plan, prompt_tokens):
        case = PrefillCase(kernels, layer, prompt_tokens, chunk_tokens)
        if not layers:
            log(f"attention by {case.library_name}{case.missing_library()}", quiet=quiet)
        case.check()
        found = time_layer(case)
        library = case.library_name
        log(
            f"layer {layer}, {found['kept']:.1%} kept: full {found['full_ms']:.1f} ms, gather {found['gather_ms']:.1f} ms, "
            f"paged {found['paged_ms']:.1f} ms",
            quiet=quiet,
        )
        layers.append(found)
        del case
        torch.cuda.empty_cache()
    total = {path: sum(layer[f"{path}_ms"] for layer in layers) for path in PATHS}
    return {
        "gpu": torch.cuda.get_device_name(),
        "plan": str(artefact),
        "prompt_tokens": prompt_tokens,
        "chunk_tokens": chunk_tokens,
        "library": library,
        "speedup": {path: total["full"] / total[path] for path in PATHS},
        "layers": layers,
    }


def sampled_layers(plan: Plan, prompt_tokens: int) -> list[int]:
    """Planned layers that keep least, most, and as many tokens as others between."""
    from tangram_plan.runtime.reference import local_heads

    def kept(layer: int) -> int:
        return sum(
            plan.group_tokens(place.group_id, prompt_tokens, prompt_tokens) for place in local_heads(plan, 0, layer)
        )

    layers = sorted(plan.model.planned_layers, key=lambda layer: (kept(layer), layer))
    last = len(layers) - 1
    return list(dict.fromkeys(layers[last * i // (NUM_SAMPLED_LAYERS - 1)] for i in range(NUM_SAMPLED_LAYERS)))


class PrefillCase:
    """One layer's attention over all chunks of a prompt, by every path.

    Args:
        kernels: of the plan; tensors lie on their device.
        layer: whose KV heads, of rank 0.
        prompt_tokens: of the only request.
        chunk_tokens: of every chunk but the last, which may be shorter.
    """

    def __init__(self, kernels: "GeneratedKernels", layer: int, prompt_tokens: int, chunk_tokens: int) -> None:
        import torch

        from tangram_plan.runtime.prefill import Prefill, PrefillPath, gathered_tokens
        from tangram_plan.runtime.reference import PageTable, local_heads, torch_dtype

        plan, device = kernels.plan, kernels.device
        self.plan, self.layer, self.device, self.prompt_tokens = plan, layer, device, prompt_tokens
        self.starts = range(0, prompt_tokens, chunk_tokens)
        self.chunk_tokens = chunk_tokens
        self.places = local_heads(plan, 0, layer)
        self.steps = {start: self._step(start) for start in self.starts}
        layout, dtype = plan.layout, torch_dtype(plan.layout)
        heads, gqa_ratio, head_dim = len(self.places), plan.model.layers[layer].gqa_ratio, layout.head_dim

        groups, in_use = plan.grouping.groups, {place.group_id for place in self.places}
        held = self.steps[self.starts[-1]].held_tokens[0]
        counts = [
            -(-tokens // layout.tokens_per_page(group.num_members)) if group_id in in_use else 0
            for group_id, (tokens, group) in enumerate(zip(held, groups, strict=True))
        ]
        num_pages = max(1, sum(counts))
        page_indptr = torch.tensor(list(accumulate(counts, initial=0)), dtype=torch.int32, device=device)
        self.page_table = PageTable(torch.randperm(num_pages, device=device).to(torch.int32), page_indptr)

        def normal(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device).normal_()

        self.pool = normal(num_pages * layout.page_elements)
        self.q = normal(chunk_tokens, heads * gqa_ratio, head_dim)
        self.k, self.v = normal(chunk_tokens, heads, head_dim), normal(chunk_tokens, heads, head_dim)
        self.out = torch.empty_like(self.q)
        self.sinks = torch.randn(heads * gqa_ratio, device=device) if plan.model.attention.has_sinks else None
        room = max(
            gathered_tokens(kernels.tables, 0, step.held_tokens[0], step.chunk_starts[-1])
            for step in self.steps.values()
        )
        self.prefill = {path.value: Prefill(kernels, room, path=path) for path in PrefillPath}
        num_stock_pages = -(-prompt_tokens // STOCK_PAGE_TOKENS)
        self.full_k, self.full_v = (normal(num_stock_pages, STOCK_PAGE_TOKENS, heads, head_dim) for _ in range(2))
        self.block_table = torch.randperm(num_stock_pages, device=device).to(torch.int32)[None]
        self.used = {start: torch.tensor([self._end(start)], dtype=torch.int32, device=device) for start in self.starts}

    @property
    def library_name(self) -> str:
        """What attends to the full and to the gathered past."""
        return type(self.prefill["gather"].library).__name__

    @property
    def kept(self) -> float:
        """Part of the prompt's tokens that the layer's KV heads hold at the end."""
        held = [self.plan.group_tokens(place.group_id, self.prompt_tokens, self.prompt_tokens) for place in self.places]
        return sum(held) / (len(held) * self.prompt_tokens)

    def run(self, path: str, start: int) -> None:
        """Launch the attention of one chunk by one of `PATHS`."""
        if path == "full":
            self._run_full(start)
            return
        step = self.steps[start]
        rows = slice(step.chunk_starts[-1])
        self.prefill[path].attend(
            self.layer,
            self.q[rows],
            self.k[rows],
            self.v[rows],
            self.pool,
            self.page_table,
            step,
            self.out[rows],
            sinks=self.sinks,
        )

    def copy(self, start: int) -> None:
        """Launch the copy alone that the gather path makes of one chunk and its past."""
        self.prefill["gather"].past.gather(self.layer, 0, self.k, self.v, self.pool, self.page_table, self.steps[start])

    def missing_library(self) -> str:
        """Why it is not FlashAttention 3, to go on after its name; nothing if it is."""
        from tangram_plan.runtime.library_attention import FlashAttention3

        try:
            FlashAttention3(self.plan.layout, self.plan.model.attention, self.device)
        except Exception as error:  # whatever is raised is the reason
            return f": no FlashAttention 3, {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        return ""

    def _run_full(self, start: int) -> None:
        """Launch the attention of one chunk over the full past, by the library of the gather path."""
        tokens, end = self._end(start) - start, self._end(start)
        if self.library_name == "TorchAttention":
            self._run_full_by_torch(tokens, end)
            return
        form = self.plan.model.attention
        importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface").flash_attn_varlen_func(
            self.q[:tokens],
            self.full_k,
            self.full_v,
            tokens,
            self.steps[start].chunk_indptr,
            end,
            seqused_k=self.used[start],
            softmax_scale=form.softmax_scale,
            causal=True,
            softcap=form.logit_softcap or 0.0,
            block_table=self.block_table,
            out=self.out[:tokens],
            fa_version=3,
            s_aux=None if self.sinks is None else self.sinks.to(self.q.dtype),
        )

    def _run_full_by_torch(self, tokens: int, end: int) -> None:
        """KV heads one after the other; every one reads the same numbers, which makes no difference to time."""
        heads, head_dim = self.full_k.shape[2:]
        keys, values = (part.view(-1, 1, head_dim)[: heads * end] for part in (self.full_k, self.full_v))
        q, out = (part[:tokens].view(tokens, heads, -1, head_dim).transpose(0, 1) for part in (self.q, self.out))
        self.prefill["gather"].library.gathered(q, keys, values, self.used[self.starts[0]], [end] * heads, None, out)

    def tflop(self, path: str, start: int) -> float:
        """Work of one chunk, in 10^12 floating-point operations: two products of which a causal mask leaves a half."""
        step = self.steps[start]
        tokens = step.chunk_starts[-1]
        pasts = [start if path == "full" else step.held_tokens[0][place.group_id] for place in self.places]
        pairs = sum(tokens * past + tokens * (tokens + 1) // 2 for past in pasts)
        return 4 * pairs * self.plan.layout.head_dim * (self.q.shape[1] // len(self.places)) / 1e12

    def check(self) -> None:
        """Compare rows of the first and of the last chunk by every path with the reference.

        Raises:
            TangramError: a row differs by more than rounding.
        """
        from tangram_plan.runtime.kernel_problem import max_error

        for path in PATHS:
            for start in sorted({self.starts[0], self.starts[-1]}):
                self.out.fill_(float("nan"))
                self.run(path, start)
                tokens = self._end(start) - start
                for token in sorted({0, tokens // 2, tokens - 1}):
                    error = max_error(self.out[token].float(), self._expected(path, start, token))
                    if not error <= TOLERANCE:
                        raise TangramError(
                            f"{path} is wrong",
                            where=f"layer {self.layer}, chunk at {start}, token {token}",
                            got=f"relative error {error:.2g}",
                            expected=f"at most {TOLERANCE}",
                        )

    def _expected(self, path: str, start: int, token: int) -> "torch.Tensor":
        """Output of one token by the reference: float32 [num_q_heads, D]."""
        import torch

        from tangram_plan.runtime.reference import attend

        form, gqa_ratio = self.plan.model.attention, self.q.shape[1] // len(self.places)
        rows = []
        for head in range(len(self.places)):
            seen = self._seen_of_full if path == "full" else self._seen_of_kept
            keys, values = seen(start, token, head)
            queries = slice(head * gqa_ratio, (head + 1) * gqa_ratio)
            found = attend(
                self.q[token, queries].float(),
                keys.float(),
                values.float(),
                form.softmax_scale,
                form.logit_softcap,
                None if self.sinks is None else self.sinks[queries],
            )
            rows.append(found)
        return torch.cat(rows)

    def _seen_of_kept(self, start: int, token: int, head: int) -> tuple["torch.Tensor", "torch.Tensor"]:
        """Keys and values that a token sees of its KV head's kept past and of its chunk, each [num_tokens, D]."""
        import torch

        from tangram_plan.runtime.reference import page_views, slots_of

        layout, (group_id, column) = self.plan.layout, self.places[head]
        views, held = page_views(self.pool, layout), self.steps[start].held_tokens[0][group_id]
        tokens_per_page = layout.tokens_per_page(self.plan.grouping.groups[group_id].num_members)
        page, slot = slots_of(self.page_table.pages(group_id).cpu(), column, tokens_per_page, held)
        where, chunk = (page.to(self.device), slot.to(self.device)), (slice(token + 1), head)
        return torch.cat([views.keys[where], self.k[chunk]]), torch.cat([views.values[where], self.v[chunk]])

    def _seen_of_full(self, start: int, token: int, head: int) -> tuple["torch.Tensor", "torch.Tensor"]:
        """Keys and values that a token sees of the full past and its chunk, each [num_tokens, D]."""
        seen, end = start + token + 1, self._end(start)
        if self.library_name == "TorchAttention":
            first = head * end
            keys, values = (part.view(-1, part.shape[-1])[first : first + seen] for part in (self.full_k, self.full_v))
        else:
            pages = self.block_table[0].long()
            keys, values = (part[:, :, head][pages].flatten(0, 1)[:seen] for part in (self.full_k, self.full_v))
        return keys, values

    def _step(self, start: int) -> "PrefillStep":
        from tangram_plan.runtime.prefill import make_prefill_step

        groups = range(len(self.plan.grouping.groups))
        held = [self.plan.group_tokens(group_id, self.prompt_tokens, start) for group_id in groups]
        return make_prefill_step([held], [self._end(start) - start], self.device)

    def _end(self, start: int) -> int:
        return min(start + self.chunk_tokens, self.prompt_tokens)


def time_layer(case: PrefillCase) -> dict[str, Any]:
    """One of the `layers` of `bench_prefill`."""

    def milliseconds(run: Callable[[], object]) -> float:
        return time_graph(run) / 1e3

    chunks = []
    for start in case.starts:
        found: dict[str, float] = {"start": start}
        for path in PATHS:
            found[f"{path}_ms"] = milliseconds(partial(case.run, path, start))
        has_past = any(case.steps[start].held_tokens[0])
        found["copy_ms"] = milliseconds(partial(case.copy, start)) if has_past else 0.0
        for path in PATHS:
            found[f"{path}_tflops"] = case.tflop(path, start) / found[f"{path}_ms"] * 1e3
        chunks.append(found)
    total = {name: sum(chunk[name] for chunk in chunks) for name in chunks[0] if name.endswith("_ms")}
    return {"layer": case.layer, "kept": case.kept, **total, "chunks": chunks}


def prefill_tables(result: dict[str, Any]) -> RenderableType:
    """The result for a person."""
    title = (
        f"Attention of a prompt of {result['prompt_tokens']:,} tokens in chunks of {result['chunk_tokens']:,}, "
        f"by {result['library']} and by the generated kernel, on {result['gpu']}"
    )
    table = new_table(
        title,
        "layer",
        "kept",
        "full ms",
        "gather ms",
        "of which copy",
        "paged ms",
        "full / gather",
        "full / paged",
        "last chunk: TFLOP/s full",
        "gather",
        "paged",
    )
    for layer in result["layers"]:
        last = layer["chunks"][-1]
        table.add_row(
            str(layer["layer"]),
            f"{layer['kept']:.1%}",
            f"{layer['full_ms']:.1f}",
            f"{layer['gather_ms']:.1f}",
            f"{layer['copy_ms']:.2f}",
            f"{layer['paged_ms']:.1f}",
            f"{layer['full_ms'] / layer['gather_ms']:.2f}",
            f"{layer['full_ms'] / layer['paged_ms']:.2f}",
            *(f"{last[f'{path}_tflops']:.0f}" for path in PATHS),
        )
    return table
