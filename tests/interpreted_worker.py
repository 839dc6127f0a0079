"""A worker that serves on a CPU as GPUs do: by the generated kernels, in Triton's interpreter."""

from tangram_plan.ir import Plan
from tangram_plan.runtime.kernel_attention import KernelAttention
from tangram_plan.runtime.vllm_plugin.worker import CompressedWorker


class InterpretedWorker(CompressedWorker):
    """In a process with TRITON_INTERPRET=1."""

    def make_attention(self, plan: Plan) -> KernelAttention:
        """The kernels."""
        return self.make_kernels(plan)
