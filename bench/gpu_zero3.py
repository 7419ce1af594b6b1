"""Step `zero3`: training from NVMe at the defaults, beside the drive alone, the same model without
offload, and DeepSpeed's first step.

The floor of a phase is what it moved at the raw rate of the same minutes; that of forward and
backward is no less than what they take without offload, and than copying the parameters to the GPU.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed_search import Settings
from gpu_raw import RawTraffic, Traffic
from gpu_told import Options, detail, figure, note, options
from mlp import BLOCK_PARAMETERS
from report import Report
from vs_deepspeed_zero3 import Place, Trainer
from worker import WorkerFailed
from zero3_answers import PHASES

PASSES = ("forward", "backward")
STEPS = 5
_ROUNDS = 6
_PASSES_IN_TURN = 3
_FIRST_FULL_STEP = 2  # the first has no states, the second is the first to read them, and ahead
_OPTIMIZER_TARGET = 0.90
_PASS_TARGET = 1.1
_DEEPSPEED_TARGET = 1.5
_DEEPSPEED_S = 45.0  # less than that, and it is not begun
_END_S = 5.0  # left over for ending it
NOTHING_OFFLOADED = {"offload_param": {"device": "none"}, "offload_optimizer": {"device": "none"}}
STOCK: Settings = {
    "optimizer_buffer_count": 5, "parameter_buffer_count": 5, "sub_group_size": 30_000_000,
    "queue_depth": 8, "block_size": 1 << 20, "intra_op_parallelism": 1, "pin_memory": False,
    "max_in_cpu": 10_000_000,
}
ROOMY: Settings = {**STOCK, "optimizer_buffer_count": 40, "parameter_buffer_count": 60}

Answer = Mapping[str, Any]


def place_of(given: Options, blocks: int) -> Place:
    trains = {"trains_on": given.device, "rows": given.size(8 * 1024, 8)}
    return Place(Report(1), given.folder, blocks, sys.executable, trains,
                 {"DS_ACCELERATOR": given.device})


def train(trainer: Trainer, raw: RawTraffic) -> tuple[list[Answer], list[Traffic]]:
    """Five steps at our defaults, each followed by the drive alone with as many bytes as it
    moved."""
    answers: list[Answer] = []
    floors: list[Traffic] = []
    for _ in range(STEPS):
        answers.append(trainer.worker.ask())
        detail(f"step_{len(answers) - 1}", answers[-1])
        floors.append(raw.measure(answers[-1]["step_read_nbytes"],
                                  answers[-1]["step_write_nbytes"]))
    return answers, floors


def compute_alone(
    given: Options, place: Place, ours: Trainer, losses: Sequence[float], copy_s: float
) -> dict[str, float]:
    """Forward and backward of the same model without offload, in turn with ours: the medians; and
    tells the ratios of passes that follow each other, and whether the first of our losses is
    right."""
    passes: dict[str, dict[str, list[float]]] = {"ours": {}, "alone": {}}
    with place.ours(NOTHING_OFFLOADED) as alone:
        first = alone.worker.ask()["loss"]
        figure("zero3_first_loss_is_right", float(first == losses[0]), target=1.0)
        figure("zero3_losses_are_finite", float(all(map(math.isfinite, losses))), target=1.0)
        for each in (alone, alone, ours):
            each.worker.ask(passes=1)
        for _ in range(given.size(_ROUNDS, 1)):
            for name, trainer in (("alone", alone), ("ours", ours)):
                for phase, seconds in trainer.worker.ask(passes=_PASSES_IN_TURN).items():
                    passes[name].setdefault(phase, []).extend(seconds)
    detail("passes", passes)
    for phase in PASSES:
        mine, theirs = passes["ours"][f"{phase}_s"], passes["alone"][f"{phase}_s"]
        least = [max(each, copy_s) for each in theirs]
        figure(f"zero3_{phase}_without_step_over_floor",
               statistics.median(a / b for a, b in zip(mine, least, strict=True)),
               ours=statistics.median(mine), peer=statistics.median(least), unit="s",
               of="compute or copy", target=_PASS_TARGET, at_most=True)
    return {phase: statistics.median(passes["alone"][f"{phase}_s"]) for phase in PASSES}


def copy_alone_s(given: Options, blocks: int) -> float:
    """What the parameters take from page-locked memory to the GPU, by nothing but copies."""
    host = torch.empty(BLOCK_PARAMETERS, dtype=torch.bfloat16, pin_memory=not given.rehearses)
    there = torch.empty_like(host, device=given.device)
    seconds = []
    for _ in range(4):
        finish(given)
        began = time.perf_counter()
        for _ in range(blocks):
            there.copy_(host, non_blocking=True)
        finish(given)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def finish(given: Options) -> None:
    """What the GPU has queued."""
    if not given.rehearses:
        torch.cuda.synchronize()


def tell_phases(
    step: str, answers: Sequence[Answer], floors: Sequence[Traffic], least_s: Mapping[str, float]
) -> None:
    """`least_s`: of forward and of backward, whatever the drive does."""
    steps = list(zip(answers, floors, strict=True))[_FIRST_FULL_STEP:]

    def middle(name: str) -> float:
        return statistics.median(answer[name] for answer, _ in steps)

    figure(
        f"{step}_optimizer_floor_over_step",
        statistics.median(floor.floor_s / answer["step_s"] for answer, floor in steps),
        ours=middle("step_s"), peer=statistics.median(floor.floor_s for _, floor in steps),
        unit="s", of="drive alone", target=_OPTIMIZER_TARGET,
    )
    for phase, phase_least_s in least_s.items():
        least = [max(phase_least_s, answer[f"{phase}_read_nbytes"] / 1e9 / floor.read_gb_per_s)
                 for answer, floor in steps]
        figure(
            f"{step}_{phase}_over_floor",
            statistics.median(answer[f"{phase}_s"] / floor_s
                              for (answer, _), floor_s in zip(steps, least, strict=True)),
            ours=middle(f"{phase}_s"), peer=statistics.median(least), unit="s",
            of="compute, read or copy", target=_PASS_TARGET, at_most=True,
        )
    figure(f"{step}_shards_fetched", middle("parameter_fetch_count"))
    for phase in PHASES:
        for way in ("read", "write"):
            if gb := middle(f"{phase}_{way}_nbytes") / 1e9:
                figure(f"{step}_{phase}_{way}_gb", gb, ours=gb, unit="GB")
    detail("losses", [answer["loss"] for answer in answers])
    detail("raw", [vars(floor) for floor in floors])


def tell_memory(step: str, answers: Sequence[Answer]) -> None:
    """Peaks of the steps."""
    for name, nbytes in (("pinned", pinned_nbytes(answers)),
                         ("rss", max(each["peak_nbytes"] for each in answers)),
                         ("gpu", max(each["gpu_peak_nbytes"] for each in answers))):
        figure(f"{step}_{name}_gb", nbytes / 1e9, ours=nbytes / 1e9, unit="GB")


def pinned_nbytes(answers: Sequence[Answer]) -> int:
    """The arena, whoever has locked it, and what torch has taken besides."""
    return max(max(each["locked_nbytes"], each["arena_locked_nbytes"]) + each["torch_pinned_nbytes"]
               for each in answers)


def beside_deepspeed(given: Options, place: Place, ours: Answer) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        note("deepspeed can't be imported: not measured beside it")
        return
    for name, settings in (("stock", STOCK), ("40 and 60 buffers", ROOMY)):
        if given.left_s < (0 if given.rehearses else _DEEPSPEED_S):
            note(f"DeepSpeed ({name}): no time left")
            return
        place.deepspeed_timeout_s = max(1.0, given.left_s - _END_S)
        try:
            with place.theirs("nvme", settings) as trainer:
                theirs = trainer.worker.ask()
        except WorkerFailed as error:
            note(f"DeepSpeed ({name}) stopped in step 0: {error}")
            continue
        detail("deepspeed_step_0", theirs)
        note(f"DeepSpeed ({name}): loss {theirs['loss']!r} in step 0, ours {ours['loss']!r}")
        figure("zero3_step_0_speed_over_deepspeed", theirs["wall_s"] / ours["wall_s"],
               ours=ours["wall_s"], peer=theirs["wall_s"], unit="s", of=f"deepspeed, {name}",
               target=_DEEPSPEED_TARGET)
        figure("zero3_rss_over_deepspeed", ours["peak_nbytes"] / theirs["peak_nbytes"],
               ours=ours["peak_nbytes"] / 1e9, peer=theirs["peak_nbytes"] / 1e9, unit="GB",
               of=f"deepspeed, {name}")
        return


def main(given: Options) -> None:
    blocks = given.size(24, 1)  # 805 M parameters
    detail("parameters", blocks * BLOCK_PARAMETERS)
    place = place_of(given, blocks)
    raw = RawTraffic(Path(given.folder) / "raw", given.size(1 << 30, 32 << 20))
    with place.ours({}) as trainer:
        answers, floors = train(trainer, raw)
        raw.close()
        copy_s = copy_alone_s(given, blocks)
        losses = [answer["loss"] for answer in answers]
        alone = compute_alone(given, place, trainer, losses, copy_s)
    detail("copy_alone_s", copy_s)
    detail("without_offload_s", alone)
    tell_phases("zero3", answers, floors,
                {phase: max(alone[phase], copy_s) for phase in PASSES})
    tell_memory("zero3", answers)
    beside_deepspeed(given, place, answers[0])


if __name__ == "__main__":
    main(options(__doc__))
