"""Memory that is not there is refused with numbers before any is taken; classes fit the shards."""

from __future__ import annotations

import os
import resource
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvmeswap.errors import SwapBudgetError
from nvmeswap.memory import cgroup
from nvmeswap.memory.budget import available_host_memory, preflight, slot_classes
from nvmeswap.memory.pool import Pool, SlotClass

MIB = 1 << 20


InChild = Callable[[Callable[[], Any]], Any]


# --- refusing -------------------------------------------------------------------------------------


def test_preflight_when_over_the_budget_refuses_with_all_numbers() -> None:
    """A model that fits with CPU offload dies with NVMe offload, for buffers nobody counted."""
    # field case B01: 5 buffers of 1e8 bf16 elements are 1.0 GB; 512 MB are there
    with pytest.raises(SwapBudgetError) as caught:
        preflight(wanted_nbytes=1_000_000_000, smallest_nbytes=200_000_000,
                  budget_nbytes=512_000_000, pin_memory=True, what="parameter buffers")
    error = caught.value
    assert error.wanted_nbytes == 1_000_000_000
    assert error.got_nbytes == 512_000_000
    assert error.smallest_nbytes == 200_000_000


def test_preflight_when_pinning_says_that_it_is_not_swappable_and_how_to_stop_it() -> None:
    """Users find their RAM full and their swap space empty, and no switch."""
    # field case B05
    with pytest.raises(SwapBudgetError) as caught:
        preflight(wanted_nbytes=2, smallest_nbytes=2, budget_nbytes=1, pin_memory=True, what="x")
    assert "page-locked" in str(caught.value) and "pin_memory" in str(caught.value)
    with pytest.raises(SwapBudgetError) as caught:
        preflight(wanted_nbytes=2, smallest_nbytes=2, budget_nbytes=1, pin_memory=False, what="x")
    assert "pin_memory" not in str(caught.value)


def test_preflight_when_over_the_machine_names_the_limit() -> None:
    """A single 8 GB pinned allocation wakes the OOM killer: a silent death in the beginning."""
    # field case B02
    room = available_host_memory()
    with pytest.raises(SwapBudgetError) as caught:
        preflight(wanted_nbytes=1 << 50, smallest_nbytes=1, budget_nbytes=None, pin_memory=False,
                  what="parameter buffers")
    assert room.limit in str(caught.value)


def test_preflight_when_it_fits_says_nothing() -> None:
    """A check that cries for nothing is switched off."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        preflight(wanted_nbytes=MIB, smallest_nbytes=MIB, budget_nbytes=2 * MIB, pin_memory=False,
                  what="x")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to drop the right to lock memory")
@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA locks memory whatever `ulimit -l` says")
def test_preflight_when_memory_may_not_be_locked_warns_before(in_child: InChild) -> None:
    """Inside a container with `ulimit -l` of 64 KiB, pinning fails long after the start."""

    def body() -> list[str]:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        os.setgid(65534)
        os.setuid(65534)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            preflight(wanted_nbytes=MIB, smallest_nbytes=1, budget_nbytes=None, pin_memory=True,
                      what="x")
        return [str(each.message) for each in caught]

    (message,) = in_child(body)
    assert "ulimit -l" in message and "pin_memory" in message


# --- what limits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_available_memory_when_a_ulimit_binds_is_its_headroom(
    limit: str, in_child: InChild
) -> None:
    """A job scheduler's `ulimit -v` would show up as a MemoryError in the middle of start."""

    def body() -> tuple[str, int]:
        used = psutil.Process().memory_info()
        used_nbytes = used.vms if limit == "RLIMIT_AS" else used.data
        resource.setrlimit(getattr(resource, limit), (used_nbytes + 64 * MIB, -1))
        room = available_host_memory()
        return room.limit, room.available_nbytes

    name, nbytes = in_child(body)
    assert name == limit
    assert 32 * MIB < nbytes <= 64 * MIB


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A real control group of 256 MiB, below our own, as a container would have."""
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().split())
    version_1 = Path("/sys/fs/cgroup/memory")
    if "memory" not in own or not version_1.is_dir():
        pytest.skip("no version 1 memory controller on this machine")
    group = version_1 / own["memory"].lstrip("/") / f"nvmeswap-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"can't make a control group: {error}")
    (group / "memory.limit_in_bytes").write_text(str(256 * MIB))
    yield group
    group.rmdir()


def test_available_memory_in_a_real_control_group_is_its_headroom(
    limited_group: Path, in_child: InChild
) -> None:
    """In a container the machine's free memory means nothing: past the limit comes kill -9."""

    def body() -> tuple[str, int]:
        (limited_group / "tasks").write_text(str(os.getpid()))
        room = available_host_memory()
        return room.limit, room.available_nbytes

    name, nbytes = in_child(body)
    assert name == "cgroup memory.max"
    assert 0 < nbytes <= 256 * MIB


