"""What an optimizer step can't beat: its arithmetic alone, and its bytes alone, in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from nvmeswap.cli.bench.measuring import Mode, Pattern, Session, Setting, memory_nbytes
from nvmeswap.cli.bench.trial import Memory, TrialFile
from nvmeswap.io.engine import DirectMode

_MOST_FILE_NBYTES = 4 << 30  # arbitrary: far beyond what caches of drives hold
_MOST_UPDATE_NUMEL = 16 << 20  # 128 MiB and more of state: beyond a processor's caches


@dataclass(frozen=True, slots=True)
class Floor:
    """One measurement. `at_once_s`, `in_turn_s`: the step's bytes read and written, in both
    ways."""

    update_s: float
    at_once_s: float
    in_turn_s: float
    read_gb_per_s: float
    write_gb_per_s: float

    @property
    def floor_s(self) -> float:
        """The larger of arithmetic and bytes, the latter in the better of two ways."""
        return max(self.update_s, min(self.at_once_s, self.in_turn_s))


class FloorTrial:
    """Measures the floor of a step that updates `numel` elements and moves so many bytes.

    The bytes are moved by our engine over a file of that size (4 GiB at most, then what is measured
    is scaled), the update is torch's fused one over fp32 parameters and state in RAM. Blocking:
    everything. Ownership: of file and memory; `close` gives back the memory, the folder's owner
    removes the file.
    """

    def __init__(
        self,
        file: TrialFile,
        setting: Setting,
        direct: DirectMode,
        update: UpdateAlone,
        *,
        read_nbytes: int,
        write_nbytes: int,
    ) -> None:
        self._update = update
        self._read_gb, self._write_gb = read_nbytes / 1e9, write_nbytes / 1e9
        self._memory = Memory(memory_nbytes(setting, file.nbytes), registered=True)
        self._session = Session(file, setting, self._memory, direct)

    def measure(self) -> Floor:
        read, write, mixed = (
            self._session.run(mode, Pattern.SEQUENTIAL).gb_per_s
            for mode in (Mode.READ, Mode.WRITE, Mode.MIXED)
        )
        # What there is more of in one way is moved alone.
        more_gb, alone = max((self._read_gb - self._write_gb, read),
                             (self._write_gb - self._read_gb, write))
        both_gb = 2 * min(self._read_gb, self._write_gb)
        return Floor(
            update_s=self._update.measure_s(),
            at_once_s=both_gb / mixed + more_gb / alone,
            in_turn_s=self._read_gb / read + self._write_gb / write,
            read_gb_per_s=read,
            write_gb_per_s=write,
        )

    def close(self) -> None:
        self._session.close()
        self._memory.close()

    def __enter__(self) -> FloorTrial:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class UpdateAlone:
    """torch's own fused update over state in RAM, as many elements as the step has."""

    def __init__(self, kind: type[torch.optim.Optimizer], numel: int, **options: Any) -> None:
        self._numel = numel
        parameter = torch.nn.Parameter(torch.zeros(min(numel, _MOST_UPDATE_NUMEL)))
        parameter.grad = torch.full_like(parameter, 1e-3)
        self._piece_numel = parameter.numel()
        # The base class takes no options, each of its kinds does.
        made: Callable[..., torch.optim.Optimizer] = kind
        self._optimizer = made([parameter], fused=True, **options)
        self._optimizer.step()  # makes the state

    def measure_s(self) -> float:
        count = -(-self._numel // self._piece_numel)
        began_s = time.perf_counter()
        for _ in range(count):
            self._optimizer.step()
        taken_s = time.perf_counter() - began_s
        return taken_s * self._numel / (count * self._piece_numel)


def trial_file_nbytes(setting: Setting, read_nbytes: int, write_nbytes: int) -> int:
    """Of whole blocks, two at least: half of them are read while the others are written."""
    wanted_nbytes = min(max(read_nbytes, write_nbytes), _MOST_FILE_NBYTES)
    blocks = max(2, -(-wanted_nbytes // setting.block_nbytes))
    return blocks * setting.block_nbytes
