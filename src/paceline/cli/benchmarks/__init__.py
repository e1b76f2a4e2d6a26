"""Benchmarks of `paceline bench`, one module each."""
