"""What a drive and a processor do, by the clock: what a prediction is made of."""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from nvmeswap.cli.bench.folder import own_folder
from nvmeswap.cli.bench.measuring import Mode, Pattern, Session, Setting, memory_nbytes
from nvmeswap.cli.bench.trial import Memory, TrialFile
from nvmeswap.config import Config
from nvmeswap.errors import SwapConfigError
from nvmeswap.io.digest import digest
from nvmeswap.io.engine import DirectMode
from nvmeswap.io.probe import probe_folder
from nvmeswap.swap.elementwise import ElementwiseOptimizer
from nvmeswap.swap.sub_group import MasterForm, Segment, SubGroupLayout
from nvmeswap.swap.update import CachedUpdater, Turn
from nvmeswap.zero3.build import update_thread_count
from nvmeswap.zero3.wrap import optimizer_of

_LOOPS = 3
_SUMMED_NBYTES = 64 << 20  # beyond a processor's caches
_UPDATED_NUMEL = 16 << 20  # likewise


@dataclass(frozen=True, slots=True)
class DriveRates:
    """Bytes a second of one rank's drives together; `mixed` counts both ways of as many bytes read
    as written at a time."""

    read_nbytes_per_s: float
    write_nbytes_per_s: float
    mixed_nbytes_per_s: float

    def times(self, factor: float) -> DriveRates:
        """As many times as fast."""
        return DriveRates(*(factor * each for each in asdict(self).values()))

    def move_s(self, read_nbytes: float, write_nbytes: float) -> float:
        """Of so many bytes, both ways at a time as far as they go."""
        both = 2 * min(read_nbytes, write_nbytes)
        return (
            both / self.mixed_nbytes_per_s
            + max(0.0, read_nbytes - write_nbytes) / self.read_nbytes_per_s
            + max(0.0, write_nbytes - read_nbytes) / self.write_nbytes_per_s
        )


@dataclass(frozen=True, slots=True)
class HostRates:
    """Of one rank: elements that the update does a second, and bytes that are summed."""

    update_numel_per_s: float
    digest_nbytes_per_s: float


# --- drives -----------------------------------------------------------------------------------


def measure_drives(folders: Sequence[Path], settings: Config, size_nbytes: int) -> DriveRates:
    """Each drive as `nvmeswap-bench` measures it, with the configuration's `aio`, one after the
    other; several add up. Blocks for some seconds; leaves nothing behind. Raises SwapPathError,
    SwapSpaceError, SwapIOError."""
    found = [_measure_drive(folder, settings, size_nbytes) for folder in folders]
    return DriveRates(
        read_nbytes_per_s=sum(each.read_nbytes_per_s for each in found),
        write_nbytes_per_s=sum(each.write_nbytes_per_s for each in found),
        mixed_nbytes_per_s=sum(each.mixed_nbytes_per_s for each in found),
    )


