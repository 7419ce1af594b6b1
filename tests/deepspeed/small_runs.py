"""Small ZeRO-3 runs on NVMe and in memory, and the process in which all cases of a file are run."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import re
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nvmeswap.deepspeed
from nvmeswap.deepspeed import files
from nvmeswap.deepspeed.optimizer_swapper import OptimizerSwapper
from nvmeswap.deepspeed.param_swapper import ParameterSwapper
from nvmeswap.errors import SwapError
from nvmeswap.io import Engine
from tests.deepspeed.launch import be_quick
from tests.launch import start

MIB = 1 << 20
ODD_WIDTHS = (512, 515, 513, 517)  # no layer's elements fill a sector
engines: list[Engine] = []  # all that swappers opened; each fails when it is told to


class Layers(nn.Module):
    """Linear layers of over 1 MiB each, with a bias that stays in memory."""

    def __init__(
        self, widths: Sequence[int] = ODD_WIDTHS, layer: type[nn.Linear] = nn.Linear
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            layer(wide, out) for wide, out in zip(widths, (*widths[1:], widths[0]), strict=True)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def config_of(device: str, folder: Path | None, **changes: Any) -> dict[str, Any]:
    """DeepSpeed's JSON. `changes`, by name, wherever the name is: aio's, a device's, or ZeRO's."""
    place = {"device": device} | ({"nvme_path": str(folder)} if folder else {})
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": changes.pop("gradient_accumulation_steps", 1),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 600_000,
            # Nothing stays gathered between its uses.
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "offload_optimizer": place | {"buffer_count": 4, "pipeline_read": True,
                                          "pipeline_write": True, "pin_memory": False},
            "offload_param": place | {"buffer_count": 5, "buffer_size": 300_000, "max_in_cpu": 0,
                                      "pin_memory": False},
        },
        "aio": {"block_size": MIB, "queue_depth": 8},
        "steps_per_print": 1 << 30,
    }
    zero = config["zero_optimization"]
    for name, value in changes.items():
        blocks = {"optimizer": zero["offload_optimizer"], "param": zero["offload_param"],
                  "aio": config["aio"]}
        block, _, key = name.partition("__")
        (blocks[block] if key else zero)[key or name] = value
    return config


class SmallRun:
    """A model in DeepSpeed's engine."""

    def __init__(self, config: dict[str, Any], build: Callable[[], nn.Module] = Layers) -> None:
        import deepspeed

        with deepspeed.zero.Init(config_dict_or_path=config):
            model = build()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=trained)
        self.steps = 0

    def forward(self, sample: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.steps + sample)
        x = torch.randn(2, 512, generator=generator)
        return self.engine(x).float().square().mean()

    def step(self, sample: int = 0) -> float:
        loss = self.forward(sample)
        self.engine.backward(loss)
        self.engine.step()
        self.steps += 1
        return float(loss.detach())

    def train(self, steps: int) -> list[float]:
        return [self.step() for _ in range(steps)]

    def destroy(self) -> None:
        """And with it its swap files."""
        swappers = {parameter.nvme_swapper for parameter in self.engine.module.parameters()}
        self.engine.destroy()
        self.engine = None
        close([each for each in swappers if each is not None])


def close(swappers: Iterable[object]) -> None:
    """DeepSpeed keeps all models of the process, and with them their swappers."""
    for each in swappers:
        if isinstance(each, (ParameterSwapper, OptimizerSwapper)):
            # A write that was to fail, or a swapper that could not even be made.
            with contextlib.suppress(SwapError, AttributeError):
                each.close()


def on_nvme(folder: Path, build: Callable[[], nn.Module] = Layers, **changes: Any) -> SmallRun:
    """With parameters and optimizer there."""
    return SmallRun(config_of("nvme", folder, **changes), build)


@functools.cache
def losses_in_ram(
    steps: int, build: Callable[[], nn.Module] = Layers, accumulation: int = 1
) -> list[float]:
    """Of the same run by DeepSpeed's CPU offload."""
    run = SmallRun(config_of("cpu", None, gradient_accumulation_steps=accumulation), build)
    losses = run.train(steps)
    run.destroy()
    return losses


@contextlib.contextmanager
def full_disk(folder: Path, free_nbytes: int) -> Iterator[None]:
    """With so much space left on its filesystem."""
    usage = os.statvfs(folder)
    hog = folder / "hog"
    with hog.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, usage.f_bfree * usage.f_frsize - free_nbytes)
    try:
        yield
    finally:
        hog.unlink()


def fail(script: str) -> None:
    """All engines, as native/fault_script.h says; "" is none."""
    for engine in engines:
        with contextlib.suppress(Exception):
            engine.inject(script)


def files_of(folder: Path) -> list[Path]:
    return sorted((folder / "nvmeswap").rglob("*.swp"))


def names_of_cases(file: str) -> list[str]:
    """Of the functions `case_...` in it."""
    return re.findall(r"(?m)^def (case_\w+)", Path(file).read_text())


def outcomes_of_cases(module: str, folder: Path) -> dict[str, str | None]:
    """For each case None, or why it failed; `folder` is on a filesystem of its own, that of a fixed
    size. Skips where nothing can be mounted."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=400m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("can't mount a tmpfs")
    try:
        process = start(run_cases, module, folder)
        process.join(600)
        process.kill()
        outcomes: dict[str, str | None] = json.loads((folder / "outcomes").read_text())
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
    return outcomes


def run_cases(module: str, folder: Path) -> None:
    """Of the module, one after the other; what becomes of them goes to the file "outcomes"."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    be_quick()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    install_with_faults()
    outcomes: dict[str, str | None] = {}
    for name, case in vars(importlib.import_module(module)).items():
        if name.startswith("case_"):
            (folder / name).mkdir()
            outcomes[name] = outcome_of(case, folder / name)
    (folder / "outcomes").write_text(json.dumps(outcomes))
    os._exit(0)  # gloo's threads sometimes abort at a normal exit


def outcome_of(case: Callable[[Path], None], folder: Path) -> str | None:
    started = time.monotonic()
    try:
        case(folder)
    except BaseException:
        return traceback.format_exc()
    finally:
        fail("")
        close(gc.get_objects())
        print(f"{folder.name}: {time.monotonic() - started:.1f} s")
    return None


def install_with_faults() -> None:
    """nvmeswap.deepspeed.install(), with engines that can be told to fail."""

    def open_engine(**options: Any) -> Engine:
        engines.append(Engine(fault_script="", **options))
        return engines[-1]

    vars(files)["Engine"] = open_engine
    nvmeswap.deepspeed.install()
