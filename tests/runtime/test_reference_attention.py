"""Requests served in plain torch, chunk by chunk and token by token, against attention under a mask per KV head."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import pytest

pytest.importorskip("torch", reason="the reference is torch")

import torch

from tangram_plan.ir import Plan, group_pages_in_row, next_boundary, reserve
from tangram_plan.runtime.batch import Batch
from tangram_plan.runtime.eviction_reference import key_anchor_scores
from tangram_plan.runtime.reference import local_heads, page_views, slots_of
from tangram_plan.runtime.reference_attention import ReferenceAttention
from tangram_plan.runtime.serving_scorers import KeyAnchor, Recent, ServingScorer
from tests.masked_model import seen_tokens
from tests.plans import valid_plan

LAYERS, KV_HEADS, GQA_RATIO, HEAD_DIM, CHUNK = 2, 2, 2, 16, 16
PROMPTS = [1, 2, 15, 16, 17, 18, 33, 50, 100]
ANSWER = 20


def _plan(*rho: int) -> Plan:
    return valid_plan(
        num_layers=LAYERS,
        num_kv_heads=KV_HEADS,
        gqa_ratio=GQA_RATIO,
        head_dim=HEAD_DIM,
        page_slots=32,
        rho=rho,
        group_sizes=(1, 2, 1),
        compress_chunk_tokens=CHUNK,
        max_new_tokens=64,
    )


KEEPS_ALL, COMPRESSES = _plan(65536), _plan(40000, 15000, 0)
ANCHORS = {layer: torch.randn(KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(layer)) for layer in (0, 1)}
SCORERS: dict[str, ServingScorer] = {"recent": Recent(), "key_anchor": KeyAnchor(ANCHORS)}


@dataclass
class Request:
    """A request: random queries, keys and values of all its tokens, and what attention made of them."""

    prompt_tokens: int
    q: torch.Tensor  # [LAYERS, num_tokens, q_heads, D]
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    num_tokens: int = 0
    pages: list[int] = field(default_factory=list)

    @classmethod
    def random(cls, prompt_tokens: int, seed: int = 0) -> "Request":
        generator = torch.Generator().manual_seed(1000 * seed + prompt_tokens)
        q, k, v = (
            torch.randn(LAYERS, prompt_tokens + ANSWER, heads, HEAD_DIM, generator=generator)
            for heads in (KV_HEADS * GQA_RATIO, KV_HEADS, KV_HEADS)
        )
        return cls(prompt_tokens, q, k, v, torch.full_like(q, torch.nan))

    def next_tokens(self, plan: Plan) -> int:
        if self.num_tokens >= self.prompt_tokens:
            return 1
        return next_boundary(self.prompt_tokens, self.num_tokens, plan.compress_chunk_tokens) - self.num_tokens


class Server:
    """A pool in which slots that nobody wrote are NaN, and pages that are given out in no order."""

    def __init__(self, plan: Plan, scorer: ServingScorer, seed: int = 0, num_pages: int = 2000) -> None:
        self.plan, self.attention = plan, ReferenceAttention(plan, 0, scorer)
        self.free = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).tolist()
        self.pool = torch.full((num_pages * plan.layout.page_elements,), torch.nan)

    def step(self, work: Sequence[tuple[Request, int]]) -> None:
        """Compute so many tokens of each request; those that decode stand first."""
        for request, new in work:
            request.num_tokens += new
            num_pages = reserve(self.plan, request.prompt_tokens, request.num_tokens).num_pages
            request.pages += [self.free.pop() for _ in range(num_pages - len(request.pages))]
        rows = torch.zeros(len(work), max(len(request.pages) for request, _ in work), dtype=torch.int32)
        for row, (request, _) in zip(rows, work, strict=True):
            row[: len(request.pages)] = torch.tensor(request.pages)
        starts = list(accumulate((new for _, new in work), initial=0))
        requests = [request for request, _ in work]
        batch = Batch([r.prompt_tokens for r in requests], [r.num_tokens for r in requests], starts)
        step = self.attention.begin(batch, rows)
        spans = [slice(request.num_tokens - new, request.num_tokens) for request, new in work]
        for layer in range(LAYERS):
            q, k, v = (
                torch.cat([getattr(request, name)[layer, span] for request, span in zip(requests, spans, strict=True)])
                for name in "qkv"
            )
            out = torch.full_like(q, torch.nan)
            self.attention.attend(layer, q, k, v, self.pool, step, out)
            for request, span, part in zip(requests, spans, torch.split(out, [new for _, new in work]), strict=True):
                request.out[layer, span] = part

    def finish(self, requests: Sequence[Request], max_chunks: int = 3) -> None:
        """Serve all together to the end, with so many chunks a step."""
        while True:
            running = [request for request in requests if request.num_tokens < request.q.shape[1]]
            if not running:
                return
            work = [(request, request.next_tokens(self.plan)) for request in running]
            decodes = [item for item in work if item[0].num_tokens >= item[0].prompt_tokens]
            chunks = [item for item in work if item[0].num_tokens < item[0].prompt_tokens]
            short = [item for item in chunks if item[1] == 1]  # prompts of one token are no different from decoding
            self.step([*decodes, *short, *[item for item in chunks if item[1] > 1][:max_chunks]])

    def cached(self, request: Request) -> list[list[torch.Tensor]]:
        """Keys, values, positions and scores of every KV head, in the order of its slots."""
        views, plan = page_views(self.pool, self.plan.layout), self.plan
        places = group_pages_in_row(plan, request.prompt_tokens, request.num_tokens)
        parts = []
        for layer in range(LAYERS):
            for group, column in local_heads(plan, 0, layer):
                ids = torch.tensor([request.pages[place] for place in places[group]])
                per_page = plan.layout.tokens_per_page(plan.grouping.groups[group].num_members)
                held = plan.group_tokens(group, request.prompt_tokens, request.num_tokens)
                where = slots_of(ids, column, per_page, held)
                parts.append([view[where] for view in views])
        return parts


def _by_masks(plan: Plan, request: Request, scorer: str) -> torch.Tensor:
    """What all tokens' attention should be."""
    out, num_tokens = torch.empty_like(request.q), request.q.shape[1]
    for layer in range(LAYERS):
        recent = torch.arange(num_tokens).expand(KV_HEADS, -1)
        scores = recent if scorer == "recent" else key_anchor_scores(request.k[layer], ANCHORS[layer])
        for head, (group, _) in enumerate(local_heads(plan, 0, layer)):
            part_kept = plan.grouping.groups[group].rho / 65536
            budgets = plan.budgets
            seen = seen_tokens(
                scores[head].tolist(),
                request.prompt_tokens,
                CHUNK,
                budgets.sink_tokens,
                budgets.window_tokens,
                part_kept,
            )
            for q_head in range(head * GQA_RATIO, (head + 1) * GQA_RATIO):
                logits = request.q[layer, :, q_head] @ request.k[layer, :, head].T / HEAD_DIM**0.5
                weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
                out[layer, :, q_head] = weights @ request.v[layer, :, head]
    return out


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("plan", [KEEPS_ALL, COMPRESSES], ids=["keeps all", "compresses"])
def test_prompts_and_answers_are_those_of_masked_attention(plan: Plan, scorer: str) -> None:
    requests = [Request.random(prompt) for prompt in PROMPTS]
    Server(plan, SCORERS[scorer]).finish(requests)
    for request in requests:
        torch.testing.assert_close(request.out, _by_masks(plan, request, scorer), atol=2e-5, rtol=1e-5)


