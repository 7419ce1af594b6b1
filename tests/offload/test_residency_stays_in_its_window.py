"""What is on the device at any moment, and what is copied, are as the settings say."""

from __future__ import annotations

import ctypes
import gc
import mmap
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nvmeswap import OffloadManager
from nvmeswap.io.engine import Engine
from nvmeswap.io.probe import probe_folder
from tests.offload.conftest import Manage
from tests.offload.runs import (
    DIM,
    assert_equal,
    collect,
    forward_and_backward,
    frozen,
    infer,
    input_of,
    stack,
    train,
)

LAYERS = 6
CHECKPOINTS = ("none", "reentrant", "non-reentrant")
tiers = pytest.mark.parametrize("tier", ["cpu", "nvme"])
trained_or_not = pytest.mark.parametrize("kind", ["frozen", "trained"])
checkpoints = pytest.mark.parametrize("checkpointing", CHECKPOINTS)


class Checkpointed(nn.Module):
    """Pairs of layers of equal size, each pair computed again in backward if so told."""

    def __init__(self, checkpointing: str, layers: int = LAYERS) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(stack(2) for _ in range(layers // 2))
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for pair in self.pairs:
            if self.checkpointing == "none":
                x = pair(x)
            else:
                x = checkpoint(pair, x, use_reentrant=self.checkpointing == "reentrant")
        return x


class Watch:
    """Looks at the manager whenever a module or a gradient gives it the chance."""

    def __init__(self, model: nn.Module, manager: OffloadManager) -> None:
        self.most_units = self.most_nbytes = self.looks = 0
        self.manager = manager
        for module in model.modules():
            module.register_forward_pre_hook(lambda *_: self.look())
            module.register_forward_hook(self.after_forward)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _: self.look())

    def after_forward(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        self.look()
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(lambda _: self.look())

    def look(self) -> None:
        stats = self.manager.stats()
        self.looks += 1
        self.most_units = max(self.most_units, stats.resident_unit_count)
        self.most_nbytes = max(self.most_nbytes, stats.resident_nbytes)


def managed(manage: Manage, kind: str, tier: str, checkpointing: str, **options: Any) -> Any:
    model = Checkpointed(checkpointing)
    if kind == "frozen":
        frozen(model)
    return model, manage(model, tier=tier, trainable=tier, **options)


@tiers
@trained_or_not
@checkpoints
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_units_on_the_device_never_exceed_the_window(
    manage: Manage, tier: str, kind: str, checkpointing: str, prefetch: int
) -> None:
    """Forward and backward, from the first step on. features A1, A2, A18, A31, F1, F3, F4, G8,
    section 4: 1; field case D07, D12"""
    model, manager = managed(manage, kind, tier, checkpointing, prefetch=prefetch)
    largest = max(unit.nbytes for unit in manager.units)
    assert len(manager.units) == LAYERS
    watch = Watch(model, manager)
    for number in range(2):
        forward_and_backward(model, lambda m, x, _: m(x), number)
        assert manager.stats().resident_unit_count == 0
        infer(model)
        assert manager.stats().resident_unit_count == 0
    assert watch.looks > 30 and watch.most_units >= 1
    for count in (watch.most_units, manager.stats().peak_resident_unit_count):
        assert count <= prefetch + 1
    for nbytes in (watch.most_nbytes, manager.stats().peak_resident_nbytes):
        assert nbytes <= (prefetch + 1) * largest


@tiers
@checkpoints
def test_blocks_and_their_owners_are_all_that_is_there(
    manage: Manage, tier: str, checkpointing: str
) -> None:
    """A unit around others stays while they run: one more for each level."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = stack(3), nn.Parameter(torch.ones(DIM))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x * self.scale)

    model = Checkpointed(checkpointing)
    model.pairs = nn.ModuleList(Scaled() for _ in range(4))
    manager = manage(model, tier=tier, trainable=tier)
    for number in range(3):
        forward_and_backward(model, lambda m, x, _: m(x), number)
    assert manager.stats().peak_resident_unit_count <= 3
    assert manager.stats().resident_unit_count == 0


@tiers
def test_forward_alone_leaves_no_more_than_the_window(manage: Manage, tier: str) -> None:
    """Autograd's saved views hold no weights. features F1, F4"""
    model, manager = managed(manage, "trained", tier, "none")
    kept = [model(input_of(number)) for number in range(3)]
    assert manager.stats().resident_unit_count <= 2
    sum(each.sum() for each in kept).backward()
    assert manager.stats().resident_unit_count == 0


@tiers
@checkpoints
def test_frozen_weights_come_twice_and_never_go_back(
    manage: Manage, tier: str, checkpointing: str
) -> None:
    """Three times when computed again. features A6, section 4: 3"""
    model, manager = managed(manage, "frozen", tier, checkpointing)
    nbytes = sum(unit.nbytes for unit in manager.units)
    forward_and_backward(model, lambda m, x, _: m(x), 0)
    before = manager.stats()
    for number in range(3):
        forward_and_backward(model, lambda m, x, _: m(x), number)
    after = manager.stats()
    uses = 2 if checkpointing == "none" else 3
    assert after.in_nbytes - before.in_nbytes <= 3 * uses * nbytes
    assert after.bring_count - before.bring_count <= 3 * uses * LAYERS
    assert after.out_nbytes == 0


@tiers
def test_trained_weights_are_copied_back_only_as_gradients(manage: Manage, tier: str) -> None:
    """features 2A"""
    model, manager = managed(manage, "trained", tier, "none")
    nbytes = sum(unit.nbytes for unit in manager.units)
    train(model, steps=1)
    before = manager.stats()
    train(model, steps=3)
    after = manager.stats()
    assert after.in_nbytes - before.in_nbytes <= 3 * 2 * nbytes
    assert after.out_nbytes - before.out_nbytes <= 3 * nbytes


@tiers
def test_units_come_ahead_of_their_use(manage: Manage, tier: str) -> None:
    """All but the first one of a known order. features F20, B21"""
    model, manager = managed(manage, "frozen", tier, "none", prefetch=1)
    infer(model)
    before = manager.stats()
    infer(model, calls=3)
    after = manager.stats()
    loads = after.bring_count - before.bring_count
    assert loads == 3 * LAYERS
    assert after.prefetch_count - before.prefetch_count >= loads - 3


@tiers
def test_units_kept_on_the_device_are_copied_once(manage: Manage, tier: str) -> None:
    model, manager = managed(manage, "frozen", tier, "none", keep_resident_bytes=1 << 20)
    nbytes = sum(unit.nbytes for unit in manager.units)
    for _ in range(3):
        infer(model)
    assert manager.stats().in_nbytes <= nbytes
    assert manager.stats().resident_unit_count == LAYERS
    manager.release()
    assert manager.stats().resident_nbytes == 0
    manager.load()
    assert manager.stats().resident_unit_count == LAYERS


@tiers
def test_budget_for_kept_units_is_not_exceeded(manage: Manage, tier: str) -> None:
    model = frozen(Checkpointed("none"))
    manager = manage(model, tier=tier)
    unit = max(unit.nbytes for unit in manager.units)
    manager.close()
    manager = manage(model, tier=tier, keep_resident_bytes=3 * unit + 10)
    for number in range(2):
        forward_and_backward(model, lambda m, x, _: m(x), number)
        assert manager.stats().resident_nbytes <= 3 * unit + 10
        assert manager.stats().resident_unit_count == 3
    assert manager.stats().peak_resident_nbytes <= 5 * unit + 10


@tiers
def test_trained_parts_that_stay_never_move(manage: Manage, tier: str) -> None:
    """features A8"""
    model = frozen(Checkpointed("none"))
    for pair in model.pairs:
        pair[0].bias.requires_grad_()
    manage(model, tier=tier, trainable="resident")
    places = [pair[0].bias.data_ptr() for pair in model.pairs]
    train(model)
    assert places == [pair[0].bias.data_ptr() for pair in model.pairs]


# --- host memory and files -----------------------------------------------------------------------


def anonymous_nbytes() -> int:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    status = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in status)
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


def large_stack(layers: int, dim: int) -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(dim, dim, bias=False) for _ in range(layers)))
    for layer in model:
        nn.init.constant_(layer.weight, 1 / dim)
    return frozen(model)


