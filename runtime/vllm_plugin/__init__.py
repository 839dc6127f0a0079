"""The plugin that lets stock vLLM serve from a compiled plan. Installed, and without a plan, it changes nothing.

vLLM calls `register` in every one of its processes. A plan is served where `additional_config` names its artefact under
`PLAN_KEY`, with our scheduler and worker classes; `runtime.engine_args` writes all of it.
"""

PLAN_KEY = "tangram_plan"  # in vLLM's `additional_config`


def register() -> None:
    """Entry point of `vllm.general_plugins`: what a request of ours needs in every process; may be called any number of times."""
    from .compat import register_spec
    from .manager import PageManager
    from .spec import PageSpec

    register_spec(PageSpec, PageManager)
