"""What every rank writes while it runs: its status page, its trace, and its stacks on request.

This package is on the hot path of everything above it, so it imports nothing of Paceline but
`errors` and `_linux`, and never torch at import. What it writes is read by `paceline.diagnostics`.
"""
