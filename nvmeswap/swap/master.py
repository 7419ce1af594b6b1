"""What a bf16 parameter lacks to its fp32 master: 17 bits an element instead of 32, without loss.

The parameter is the master rounded; the rest is the master's lower half and the carry of that
rounding (native/master.c says why 16 bits are one too few).
"""

from __future__ import annotations

import torch

from nvmeswap.io import native


class MasterRest:
    """The rest of one segment's master, in memory that it is given.

    The memory holds 16 bits an element, in order, then the carries, one bit an element, those of
    the last byte that belong to no element 0. So equal masters have equal bytes.

        rest = MasterRest(memory, numel)
        rest.join(0, parameter, master)  # the master as it was split
        ...  # update master
        rest.split(0, master, parameter)

    Of a master that is NaN only this comes back: NaN. Its parameter is 0xffff, which is what torch
    makes of contiguous memory with AVX2 or AVX-512 (elsewhere 0x7fc0). All else equals torch.

    A rest is of use with the very parameter that was split beside it: whoever writes a parameter
    from elsewhere also calls `clear`, or splits the master again. If that is forgotten (torch can't
    tell of writes through `parameter.data`), a zero is a zero and any other value a master that
    rounds to it.

    Args: `memory` uint8, flat, on the host, `nbytes_for(numel)` bytes, at any address; it is not
    written before `clear` or `split`.
    Blocking: all calls compute, without the GIL. Threads: calls on ranges that do not overlap may
    run at once. Ownership: the caller's memory, which this keeps alive.
    """

    def __init__(self, memory: torch.Tensor, numel: int) -> None:
        _check(memory, torch.uint8)
        assert memory.numel() == self.nbytes_for(numel)
        self._memory = memory
        self._numel = numel

    @staticmethod
    def nbytes_for(numel: int) -> int:
        """Bytes that the rest of `numel` elements takes."""
        return 2 * numel + (numel + 7) // 8

    def clear(self) -> None:
        """Make it the rest of masters that are exactly their parameters."""
        self._memory.zero_()

    def join(self, begin: int, parameter: torch.Tensor, out: torch.Tensor) -> None:
        """Write to `out` (fp32) the masters of the elements from `begin`, whose values are
        `parameter` (bf16).

        Both are flat, contiguous, on the host and of one length, a multiple of 8 or up to the end;
        `begin` is a multiple of 8.
        """
        rest, carries = self._addresses(begin, parameter, out)
        native.join_master(parameter.data_ptr(), rest, carries, out.data_ptr(), out.numel())

    def split(self, begin: int, master: torch.Tensor, parameter: torch.Tensor) -> None:
        """The inverse: write the rest of `master` (fp32), and its rounded values to `parameter`
        (bf16). Ranges as for `join`."""
        rest, carries = self._addresses(begin, parameter, master)
        native.split_master(
            master.data_ptr(), parameter.data_ptr(), rest, carries, master.numel()
        )

    def _addresses(
        self, begin: int, parameter: torch.Tensor, master: torch.Tensor
    ) -> tuple[int, int]:
        _check(parameter, torch.bfloat16)
        _check(master, torch.float32)
        end = begin + master.numel()
        assert parameter.numel() == master.numel()
        assert begin >= 0 and begin % 8 == 0
        assert end == self._numel or (end < self._numel and end % 8 == 0)
        start = self._memory.data_ptr()
        return start + 2 * begin, start + 2 * self._numel + begin // 8


def _check(memory: torch.Tensor, dtype: torch.dtype) -> None:
    assert memory.dtype is dtype
    assert memory.is_cpu and memory.dim() == 1 and memory.is_contiguous()
