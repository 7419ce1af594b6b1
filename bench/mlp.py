"""The model whose optimizer is stepped: blocks of two linear layers and a norm, as in a
transformer's MLP; some tensors large, some tiny."""

from __future__ import annotations

HIDDEN = 2048
BLOCK_PARAMETERS = 8 * HIDDEN * HIDDEN + 7 * HIDDEN


def block_count(parameters: float) -> int:
    """How many blocks come closest to so many parameters; 8 are 268 M."""
    return max(1, round(parameters / BLOCK_PARAMETERS))


def shapes(blocks: int) -> list[tuple[int, ...]]:
    """Of all parameters, in the order of the model's."""
    block = [(4 * HIDDEN, HIDDEN), (4 * HIDDEN,), (HIDDEN, 4 * HIDDEN), (HIDDEN,), (HIDDEN,),
             (HIDDEN,)]
    return block * blocks
