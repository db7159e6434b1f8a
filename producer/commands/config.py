"""`producer config`: which setting holds, and where it is from."""

from common.config_command import command_for
from producer.cli import cli

command = command_for(cli)
