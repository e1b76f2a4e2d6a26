"""Seeing what a run does."""

from paceline.observe.progress import Progress

__all__ = ["Progress"]
