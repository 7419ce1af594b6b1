"""The one padding function: planner, pool, store and engine all call it."""

from __future__ import annotations


def padded_nbytes(nbytes: int, alignment_nbytes: int) -> int:
    """The smallest multiple of `alignment_nbytes` (a power of two) that holds `nbytes`."""
    assert nbytes >= 0 and alignment_nbytes > 0
    assert alignment_nbytes & (alignment_nbytes - 1) == 0, "alignments are powers of two"
    return (nbytes + alignment_nbytes - 1) & -alignment_nbytes
