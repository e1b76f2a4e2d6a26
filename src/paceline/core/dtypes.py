"""Element types and reductions as the core numbers them: `plc_dtype` and `plc_op` of its header.

The one table: a code is an index into these names. Names are torch's; `backend.host_engine` derives
its map from torch's dtypes to codes, so that this package needs no torch.
"""

from __future__ import annotations

__all__ = ["BYTES", "DTYPE_NAMES", "INT64", "OP_NAMES", "Op"]

DTYPE_NAMES = (
    *("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("bool", "bytes"),
)
INT64 = DTYPE_NAMES.index("int64")
# Any element type, moved and never reduced.
BYTES = DTYPE_NAMES.index("bytes")

OP_NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")


class Op:
    """`plc_op`. torch's `ReduceOp.RedOpType` has the same numbers."""

    SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, PREMUL_SUM = range(9)
