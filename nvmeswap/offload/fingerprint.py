"""Whether values on a device were changed without torch's noticing.

`weight.data += delta`, as adapters are merged, changes no version. So what was brought is summed
up, and again before it is dropped: two passes at the speed of the device's memory.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

# Words of a row. Sums of rows and of columns differ also where words only changed places.
_ROW_LENGTH = 1024
_FOLD = 64


class Fingerprint:
    """Of the tensors given, as they are now. On a GPU all is queued on the current stream, and
    nothing waits but `mark_changed`."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors: dict[int, list[Tensor]] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = storage
            self._tensors.setdefault(storage._cdata, []).append(tensor)
        self._nbytes = {key: storage.nbytes() for key, storage in self._storages.items()}
        self._sums = {key: _sums(storage) for key, storage in self._storages.items()}

    def mark_changed(self) -> None:
        """Count a change of each tensor in whose memory something is different now."""
        differs = {
            key: torch.stack([
                (now != then).any()
                for now, then in zip(_sums(self._storages[key]), sums, strict=True)
            ]).any()
            for key, sums in self._sums.items()
            if self._storages[key].nbytes() == self._nbytes[key]  # and was not dropped since
        }
        if differs:
            for key, is_different in zip(differs, _to_host(differs.values()), strict=True):
                if is_different:
                    increment_version(self._tensors[key])


def _to_host(flags: Iterable[Tensor]) -> list[bool]:
    """At the cost of one wait for each device."""
    flags = list(flags)
    found: list[bool] = torch.stack(flags).tolist()
    return found


def _sums(storage: torch.UntypedStorage) -> list[Tensor]:
    whole_nbytes = storage.nbytes() - storage.nbytes() % 8
    words = torch.empty(0, dtype=torch.int64, device=storage.device).set_(
        storage, 0, (whole_nbytes // 8,), (1,)
    )
    rest = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
        storage, whole_nbytes, (storage.nbytes() - whole_nbytes,), (1,)
    )
    square = words[: words.numel() - words.numel() % _ROW_LENGTH].view(-1, _ROW_LENGTH)
    last = words[square.numel() :]
    return [_column_sums(square), square.sum(1), last.clone(), rest.clone()]


def _column_sums(square: Tensor) -> Tensor:
    """In two steps: for a long sum into few numbers a GPU takes twice the square's memory."""
    folded = square[: len(square) - len(square) % _FOLD]
    partial = folded.view(-1, _FOLD, _ROW_LENGTH).sum(1)
    return torch.cat([partial, square[len(folded) :]]).sum(0)
