"""Step `large`: five steps of a model whose parameters and optimizer state exceed 50 GB, or of what
the drive has room for."""

from __future__ import annotations

import shutil

import psutil
from gpu_raw import RawTraffic
from gpu_told import Options, detail, figure, note, options, skip
from gpu_zero3 import PASSES, STEPS, copy_alone_s, place_of, tell_memory, tell_phases, train
from mlp import BLOCK_PARAMETERS

_STATE_NBYTES = 2 + 10.125  # of a parameter, on NVMe: bf16; the rest of its master, two moments
_WANTED_NBYTES = 50.5e9
_SPARE_NBYTES = 3e9  # of the drive
_HOST_NBYTES = 2  # of a parameter: its gradient
_HOST_SHARE = 0.5
# Parameters when they are built, and two passes a step; states to the drive in each, back in later
# ones.
_WRITTEN_NBYTES = 2 + STEPS * _STATE_NBYTES
_READ_NBYTES = 2 * STEPS * 2 + (STEPS - 1) * _STATE_NBYTES
_START_S = 35.0  # of process and model; arbitrary
_RAW_S = 3.0  # of the drive alone after a step, about


def block_count(given: Options) -> int:
    """As many as are wanted, or fit."""
    if given.rehearses:
        return 1
    on_drive = (shutil.disk_usage(given.folder).free - _SPARE_NBYTES) / _STATE_NBYTES
    in_memory = _HOST_SHARE * psutil.virtual_memory().available / _HOST_NBYTES
    wanted = -(-_WANTED_NBYTES // (_STATE_NBYTES * BLOCK_PARAMETERS))
    return int(min(wanted, on_drive // BLOCK_PARAMETERS, in_memory // BLOCK_PARAMETERS))


def foreseen_s(given: Options, parameters: int) -> float:
    """At the raw rate of this minute."""
    raw = RawTraffic(given.folder / "raw", given.size(1 << 30, 8 << 20))
    traffic = raw.measure(round(_READ_NBYTES * parameters), round(_WRITTEN_NBYTES * parameters))
    raw.close()
    shutil.rmtree(given.folder / "raw")
    detail("raw", vars(traffic))
    return traffic.floor_s / 0.85 + (0 if given.rehearses else _START_S + STEPS * _RAW_S)


def main(given: Options) -> None:
    blocks = block_count(given)
    parameters = blocks * BLOCK_PARAMETERS
    state_gb = parameters * _STATE_NBYTES / 1e9
    if blocks < 1:
        skip(f"no room: {shutil.disk_usage(given.folder).free / 1e9:.1f} GB free")
    if state_gb < 50.0:
        note(f"{state_gb:.1f} GB of state instead of 50: "
             f"{shutil.disk_usage(given.folder).free / 1e9:.1f} GB free on the drive, "
             f"{psutil.virtual_memory().available / 1e9:.1f} GB of memory")
    expected_s = foreseen_s(given, parameters)
    detail("expected_s", expected_s)
    if expected_s > given.left_s:
        skip(f"{STEPS} steps with {state_gb:.1f} GB of state would take about {expected_s:.0f} s, "
             f"and {given.left_s:.0f} are left: give it a call of its own")
    raw = RawTraffic(given.folder / "raw", given.size(1 << 30, 8 << 20))
    with place_of(given, blocks).ours({}) as trainer:
        answers, floors = train(trainer, raw)
    raw.close()
    copy_s = copy_alone_s(given, blocks)
    detail("copy_alone_s", copy_s)
    tell_phases("large", answers, floors, dict.fromkeys(PASSES, copy_s))
    tell_memory("large", answers)
    figure("large_state_gb", answers[-1]["nvme_nbytes"] / 1e9,
           target=50.0 if state_gb >= 50.0 else None)


if __name__ == "__main__":
    main(options(__doc__))