def test_released_model_on_nvme_takes_one_hundredth_of_its_bytes(
    tmp_path: Path,
) -> None:
    """Beyond the slots that it was allowed, the pages of the window (the CPU keeps them for
    the next pass), and a unit that malloc may keep. field case B12, B13"""
    layers, dim, x = 32, 1024, torch.ones(1, 1024)
    with OffloadManager(large_stack(2, dim), "cpu", path=tmp_path) as first:
        first.model(x)  # what is taken once a process
    model = large_stack(layers, dim)
    nbytes = 4 * layers * dim * dim
    before = anonymous_nbytes() - nbytes
    with OffloadManager(model, "cpu", path=tmp_path, buffer_count=2) as manager:
        with torch.no_grad():
            for _ in range(3):
                model(x)
        held = anonymous_nbytes() - before
        window = 2 * 4 * dim * dim
        assert held <= manager.stats().host_nbytes + window + 0.01 * nbytes + 4 * dim * dim
        manager.release()
        left = anonymous_nbytes() - before
        assert left <= manager.stats().host_nbytes + 0.01 * nbytes + 4 * dim * dim
        with torch.no_grad():
            for _ in range(20):
                model(x)
        assert anonymous_nbytes() - before <= held + 4 * dim * dim / 4


@tiers
def test_memory_of_what_was_moved_is_given_back(manage: Manage, tier: str) -> None:
    """No reference to the tensors that the model had. field case B12"""
    model = large_stack(4, 32)
    old = [weakref.ref(layer.weight.untyped_storage()) for layer in model]
    manager = manage(model, tier=tier)
    collect()
    assert [each() for each in old] == [None] * 4
    infer(nn.Sequential(nn.Linear(DIM, 32), model))
    assert manager.stats().resident_nbytes == 0


