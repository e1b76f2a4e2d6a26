"""The `paceline` command. Nothing here imports torch before a command needs it."""

from paceline.cli.main import main

__all__ = ["main"]
