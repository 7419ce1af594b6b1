"""From a model's footprint and a machine's rates to the phases of a step, what binds them, and what
else would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from nvmeswap.cli.plan.passes import Compute, Passes, play
from nvmeswap.cli.plan.rates import DriveRates, HostRates
from nvmeswap.cli.plan.stepping import Stepping, step
from nvmeswap.config import Config, OffloadDevice
from nvmeswap.zero3.foresight import Footprint, Foresight

_WAITS_FROM = 1.05  # arbitrary: a phase that is so much longer than its computing waits for a drive
_WORTH_TELLING = 0.97  # of the time before


@dataclass(frozen=True, slots=True)
class Machine:
    """What one rank has. `drives` is its share of the node's. `compute` of None: not known, and
    taken to be nothing, so that phases are what the drive alone takes."""

    drives: DriveRates
    host: HostRates
    compute: Compute | None


@dataclass(frozen=True, slots=True)
class Prediction:
    """One optimizer step with its micro-batches."""

    footprint: Footprint
    passes: Passes
    stepping: Stepping
    budget_nbytes: int | None

    @property
    def step_s(self) -> float:
        return self.passes.forward_s + self.passes.backward_s + self.stepping.step_s

    @property
    def fits(self) -> bool:
        """Whether `shard()` would take the budget."""
        return self.budget_nbytes is None or self.footprint.arena_nbytes <= self.budget_nbytes

    def limits(self, drives: DriveRates) -> dict[str, str]:
        """By phase, what it can't be faster than."""
        passes, stepping = self.passes, self.stepping
        read_s = stepping.read_nbytes / drives.read_nbytes_per_s
        write_s = stepping.write_nbytes / drives.write_nbytes_per_s
        moved = "drive write" if write_s >= read_s else "drive read"
        return {
            "forward": _limit_of_pass(passes.forward_s, passes.forward_host_s),
            "backward": _limit_of_pass(passes.backward_s, passes.backward_host_s),
            "step": moved if stepping.drive_s > stepping.host_s else "update",
        }

    def limit(self, drives: DriveRates) -> str:
        """Of the whole step: that of its longest phase; host memory where it does not fit."""
        if not self.fits:
            return "host memory"
        taken = {
            "forward": self.passes.forward_s,
            "backward": self.passes.backward_s,
            "step": self.stepping.step_s,
        }
        return self.limits(drives)[max(taken, key=lambda phase: taken[phase])]


def _limit_of_pass(taken_s: float, host_s: float) -> str:
    return "drive read" if taken_s > _WAITS_FROM * host_s else "compute"


def predict(
    foresight: Foresight, settings: Config, machine: Machine, *, micro_batches: int
) -> Prediction:
    """Arithmetic; nothing is measured."""
    footprint = foresight.footprint(settings)
    checksums = settings.nvmeswap.checksum == "all"
    passes = play(
        footprint,
        machine.drives,
        machine.host,
        machine.compute or Compute(0.0, 0.0),
        micro_batches=micro_batches,
        checksums=checksums,
    )
    stepping = step(
        footprint,
        machine.drives,
        machine.host,
        checksums=checksums,
        cached=passes.cached,
        ahead_nbytes=passes.ahead_nbytes,
    )
    return Prediction(footprint, passes, stepping, settings.nvmeswap.host_memory_nbytes)


# --- what to change ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Change:
    """Something else to try, and what would come of it; `sample_s` is a step's time a micro-batch,
    so that plans with more of them compare."""

    what: str
    sample_s: float
    arena_nbytes: int
    fits: bool


def changes(
    foresight: Foresight,
    settings: Config,
    machine: Machine,
    now: Prediction,
    *,
    micro_batches: int,
) -> list[Change]:
    """What would be faster, best first; where the budget is too small, what would fit."""
    found = []
    for what, other, there, batches in _candidates(settings, machine, now, micro_batches):
        then = predict(foresight, other, there, micro_batches=batches)
        sample_s = then.step_s / batches
        is_faster = sample_s < _WORTH_TELLING * now.step_s / micro_batches
        if then.fits and (is_faster or not now.fits):
            found.append(Change(what, sample_s, then.footprint.arena_nbytes, then.fits))
    return sorted(found, key=lambda change: change.sample_s)


def _candidates(
    settings: Config, machine: Machine, now: Prediction, micro_batches: int
) -> Iterator[tuple[str, Config, Machine, int]]:
    zero = settings.zero_optimization
    param, optimizer = zero.offload_param, zero.offload_optimizer
    unlimited = _with(settings, nvmeswap={"host_memory_nbytes": None})
    if not now.fits:
        for what, zero_change in (
            ("offload_param.max_in_cpu: 0", {"offload_param": {"max_in_cpu": 0}}),
            ("buffer_count: 2 for parameters, 1 for the optimizer", {
                "offload_param": {"max_in_cpu": 0, "buffer_count": 2},
                "offload_optimizer": {"buffer_count": 1},
            }),
            ("sub_group_size: 1048576, max_in_cpu: 0, buffer_count: 2 and 1", {
                "sub_group_size": 1 << 20,
                "offload_param": {"max_in_cpu": 0, "buffer_count": 2},
                "offload_optimizer": {"buffer_count": 1},
            }),
        ):
            yield what, _with(settings, zero_optimization=zero_change), machine, micro_batches
        enough = now.footprint.smallest_nbytes
        yield (f"nvmeswap.host_memory_nbytes: {enough}, the smallest that works",
               _with(settings, nvmeswap={"host_memory_nbytes": enough}), machine, micro_batches)
    if param.device is OffloadDevice.NVME:
        numel = now.footprint.numel
        yield (f"offload_param.max_in_cpu: {numel}, all of it in memory between uses",
               _with(unlimited, zero_optimization={"offload_param": {"max_in_cpu": numel}}),
               machine, micro_batches)
        count = 2 * param.buffer_count
        yield (f"offload_param.buffer_count: {count}",
               _with(unlimited, zero_optimization={"offload_param": {"buffer_count": count}}),
               machine, micro_batches)
    if optimizer.device is OffloadDevice.NVME:
        ratio = round(optimizer.ratio / 2, 3)
        yield (f"offload_optimizer.ratio: {ratio}, the other sub-groups in memory",
               _with(unlimited, zero_optimization={"offload_optimizer": {"ratio": ratio}}),
               machine, micro_batches)
    yield ("twice as many drives (nvme_path takes a list)", settings,
           replace(machine, drives=machine.drives.times(2)), micro_batches)
    yield (f"{2 * micro_batches} micro-batches a step: the optimizer's bytes are shared by more",
           settings, machine, 2 * micro_batches)


def _with(settings: Config, **blocks: dict[str, Any]) -> Config:
    """A copy with other values in the blocks inside."""
    changed: dict[str, Any] = {}
    for name, values in blocks.items():
        block = getattr(settings, name)
        inner = {
            key: getattr(block, key).model_copy(update=value) if isinstance(value, dict) else value
            for key, value in values.items()
        }
        changed[name] = block.model_copy(update=inner)
    return settings.model_copy(update=changed)