def test_host_memory_on_nvme_is_what_was_allowed(manage: Manage) -> None:
    model = large_stack(8, 64)
    unit = 4 * 64 * 64
    for buffer_count in (1, 4):
        for max_in_cpu in (0, 3 * unit):
            manager = manage(model, buffer_count=buffer_count, max_in_cpu=max_in_cpu)
            allowed = buffer_count * unit + max_in_cpu
            assert manager.stats().host_nbytes <= allowed + 16384 * (buffer_count + 3)
            manager.close()


def test_units_kept_in_host_memory_are_read_once(
    manage: Manage, engines: list[Engine]
) -> None:
    model = large_stack(8, 64)
    manage(model, max_in_cpu=1 << 20)
    x = torch.ones(2, 64)
    model(x)
    before = engines[-1].stats()
    for _ in range(3):
        model(x)
    after = engines[-1].stats()
    assert after.read_direct_nbytes == before.read_direct_nbytes
    assert after.read_buffered_nbytes == before.read_buffered_nbytes


@pytest.mark.parametrize("count, size", [(300, 17), (100, 333), (3, 1000)])
def test_host_memory_is_not_rounded_up(manage: Manage, count: int, size: int) -> None:
    """features A11, F17, section 4: 15"""
    model = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(count)))
    manager = manage(frozen(model), tier="cpu", granularity=1 << 20)
    needed = count * 4 * size * size
    assert manager.stats().host_nbytes <= 1.02 * needed + 256 * count


def test_small_model_takes_a_small_arena(manage: Manage) -> None:
    """features F17"""
    manager = manage(frozen(nn.Linear(64, 64, bias=False)), tier="cpu")
    assert manager.stats().host_nbytes <= 16384 + 8192


@pytest.mark.parametrize("layout", ["leaf", "block"])
def test_tensors_begin_at_multiples_of_256(manage: Manage, layout: str) -> None:
    """features A15; field case C02"""
    held = nn.Module()
    for index, count in enumerate((3, 5, 1000)):
        held.register_buffer(f"b{index}", torch.zeros(count, dtype=torch.uint8))
    held.weight = nn.Parameter(torch.zeros(6, 8).to(torch.float8_e4m3fn).t(), requires_grad=False)
    offsets: list[int] = []

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = held
            self.own = nn.Parameter(torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.held.weight.stride() == (1, 8)
            for each in (*self.parameters(), *self.buffers()):
                offsets.append(each.storage_offset() * each.itemsize % 256)
            return x

    model = nn.Sequential(Looks())
    manage(model, tier="cpu", trainable="cpu", granularity=layout)
    model(input_of(0))
    assert offsets == [0] * 5


def cached_nbytes(path: Path) -> int:
    """Of a file, in the page cache."""
    libc = ctypes.CDLL("libc.so.6", use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    size = path.stat().st_size
    pages = (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
    with path.open("rb") as file:
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    assert libc.mincore(address, size, pages) == 0
    libc.munmap(address, size)
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def test_reading_fills_no_page_cache(tmp_path: Path) -> None:
    """Also where the weights are looked at in between. section 4: 17"""
    if not probe_folder(tmp_path).direct:
        pytest.skip("this filesystem knows no direct I/O")
    model = large_stack(16, 512)
    with OffloadManager(model, "cpu", path=tmp_path):
        for _ in range(3):
            model(torch.ones(1, 512))
        files = sorted(tmp_path.rglob("*.swp"))
        assert sum(file.stat().st_size for file in files) >= 16 << 20
        assert sum(cached_nbytes(file) for file in files) <= 1 << 20


def test_reading_names_and_shapes_does_no_io(manage: Manage, engines: list[Engine]) -> None:
    """features C3, section 4: 20"""
    model = large_stack(8, 64)
    model.hidden_size = 64
    manage(model)
    before = engines[-1].stats()
    for name, each in model.named_parameters():
        assert each.shape == (64, 64) and each.dtype is torch.float32 and name
        assert each.numel() == 4096 and each.device.type == "cpu"
    assert model.hidden_size == 64 and repr(model)
    assert engines[-1].stats() == before


@tiers
def test_stats_tell_the_model(manage: Manage, tier: str) -> None:
    model, manager = managed(manage, "frozen", tier, "none")
    assert_equal(train(model), train(frozen(Checkpointed("none"))))
    stats = manager.stats()
    assert stats.unit_count == len(manager.units) == LAYERS
    assert stats.in_nbytes >= sum(unit.nbytes for unit in manager.units)
    assert stats.resident_nbytes == 0 < stats.peak_resident_nbytes
    assert stats.stall_s >= 0 and stats.late_count <= stats.bring_count
