"""The arguments with which a stock vLLM engine serves from a plan."""

from pathlib import Path
from typing import Any

from tangram_plan.ir import load_artefact

PLUGIN = f"{__package__}.vllm_plugin"


def engine_args(artefact: str | Path, **arguments: Any) -> dict[str, Any]:
    """Arguments for `vllm.LLM`, or for its engine: yours, and what the plan needs.

    Args:
        artefact: folder that `tangram-plan build` wrote.
        arguments: any of vLLM's; `model` among them.
    """
    artefact = Path(artefact).resolve()
    load_artefact(artefact)
    arguments["additional_config"] = {**arguments.get("additional_config", {}), "tangram_plan": str(artefact)}
    arguments["scheduler_cls"] = f"{PLUGIN}.scheduler.make_scheduler"
    arguments["worker_cls"] = f"{PLUGIN}.worker.CompressedWorker"
    arguments["enable_prefix_caching"] = False
    return arguments
