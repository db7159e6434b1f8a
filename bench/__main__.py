"""Run benchmarks and print their table."""

import sys
from collections.abc import Callable

from rich.console import Console
from rich.table import Table

from bench import enqueue, flow, memory, recovery, redis_memory, window
from bench.stage import Row

BENCHMARKS: dict[str, Callable[[], list[Row]]] = {
    "flow": flow.flow,
    "zero": flow.zero,
    "occupancy": flow.occupancy,
    "enqueue": enqueue.enqueue,
    "redis": redis_memory.redis_memory,
    "memory": memory.memory,
    "window": window.window,
    "recovery": recovery.recovery,
}


def main(names: list[str]) -> int:
    """Run the named benchmarks, or all."""
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    console = Console(width=150)
    table = Table(
        "what", "figure", "asked (design.md §8)", title="Headrace, measured here and now"
    )
    for name in names or BENCHMARKS:
        console.print(f"running {name} …", style="dim")
        for row in BENCHMARKS[name]():
            table.add_row(row.what, row.figure, row.target)
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