class DriveTrial:
    """A file on a drive, to be read and written by the engine as the configuration says.

    Raises SwapPathError, SwapSpaceError, SwapIOError. Blocking: everything. Construct and close it
    on the main thread; `close` removes the file.
    """

    def __init__(self, parent: Path, settings: Config, size_nbytes: int) -> None:
        aio, direct = settings.aio, DirectMode[settings.nvmeswap.direct.upper()]
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(own_folder(parent))
            probe = probe_folder(folder, backend=settings.nvmeswap.backend, direct=direct)
            setting = Setting(
                probe.backend, aio.block_size, aio.queue_depth, aio.intra_op_parallelism
            )
            nbytes = max(2, size_nbytes // aio.block_size) * aio.block_size
            file = TrialFile(folder, nbytes, probe)
            memory = stack.enter_context(Memory(memory_nbytes(setting, nbytes), registered=True))
            self._session = stack.enter_context(Session(file, setting, memory, direct))
            self._stack = stack.pop_all()

    def sample(self) -> DriveRates:
        """Of one pass each way and one both ways."""
        passes = [self._session.run(mode, Pattern.SEQUENTIAL) for mode in Mode]
        return DriveRates(*(usage.nbytes / usage.wall_s for usage in passes))

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> DriveTrial:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _measure_drive(parent: Path, settings: Config, size_nbytes: int) -> DriveRates:
    with DriveTrial(parent, settings, size_nbytes) as trial:
        samples = [trial.sample() for _ in range(_LOOPS)]
    return DriveRates(
        *(statistics.median(column) for column in zip(*map(astuple, samples), strict=True))
    )


def given_drives(read_gbps: float, write_gbps: float) -> DriveRates:
    """From a data sheet, in 1e9 bytes a second. Both ways at a time are taken to be as fast as one
    after the other."""
    mixed = 2 / (1 / read_gbps + 1 / write_gbps)
    return DriveRates(read_gbps * 1e9, write_gbps * 1e9, mixed * 1e9)


def drives_from_bench(files: Sequence[Path]) -> DriveRates:
    """From JSON that `nvmeswap-bench io` (a file for reads, one for writes, and perhaps one for
    both), `nvmeswap-bench optimizer` or an earlier `nvmeswap plan` wrote. Raises
    SwapConfigError for others."""
    found: dict[str, float] = {}
    for file in files:
        found.update(_rates_in(file))
    missing = [name for name in ("read", "write") if name not in found]
    if missing:
        raise SwapConfigError(
            f"no speed of {' and '.join(missing)} is in {', '.join(map(str, files))}",
            key="--bench",
            fix="give the JSON of `nvmeswap-bench optimizer`, or of `nvmeswap-bench io --mode "
            "read` and `--mode write`",
        )
    usual = 2 / (1 / found["read"] + 1 / found["write"])
    return DriveRates(found["read"], found["write"], found.get("mixed", usual))


def _rates_in(file: Path) -> dict[str, float]:
    content = read_json(file, key="--bench")
    try:
        if "gb_per_s" in content and "mode" in content.get("settings", {}):
            return {content["settings"]["mode"]: content["gb_per_s"] * 1e9}
        if "floor" in content:
            floor = content["floor"]
            rates = {way: floor[f"{way}_gb_per_s"] * 1e9 for way in ("read", "write")}
            read, write = content["read_nbytes"], content["write_nbytes"]
            over = abs(read - write) / rates["read" if read > write else "write"]
            return {**rates, "mixed": 2 * min(read, write) / (floor["at_once_s"] - over)}
        drives = content["rates"]["drives"]
        return {way: drives[f"{way}_nbytes_per_s"] for way in ("read", "write", "mixed")}
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise SwapConfigError(
            "the file has no figures of a drive", key="--bench", path=file, cause=repr(error),
            fix="give what `nvmeswap-bench io` or `optimizer` wrote with --json",
        ) from None


def host_from_bench(files: Sequence[Path]) -> HostRates | None:
    """Of an earlier plan's machine, if one of the files is a plan's."""
    for file in files:
        rates = read_json(file, key="--bench").get("rates", {})
        if "host" in rates:
            return HostRates(**rates["host"])
    return None


def read_json(path: Path, *, key: str) -> Any:
    """Raises SwapConfigError naming file and reason."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SwapConfigError(
            f"{path} can't be read as JSON", key=key, path=path, cause=str(error),
            fix="name an existing JSON file",
        ) from None


# --- the host ---------------------------------------------------------------------------------


def measure_host(layouts: Sequence[SubGroupLayout], settings: Config, itemsize: int) -> HostRates:
    """On this machine, with as many threads as the update has; `itemsize`: bytes of an element of a
    gradient. Takes about a second."""
    threads = torch.get_num_threads()
    share = settings.zero_optimization.offload_optimizer.cpuadam_cores_perc
    torch.set_num_threads(update_thread_count(share))
    try:
        update = _update_rate(layouts, settings, itemsize)
    finally:
        torch.set_num_threads(threads)
    summed = torch.ones(_SUMMED_NBYTES, dtype=torch.uint8)
    return HostRates(update, _SUMMED_NBYTES / _median_s(lambda: digest(summed)))


def _median_s(call: Callable[[], object]) -> float:
    taken = []
    for _ in range(_LOOPS + 1):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def _update_rate(layouts: Sequence[SubGroupLayout], settings: Config, itemsize: int) -> float:
    """Elements a second of the real update over scratch sub-groups laid out as the largest is."""
    layout = max(layouts, key=lambda each: sum(s.numel for s in each.segments))
    numel = sum(segment.numel for segment in layout.segments)
    count = min(len(layouts), -(-_UPDATED_NUMEL // numel))  # a small model may stay in caches
    cls, options = optimizer_of(settings.optimizer, None)
    rule = ElementwiseOptimizer(cls, options)
    dtype = torch.float32 if itemsize >= 4 else torch.bfloat16
    memories = [torch.zeros(layout.slot_nbytes, dtype=torch.uint8) for _ in range(count)]
    gradients = [torch.full((numel,), 1e-3, dtype=dtype) for _ in range(count)]
    in_place = [[_in_place_for(segment) for segment in layout.segments] for _ in memories]
    updater, scalars = CachedUpdater(rule), dict[str, Mapping[str, Any]]()

    def update_all() -> None:
        for memory, gradient, own in zip(memories, gradients, in_place, strict=True):
            begin = 0
            for segment, here in zip(layout.segments, own, strict=True):
                alone = replace(segment, start=0, stop=segment.numel)
                before = scalars.get(segment.key)
                turn = Turn(gradient[begin:], None, before, rule.defaults, None, here)
                scalars.update(updater.update(layout, memory, [(alone, turn)], lambda: None))
                begin += segment.numel

    with torch.no_grad():
        update_all()  # the first step is another
        return count * numel / _median_s(update_all)


def _in_place_for(segment: Segment) -> torch.Tensor | None:
    """A parameter's own memory, where it is updated there."""
    form = segment.item.master
    if form is MasterForm.IN_PLACE:
        return torch.zeros(segment.numel)
    if form is MasterForm.SPLIT and segment.item.output_dtype is None:
        return torch.zeros(segment.numel, dtype=torch.bfloat16)
    return None
