"""One module for each benchmark: `add_arguments(parser)` and `run(options) -> int`; only `run` may
import torch.
"""
