"""`python -m workers`: the same as the `workers` command."""

from workers.cli import main

main()
