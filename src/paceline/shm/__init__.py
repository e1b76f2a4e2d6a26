"""Shared-memory collectives: the Python face of the native core."""
