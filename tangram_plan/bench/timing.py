"""How kernels are timed on a GPU: medians of replays of one CUDA graph, and the bandwidth of a plain read beside them."""

import statistics
from collections.abc import Callable
from types import ModuleType

from tangram_plan.ir import TangramError

READ_BYTES = 2 << 30  # of the plain read that bandwidth is measured with
REPLAYS = 20


def require_gpu(command: str) -> ModuleType:
    """torch, on a machine with a CUDA device.

    Raises:
        TangramError: there is none.
    """
    try:
        import torch
    except ImportError as error:
        raise TangramError("torch is not installed", where=command, fix="pip install 'tangram-plan[verify]'") from error
    if not torch.cuda.is_available():
        raise TangramError("no CUDA device", where=command, fix="run this on a machine with a GPU")
    return torch


def time_graph(run: Callable[[], object]) -> float:
    """Median microseconds of replays of one graph."""
    import torch

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return float(statistics.median(times))


def read_bandwidth() -> float:
    """GB/s of a plain read: bytes over nanoseconds."""
    import torch

    data = torch.ones(READ_BYTES // 4, dtype=torch.int32, device="cuda")
    return float(READ_BYTES / 1e3 / time_graph(data.amax))
