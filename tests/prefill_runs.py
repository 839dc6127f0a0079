"""Runs generated prefill kernels in a process of their own, in which Triton interprets; see `tests.kernel_runs`."""

import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from tangram_plan.codegen.head_tables import tabulate
from tangram_plan.codegen.prefill_kernels import prefill_kernels
from tangram_plan.codegen.render import render_head_tables, render_kernel
from tangram_plan.ir import HEAD_TABLES_NAME, KERNELS_FOLDER, Plan
from tangram_plan.runtime.generated_kernels import GeneratedKernels
from tangram_plan.runtime.kernel_problem import max_error
from tangram_plan.runtime.library_attention import FlashAttention3
from tangram_plan.runtime.prefill import Prefill, PrefillPath
from tangram_plan.runtime.prefill_problem import Request, make_problem, prefill_error, prefill_runs
from tangram_plan.runtime.reference import PageTable, torch_dtype

FLASH_MODULES = ("vllm", "vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface")
FLASH_SCHEMA = (  # of the operator, as it is built for GPUs
    "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, "
    "int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap, "
    "bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, "
    "Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"
)


def write_kernels(plan: Plan, directory: Path) -> None:
    """The prefill kernels and head tables of a plan, and no others."""
    folder = directory / KERNELS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for spec in prefill_kernels(plan):
        (folder / f"{spec.name}.py").write_text(render_kernel(spec, "0" * 64))
    (folder / f"{HEAD_TABLES_NAME}.py").write_text(render_head_tables(tabulate(plan), "0" * 64))


def load(plan: Plan) -> GeneratedKernels:
    """The prefill kernels of a plan, freshly generated."""
    with tempfile.TemporaryDirectory() as directory:
        write_kernels(plan, Path(directory))
        return GeneratedKernels(Path(directory), plan)


def run_step(
    plan: Plan,
    requests: Sequence[Request],
    rank: int = 0,
    layer: int = 0,
    seed: int = 0,
    paths: Sequence[PrefillPath] = tuple(PrefillPath),
) -> float:
    """Largest error of a whole layer by some paths."""
    torch.set_num_threads(1)
    problem = make_problem(plan, requests, rank=rank, layer=layer, seed=seed)
    kernels = load(plan)
    return max(prefill_error(kernels, problem, path) for path in paths)


def run_check(plan: Plan, name_part: str = "", old: str = "", new: str = "") -> dict[str, float]:
    """Largest error of every kernel by the artefact check, in whose files a line was changed; stops where one is large."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_kernels(plan, Path(folder))
        sources = {path: path.read_text() for path in (Path(folder) / KERNELS_FOLDER).glob("*_d*.py")}
        changed = {path: source for path, source in sources.items() if name_part in path.name and old in source}
        assert changed
        for path, source in changed.items():
            path.write_text(source.replace(old, new) if old else source)
        kernels = GeneratedKernels(Path(folder), plan)
    errors: dict[str, float] = {}
    for names, error in prefill_runs(kernels):
        try:
            found = error()
        except Exception:  # whatever the interpreter raises has been noticed
            found = float("inf")
        for name in names:
            errors[name] = max(errors.get(name, 0.0), found)
        if found > 1e-3:
            break
    return errors


def run_beyond_31_bits(plan: Plan, request: Request, path: PrefillPath) -> float:
    """Error of a step whose pages lie at both ends of a pool of more than 2^31 elements; most of it is never touched."""
    torch.set_num_threads(1)
    kernels, layout = load(plan), plan.layout
    small = make_problem(plan, [request])
    page_ids = small.page_table.page_ids.long()
    num_pages = 2**31 // layout.page_elements + 10
    where = torch.where(page_ids % 2 == 0, page_ids, num_pages - page_ids)
    pool = torch.empty(num_pages * layout.page_elements, dtype=torch_dtype(layout))
    pool.view(num_pages, -1)[where] = small.pool.view(-1, layout.page_elements)[page_ids]
    table = PageTable(where.to(torch.int32), small.page_table.page_indptr)
    out = torch.full_like(small.q, float("nan"))
    Prefill(kernels, 1000, path=path).attend(0, small.q, small.k, small.v, pool, table, small.step, out)
    return max_error(out, small.expected)


def run_with_stand_in(plan: Plan, requests: Sequence[Request]) -> float:
    """Error of the gather path through an operator with the signature and shapes of FlashAttention 3, in plain torch."""
    torch.set_num_threads(1)
    kernels, problem = load(plan), make_problem(plan, requests)
    modules = {name: ModuleType(name) for name in FLASH_MODULES}
    with (
        torch.library._scoped_library("_vllm_fa3_C", "DEF") as library,
        mock.patch.dict(sys.modules, modules),
        mock.patch("tangram_plan.runtime.prefill.flash_attention_3", FlashAttention3),
    ):
        library.define(FLASH_SCHEMA)
        library.impl("fwd", _flash_attention_stand_in, "CPU")
        return prefill_error(kernels, problem, PrefillPath.GATHER)


def _flash_attention_stand_in(*arguments: Any) -> list[torch.Tensor]:
    names = [part.split()[-1] for part in FLASH_SCHEMA[4 : FLASH_SCHEMA.index(")")].split(", ")]
    given = dict(zip(names, arguments, strict=True))
    q, k, v, out = (_tensor(given[name]) for name in ("q", "k", "v", "out"))
    k_starts = _tensor(given["cu_seqlens_k"]).tolist()
    by_sequence = q.dim() == 4
    q_starts = [] if by_sequence else _tensor(given["cu_seqlens_q"]).tolist()
    lse = torch.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), float("nan"))
    longest = 0
    for sequence, (k_start, k_end) in enumerate(pairwise(k_starts)):
        where = sequence if by_sequence else slice(*q_starts[sequence : sequence + 2])
        queries, keys, values = q[where].float(), k[k_start:k_end].float(), v[k_start:k_end].float()
        longest = max(longest, k_end - k_start)
        ratio = queries.shape[1] // keys.shape[1]
        logits = torch.einsum("thd,shd->hts", queries, keys.repeat_interleave(ratio, 1)) * given["softmax_scale"]
        if given["softcap"]:
            logits = given["softcap"] * torch.tanh(logits / given["softcap"])
        seen = torch.ones(logits.shape[1:], dtype=torch.bool).tril(len(keys) - len(queries))
        logits = logits.masked_fill(~seen, float("-inf"))
        found = torch.einsum("hts,shd->thd", logits.softmax(-1), values.repeat_interleave(ratio, 1))
        out[where] = found.to(out.dtype)
        (lse[sequence] if by_sequence else lse[:, where])[:] = logits.logsumexp(-1)
    neutral = given["window_size_left"], given["window_size_right"], given["cp_world_size"], given["s_aux"]
    assert given["is_causal"]
    assert neutral == (-1, -1, 1, None)
    assert given["max_seqlen_k"] == longest
    return [out, lse, lse, lse]


def _tensor(value: object) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value
