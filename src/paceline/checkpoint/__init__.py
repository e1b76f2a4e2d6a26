"""`save` and `load`: checkpoints that are written whole or not at all, hold data only, and are
loaded whole or not at all.

From the outside in: `save_and_load` has the two functions, `rank_agreement` what the ranks tell one
another, `content` what becomes of objects in a file, `restoration` how objects are loaded together
or not at all, `archive` the format of the file, `atomic_file` how a file is replaced.
"""

from paceline.checkpoint.save_and_load import load, save

__all__ = ["save", "load"]
