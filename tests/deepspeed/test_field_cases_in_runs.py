"""What DeepSpeed's users met, with our swappers in DeepSpeed: "right" is bitwise its CPU offload.

docs/deepspeed_field_cases.md says for every row that cites DeepSpeed where its test is.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from nvmeswap.errors import SwapPathError
from tests.deepspeed.small_runs import (
    MIB,
    Layers,
    SmallRun,
    config_of,
    files_of,
    losses_in_ram,
    names_of_cases,
    on_nvme,
    outcomes_of_cases,
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """Of all cases."""
    return outcomes_of_cases(__name__, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("case", names_of_cases(__file__))
def test_run_is_right_or_says_so(outcomes: dict[str, str | None], case: str) -> None:
    assert outcomes[case] is None, outcomes[case]


def case_layer_of_512_by_1000(folder: Path) -> None:
    """DeepSpeed's assert: 513_024 padded elements, and a buffer of 513_000.  field case A03"""
    build = lambda: Layers((512, 1000))  # noqa: E731
    assert on_nvme(folder, build).train(2) == losses_in_ram(2, build)


class Mixed(nn.Module):
    """Of 64, 262_144 and 1_000_000 elements, and 3."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sizes = nn.ParameterList(
            torch.randn(numel) / 8 for numel in (64, 262_144, 1_000_000, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        small, matrix, large, tiny = self.sizes
        x = torch.tanh(x @ matrix.view(512, 512))
        return x * large[:512] + tiny.sum() + small.square().mean() * large.square().mean()


def case_small_and_large_with_accumulation(folder: Path) -> None:
    """Gradients were left out, and which tensors are on NVMe was mixed up.
    field cases D01, N06, O06"""
    run = on_nvme(folder, Mixed, sub_group_size=300_000, gradient_accumulation_steps=2)
    assert run.train(8) == losses_in_ram(8, Mixed, 2)


M_MMAP_THRESHOLD = -3  # malloc.h


def locked_nbytes() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines()
               if line.startswith("VmLck")]
    return int(line.split()[1]) << 10


def case_nothing_is_page_locked(folder: Path) -> None:
    """There `pin_memory` false was not heard, and true failed where little may be locked.
    field cases B03, B04"""
    before = locked_nbytes()
    run = on_nvme(folder, param__pin_memory=True, optimizer__pin_memory=False)
    run.train(1)
    assert locked_nbytes() == before


def reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return psutil.Process().memory_info().rss


def peak_nbytes() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines()
               if line.startswith("VmHWM")]
    return int(line.split()[1]) << 10


def case_set_up_takes_the_budgets_and_one_layer(folder: Path) -> None:
    """It took as much memory as offloading to the CPU, which for 64 MiB of parameters is 265.
    DeepSpeed's own buffer of all gradients is 64 of those that are left.  field cases B07, B08"""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB // 2)  # else freed memory stays in the heap
    before = reset_peak()
    on_nvme(folder, lambda: Layers((1024,) * 16), sub_group_size=2_000_000,
            param__buffer_count=1, param__buffer_size=1 << 20, optimizer__buffer_count=1)
    assert peak_nbytes() - before < (64 + 4 + 8 + 20) * MIB
    assert sum(path.stat().st_size for path in files_of(folder)) >= 128 * MIB


def case_many_steps_take_no_more_memory(folder: Path) -> None:
    """Each step kept its buffers.  field case B10"""
    run = on_nvme(folder)
    resident = []
    for _ in range(30):
        run.step()
        resident.append(psutil.Process().memory_info().rss)
    assert resident[-1] - resident[10] < 3 * MIB, resident


def case_path_is_missing(folder: Path) -> None:
    """DeepSpeed itself says it.  field case M01"""
    with pytest.raises(AssertionError, match="nvme_path"):
        SmallRun(config_of("nvme", None))


def case_path_is_a_file(folder: Path) -> None:
    """field cases M01, M02"""
    (folder / "file").touch()
    with pytest.raises(SwapPathError) as raised:
        on_nvme(folder / "file")
    assert raised.value.path == folder / "file" and raised.value.fix


def case_init_within_init(folder: Path) -> None:
    """Libraries open one of their own in the user's.  field case M05"""
    import deepspeed

    def build() -> nn.Module:
        with deepspeed.zero.Init(config_dict_or_path=config_of("nvme", folder)):
            return Layers()

    assert on_nvme(folder, build).train(2) == losses_in_ram(2)


class Repeated(Layers):
    """A layer three times in one forward, the last time within itself."""

    def __init__(self) -> None:
        super().__init__((512, 512, 512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.layers
        return third(torch.tanh(first(second(first(torch.tanh(first(x)))))))


def case_layer_used_three_times(folder: Path) -> None:
    """field case N03"""
    run = on_nvme(folder, Repeated, param__buffer_count=1)
    assert run.train(3) == losses_in_ram(3, Repeated)


class Adapted(Layers):
    """A frozen base, and adapters of rank 4."""

    def __init__(self) -> None:
        super().__init__((512, 512, 512))
        self.layers.requires_grad_(False)
        self.down = nn.ParameterList(torch.randn(512, 4) / 20 for _ in range(3))
        self.up = nn.ParameterList(torch.randn(4, 512) / 20 for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, down, up in zip(self.layers, self.down, self.up, strict=True):
            x = torch.tanh(layer(x) + x @ down @ up)
        return x


def case_frozen_base_is_never_written(folder: Path) -> None:
    """field case N04"""
    run = on_nvme(folder, Adapted)
    swapper = run.engine.module.layers[0].weight.nvme_swapper
    losses = run.train(1)
    written = swapper.stats().write_nbytes
    assert losses + run.train(2) == losses_in_ram(3, Adapted)
    assert swapper.stats().write_nbytes == written >= 3 * MIB


def case_gradients_stay_in_memory_where_there_is_room(folder: Path) -> None:
    """field case O03"""
    run = on_nvme(folder, optimizer__buffer_count=24)
    assert run.train(3) == losses_in_ram(3)
    assert [path for path in files_of(folder) if "gradient" in path.name] == []


def case_twelve_layers_in_few_buffers(folder: Path) -> None:
    """"Not enough buffers 0 for swapping 1", at first or in step 2.
    field cases P01, P02, P03, P04"""
    build = lambda: Layers((512,) * 12)  # noqa: E731
    expected = SmallRun(config_of("cpu", None), build).train(3)
    for buffer_count, buffer_size in ((1, 1000), (2, 263_000), (5, 263_000)):
        run = on_nvme(folder, build, param__buffer_count=buffer_count,
                      param__buffer_size=buffer_size, stage3_max_live_parameters=10**9)
        assert run.train(3) == expected, buffer_count
        run.destroy()


def case_memory_of_buffers_is_not_taken_at_the_start(folder: Path) -> None:
    """Buffers that are too large for the machine stopped the job; here they are a limit.
    field cases B01, P04"""
    before = reset_peak()
    run = on_nvme(folder, param__buffer_size=10**10, optimizer__buffer_count=10**4)
    assert run.train(2) == losses_in_ram(2)
    assert peak_nbytes() - before < 200 * MIB
