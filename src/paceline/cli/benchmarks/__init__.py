"""One module for each benchmark: `add_arguments(parser)` and `run(options) -> int`, torch imported inside `run` only."""