def write_group(folder: Path, version: int, limit: str, usage: int, inactive: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
             2: ("memory.max", "memory.current", "inactive_file")}[version]
    (folder / names[0]).write_text(limit + "\n")
    (folder / names[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {inactive}\n")


def write_proc(proc: Path, mount: Path, version: int, group: str, root: str = "/") -> None:
    proc.mkdir()
    kind, options = ("cgroup2", "rw") if version == 2 else ("cgroup", "rw,memory")
    (proc / "mountinfo").write_text(
        "22 1 8:1 / / rw - ext4 /dev/vda rw\n"
        f"30 22 0:26 {root} {mount} rw,nosuid - {kind} cgroup {options}\n"
    )
    (proc / "cgroup").write_text(f"0::{group}\n" if version == 2 else f"4:cpu,memory:{group}\n")


@pytest.mark.parametrize("version", [1, 2])
def test_group_headroom_is_that_of_the_tightest_ancestor(tmp_path: Path, version: int) -> None:
    """A limit on the pod kills as surely as one on the container."""
    mount = tmp_path / "sys"
    unlimited = "max" if version == 2 else "9223372036854771712"
    write_group(mount, version, unlimited, 900, 0)
    write_group(mount / "pod", version, "1000", 600, 50)
    write_group(mount / "pod" / "box", version, unlimited, 300, 10)
    write_proc(tmp_path / "proc", mount, version, "/pod/box")
    assert cgroup.headroom_nbytes(tmp_path / "proc") == 1000 - 600 + 50


@pytest.mark.parametrize(
    ("group", "root"), [("/docker/abc", "/docker/abc"), ("/../../elsewhere", "/"), ("/gone", "/")]
)
def test_group_headroom_in_a_container_reads_the_mounted_folder(
    tmp_path: Path, group: str, root: str
) -> None:
    """In a container the group's path does not exist below the mount: its root is the group."""
    mount = tmp_path / "sys"
    write_group(mount, 2, "1000", 400, 0)
    write_proc(tmp_path / "proc", mount, 2, group, root)
    assert cgroup.headroom_nbytes(tmp_path / "proc") == 600


def test_group_headroom_where_nothing_limits_is_none(tmp_path: Path) -> None:
    """A machine without control groups must start."""
    mount = tmp_path / "sys"
    mount.mkdir()
    write_proc(tmp_path / "proc", mount, 2, "/")
    assert cgroup.headroom_nbytes(tmp_path / "proc") is None


# --- classes --------------------------------------------------------------------------------------


def test_classes_when_shards_differ_are_few_and_within_the_budget() -> None:
    """One size for all gives every 1 MB shard an 8 MB buffer."""
    # field case P04: 10 shards of 1 MB and one of 8 MB within 24 MB
    classes = slot_classes([1_000_000] * 10 + [8_000_000], count=5)
    assert classes == [SlotClass(1_003_520, 5), SlotClass(8_003_584, 1)]
    assert Pool.nbytes_needed(classes) <= 24_000_000


def test_classes_when_a_shard_is_padded_hold_the_padded_size() -> None:
    """Buffers sized from unpadded elements against tensors sized from padded ones: an assert."""
    # field case A03: Linear(512, 1000): 513_000 elements of 4 bytes, padded to 513_024
    (only,) = slot_classes([513_000 * 4], count=1)
    assert only.nbytes >= 513_024 * 4 and only.nbytes % 4096 == 0


def test_classes_when_sizes_are_near_share_the_larger() -> None:
    """A class for each of a hundred nearly equal sizes would multiply the memory."""
    assert slot_classes([81_920, 90_112, 102_400], count=2) == [SlotClass(102_400, 2)]
    assert slot_classes([40_960, 102_400, 0], count=2) == [
        SlotClass(40_960, 1), SlotClass(102_400, 1)
    ]
    assert slot_classes([0, 0], count=2) == []


@given(st.lists(st.integers(0, 1 << 24), max_size=50), st.integers(1, 6))
def test_classes_whatever_the_shards_serve_each_without_much_waste(
    sizes: list[int], count: int
) -> None:
    """A shard without a slot can't be swapped; a slot without a shard is wasted memory."""
    classes = slot_classes(sizes, count=count)
    assert classes == sorted(classes, key=lambda each: each.nbytes)
    served = {each.nbytes: 0 for each in classes}
    for nbytes in filter(None, sizes):
        own = min(each.nbytes for each in classes if each.nbytes >= nbytes)
        assert own <= 1.25 * (nbytes + 4095)
        served[own] += 1
    for each in classes:
        assert each.nbytes % 4096 == 0
        assert each.count == min(count, served[each.nbytes])
