"""`python -m tangram_plan`."""

from .cli import main

main()
