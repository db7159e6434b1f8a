"""The command `workers`: servers, worker groups, sinks, the simulator."""

import sys
from typing import NoReturn

import click

from common.last_words import run_program
from common.program import Program
from common.stops import end_on_stop

_COMMANDS = {
    "completion": "workers.commands.settings",
    "config": "workers.commands.settings",
    "doctor": "workers.commands.doctor",
    "restart": "workers.commands.restart",
    "serve": "workers.commands.serve",
    "simulate": "workers.simulator.command",
    "sink": "workers.commands.sink",
    "start": "workers.commands.start",
    "up": "workers.commands.up",
}
"""Command -> the module that has it: imported when it is called, so that `--help` is quick."""


@click.command(
    name="workers",
    cls=Program,
    modules={name: (module, name) for name, module in _COMMANDS.items()},
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="headrace")
def cli() -> None:
    """Serve queued prompts: worker groups beside SGLang servers, sinks to the store.

    Every flag may also come from the environment (--ramp from HEADRACE_RAMP; a flag of simulate
    from HEADRACE_SIM_…) or from headrace.toml, where the command is called: shared keys (redis,
    log_level) at the top, the others in the table of their command. The command line wins, then
    the environment.

    \b
    Begin with:
        workers up --attach 30000-30007    all of a node, beside SGLang servers that run
    or, part by part, with:
        workers serve --gpu 0-7 --model DIR    SGLang servers, one a GPU
        workers start --gpu 0-7            worker groups, one a GPU
        workers sink                       results to the store
    """


def main() -> NoReturn:
    """Run the command; whatever ends it is one line and an exit code (`common.last_words`)."""
    end_on_stop()
    sys.exit(run_program("workers", lambda: cli(prog_name="workers", standalone_mode=False)))


if __name__ == "__main__":
    main()
