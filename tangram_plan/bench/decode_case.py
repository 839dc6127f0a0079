"""What `bench decode` and `bench tune` time: decode attention of rank 0 for some requests, all layers, as an engine runs it.

Every layer reads its own columns of one pool, whose pages are scattered at random. All of a step is launches, so that one CUDA
graph holds it; requests stand at the end of their prompts.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tangram_plan.ir import Plan, Schedule, TangramError

if TYPE_CHECKING:
    import torch

    from tangram_plan.runtime.generated_kernels import GeneratedKernels
    from tangram_plan.runtime.reference import PageTable

SAMPLED_PAIRS = 4  # (request, KV head) pairs of every layer that are compared with the reference
TOLERANCE = 2e-2  # largest relative error of an output row
ROTATIONS = 4  # page tables that a layer's repeated launches take in turn, so that none finds its pages in the L2 cache


@dataclass(frozen=True)
class Regime:
    """Requests that are decoded together.

    Args:
        name: how the results call it.
        prompt_tokens: of every request.
    """

    name: str
    prompt_tokens: tuple[int, ...]


def mixed_lengths(num_requests: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Prompt lengths that rise by equal steps."""
    steps = max(1, num_requests - 1)
    return tuple(shortest + (longest - shortest) * i // steps for i in range(num_requests))


REGIMES = (
    Regime("32 x 32K", (32768,) * 32),
    Regime("32 x 2K to 64K", mixed_lengths(32, 2048, 65536)),
    Regime("32 x 4K", (4096,) * 32),
    Regime("1 x 128K", (131072,)),
)


@dataclass(frozen=True)
class LayerInputs:
    """One layer's tensors of a step, and how many bytes of keys and values it reads."""

    layer: int
    q: "torch.Tensor"
    k: "torch.Tensor"
    v: "torch.Tensor"
    score: "torch.Tensor"
    sinks: "torch.Tensor | None"
    out: "torch.Tensor"
    read_bytes: int


class DecodeInputs:
    """Random inputs of a step, which every choice of kernels can be run on.

    Args:
        plan: gives layers, lengths and page geometry.
        regime: the requests.
        device: where the tensors lie.
    """

    def __init__(self, plan: Plan, regime: Regime, device: str) -> None:
        import torch

        from tangram_plan.runtime.head_tables import int32
        from tangram_plan.runtime.reference import PageTable, lay_out_pages, local_heads, torch_dtype

        self.plan, self.regime, self.device = plan, regime, device
        lengths, layout = regime.prompt_tokens, plan.layout
        num_pages = sum(plan.num_pages(length, length) for length in lengths)
        dtype = torch_dtype(layout)
        self.pool = torch.empty(num_pages * layout.page_elements, dtype=dtype, device=device).normal_()
        table = lay_out_pages(plan, lengths, lengths, free_pages=torch.randperm(num_pages))
        rotations = [(table.page_ids + turn * (num_pages // ROTATIONS)) % num_pages for turn in range(ROTATIONS)]
        page_indptr = table.page_indptr.to(device)
        self.page_tables = [PageTable(page_ids.to(device), page_indptr) for page_ids in rotations]
        self.num_tokens = int32(lengths, device)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(len(lengths), *shape, device=device)

        self.layers = []
        for layer in plan.model.planned_layers:
            places, gqa_ratio = local_heads(plan, 0, layer), plan.model.layers[layer].gqa_ratio
            heads, head_dim = len(places), layout.head_dim
            q, k, v = (normal(count, head_dim).to(dtype) for count in (heads * gqa_ratio, heads, heads))
            sinks = torch.randn(heads * gqa_ratio, device=device) if plan.model.attention.has_sinks else None
            held = sum(plan.group_tokens(place.group_id, length, length) for place in places for length in lengths)
            read_bytes = held * layout.kv_bytes
            self.layers.append(LayerInputs(layer, q, k, v, normal(heads), sinks, torch.empty_like(q), read_bytes))

    @property
    def read_bytes(self) -> int:
        """Bytes of keys and values that a step reads."""
        return sum(inputs.read_bytes for inputs in self.layers)


class DecodeCase:
    """Some kernels on some inputs.

    Args:
        kernels: of the plan, or of one that differs in its partition alone.
        inputs: what they read.
        schedule: how CTAs find their work.
    """

    def __init__(self, kernels: "GeneratedKernels", inputs: DecodeInputs, schedule: Schedule) -> None:
        from tangram_plan.runtime.decode import DecodeStep

        self.inputs, self.schedule = inputs, schedule
        self.step = DecodeStep(kernels, schedule, len(inputs.regime.prompt_tokens))

    def plan(self) -> None:
        """Launch the plan of the step."""
        inputs = self.inputs
        self.step.plan(inputs.num_tokens, inputs.num_tokens, inputs.page_tables[0].page_indptr)

    def run(self, *, overlap: bool = False) -> None:
        """Launch a whole step; with `overlap`, a layer starts while the one before it ends."""
        self.plan()
        for place, layer in enumerate(self.inputs.layers):
            self._attend(layer, self.inputs.page_tables[0], overlap=overlap and place > 0)

    def run_layer(self, layer: LayerInputs, *, repeats: int, overlap: bool = False) -> None:
        """Launch one layer several times, each time on other pages; `plan` must have run."""
        for turn in range(repeats):
            table = self.inputs.page_tables[turn % ROTATIONS]
            self._attend(layer, table, overlap=overlap and turn > 0)

    def check(self) -> None:
        """Compare a step's output, poisoned beforehand, with the reference: some pairs of every layer.

        Raises:
            TangramError: a row differs by more than rounding.
        """
        for layer in self.inputs.layers:
            layer.out.fill_(float("nan"))
        self.run()
        num_requests = len(self.inputs.regime.prompt_tokens)
        for number, layer in enumerate(self.inputs.layers):
            num_pairs = num_requests * layer.k.shape[1]
            for sample in range(min(SAMPLED_PAIRS, num_pairs)):
                request, head = divmod((number + sample * num_pairs // SAMPLED_PAIRS) % num_pairs, layer.k.shape[1])
                error = self._error(layer, request, head)
                if not error <= TOLERANCE:
                    raise TangramError(
                        f"{self.schedule.value} is wrong",
                        where=f"{self.inputs.regime.name}, layer {layer.layer}, request {request}, KV head {head}",
                        got=f"relative error {error:.2g}",
                        expected=f"at most {TOLERANCE}",
                    )

    def _attend(self, layer: LayerInputs, table: "PageTable", *, overlap: bool) -> None:
        self.step.attend(
            layer.layer,
            layer.q,
            layer.k,
            layer.v,
            layer.score,
            self.inputs.pool,
            table,
            layer.out,
            sinks=layer.sinks,
            overlap=overlap,
        )

    def _error(self, layer: LayerInputs, request: int, head: int) -> float:
        from tangram_plan.runtime.kernel_problem import max_error
        from tangram_plan.runtime.reference import attend, local_heads, page_views, slots_of

        plan, inputs = self.inputs.plan, self.inputs
        form, gqa_ratio = plan.model.attention, layer.q.shape[1] // layer.k.shape[1]
        group_id, column = local_heads(plan, 0, layer.layer)[head]
        length = inputs.regime.prompt_tokens[request]
        pages = inputs.page_tables[0].pages(request * len(plan.grouping.groups) + group_id)
        tokens_per_page = plan.layout.tokens_per_page(plan.grouping.groups[group_id].num_members)
        held = plan.group_tokens(group_id, length, length)
        page, slot = (part.to(inputs.device) for part in slots_of(pages.cpu(), column, tokens_per_page, held))
        views = page_views(inputs.pool, plan.layout)
        queries = slice(head * gqa_ratio, (head + 1) * gqa_ratio)
        expected = attend(
            layer.q[request, queries].float(),
            views.keys[page, slot].float(),
            views.values[page, slot].float(),
            form.softmax_scale,
            form.logit_softcap,
            None if layer.sinks is None else layer.sinks[queries],
        )
        return max_error(layer.out[request, queries], expected)