def test_compression_changes_what_is_seen() -> None:
    request = Request.random(100)
    difference = _by_masks(COMPRESSES, request, "recent") - _by_masks(KEEPS_ALL, request, "recent")
    assert torch.equal(difference[:, :CHUNK], torch.zeros_like(difference[:, :CHUNK]))
    assert float(difference[:, -1].abs().amax()) > 0.01


@pytest.mark.parametrize("prompt_tokens", [1, 17, 50])
def test_a_request_alone_is_the_same_to_the_bit_as_in_a_batch(prompt_tokens: int) -> None:
    alone, together = Request.random(prompt_tokens), Request.random(prompt_tokens)
    others = [Request.random(prompt, seed=1) for prompt in (3, 40, 64)]
    servers = [Server(COMPRESSES, Recent(), seed) for seed in (0, 1)]
    servers[0].finish([alone])
    servers[1].finish([*others[:2], together, others[2]], max_chunks=2)
    assert torch.equal(alone.out, together.out)
    for one, other in zip(servers[0].cached(alone), servers[1].cached(together), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("steps", [[ANSWER], [1] * ANSWER, [7, 1, ANSWER - 8]], ids=["at once", "by token", "mixed"])
def test_a_preempted_request_computed_again_lies_in_the_same_slots(steps: list[int]) -> None:
    request, again = Request.random(50), Request.random(50)
    server = Server(COMPRESSES, SCORERS["key_anchor"])
    server.finish([request])
    while again.num_tokens < again.prompt_tokens:
        server.step([(again, again.next_tokens(server.plan))])
    for new in steps:
        server.step([(again, new)])
    assert not set(request.pages) & set(again.pages)
    torch.testing.assert_close(again.out, request.out, atol=2e-5, rtol=1e-5)
    for one, other in zip(server.cached(request), server.cached(again), strict=True):
        keys, values, positions, scores = zip(one, other, strict=True)
        for first, second in (keys, values, positions):
            assert torch.equal(first, second)
        in_prompt = positions[0] < request.prompt_tokens
        assert torch.equal(scores[0][in_prompt], scores[1][in_prompt])


def test_rows_after_the_last_request_are_left_alone() -> None:
    plan, request = COMPRESSES, Request.random(5)
    attention, pool = ReferenceAttention(plan, 0, Recent()), torch.zeros(20 * plan.layout.page_elements)
    step = attention.begin(Batch([5, 0], [5, 0], [0, 5, 6]), torch.arange(40, dtype=torch.int32).view(2, 20) % 20)
    q, k, v = (torch.cat([part[0, :5], part[0, :3]]) for part in (request.q, request.k, request.v))
    out = torch.full_like(q, 7.0)
    attention.attend(0, q, k, v, pool, step, out)
    assert torch.equal(out[5:], torch.full_like(out[5:], 7.0))
