"""`producer completion`: what lets a shell complete."""

from common.completion import command_for
from producer.cli import cli

command = command_for(cli)
