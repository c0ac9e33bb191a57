"""`python -m windlass`: the command line, also under torchrun."""

from windlass.cli.main import main

main()
