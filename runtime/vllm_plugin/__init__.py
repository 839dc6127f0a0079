"""The plugin that lets stock vLLM serve from a compiled plan. Installed, and without a plan, it changes nothing.

vLLM calls `register` in every one of its processes. A plan is served where `additional_config` names its artefact under
`PLAN_KEY`, with our scheduler and worker classes; `runtime.engine_args` writes all of it. What runs where:

    front end     `admission` refuses answers that are too long; `metrics` turns vLLM's statistics into the plan's
    engine core   `scheduler` ends prefill steps at boundaries; `manager` claims pages by `ir.reserve`; `capacity` says what fits
    worker        `worker` puts the runtime in the place of attention, with `spec` as its cache; `backend` hands it every step as a
                  `runtime.batch.Batch`, and every layer's queries, keys and values

`refusals` says everywhere what a plan cannot be served with, and `compat` is what all of these know of vLLM.
"""

PLAN_KEY = "tangram_plan"  # in vLLM's `additional_config`


def register() -> None:
    """Entry point of `vllm.general_plugins`: what a request of ours needs in every process; may be called any number of times."""
    from .compat import register_spec
    from .manager import PageManager
    from .spec import PageSpec

    register_spec(PageSpec, PageManager)
