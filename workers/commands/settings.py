"""`workers config` and `workers completion`: as those of `producer`."""

from common import completion as completions
from common import config_command
from workers.cli import cli

config = config_command.command_for(cli)
completion = completions.command_for(cli)
