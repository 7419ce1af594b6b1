"""The bytes of `MasterRest` by tensor operations, for masters on a GPU: as native/master.c.

All tensors are flat, contiguous, of one length and on one device, which may be the CPU. Nothing
waits for the device; temporary memory is bounded by a piece.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_PIECE_NUMEL = 1 << 22  # a few MB for each temporary tensor; a multiple of 8
_BITS_EACH = 8  # carries in a byte


def split_on_device(master: Tensor, parameter: Tensor, rest: Tensor) -> None:
    """Write the rounded values of `master` (fp32) to `parameter` (bf16), and what they lack to
    `rest` (uint8, as `MasterRest` keeps it)."""
    for piece, lower_out, carries_out in _pieces(rest, master.numel()):
        lower, upper = _halves(master[piece])
        is_nan = master[piece].isnan()
        is_tie = lower == -(1 << 15)  # as an unsigned number 0x8000: half way
        carry = (lower < 0) & (~is_tie | ((upper & 1) == 1)) & ~is_nan
        rounded = (upper + carry).masked_fill_(is_nan, -1)  # 0xffff
        parameter[piece].view(torch.int16).copy_(rounded)
        lower_out.copy_(lower)
        padded = carry.new_zeros(carries_out.numel() * _BITS_EACH, dtype=torch.uint8)
        padded[: carry.numel()] = carry
        weighted = padded.view(-1, _BITS_EACH) << _places(rest.device)
        torch.sum(weighted, 1, dtype=torch.uint8, out=carries_out)


def join_on_device(parameter: Tensor, rest: Tensor, out: Tensor) -> None:
    """The inverse: write to `out` (fp32) the masters that `parameter` and `rest` came from."""
    for piece, lower, carries in _pieces(rest, out.numel()):
        rounded = parameter[piece].view(torch.int16)
        bits = (carries.unsqueeze(1) >> _places(rest.device)) & 1
        carry = bits.view(-1)[: rounded.numel()].to(torch.bool)
        is_stale = carry & ((rounded & 0x7FFF) == 0)  # somebody else has written this zero
        lower_out, upper_out = _halves(out[piece])
        upper_out.copy_(rounded - (carry & ~is_stale).to(torch.int16))
        lower_out.copy_(lower.masked_fill(is_stale, 0))


def _pieces(rest: Tensor, numel: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Ranges of elements, with their lower halves and their carries in `rest`."""
    lower, carries = rest[: 2 * numel].view(torch.int16), rest[2 * numel :]
    for begin in range(0, numel, _PIECE_NUMEL):
        piece = slice(begin, min(begin + _PIECE_NUMEL, numel))
        last = -(-piece.stop // _BITS_EACH)
        yield piece, lower[piece], carries[begin // _BITS_EACH : last]


def _halves(master: Tensor) -> tuple[Tensor, Tensor]:
    """Lower and upper 16 bits of each element, as views: the machine is little-endian."""
    halves = master.view(torch.int16).view(-1, 2)
    return halves[:, 0], halves[:, 1]


def _places(device: torch.device) -> Tensor:
    return torch.arange(_BITS_EACH, dtype=torch.uint8, device=device)
