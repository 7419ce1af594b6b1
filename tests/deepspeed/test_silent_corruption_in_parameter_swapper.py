"""Where DeepSpeed's parameter swapper trains on wrong bytes, or aborts, ours has the right ones or
raises a typed error, and goes on once the cause is gone."""

from __future__ import annotations

import errno
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from nvmeswap.deepspeed.files import Engines
from nvmeswap.errors import (
    SwapChecksumError,
    SwapError,
    SwapReadError,
    SwapSpaceError,
    SwapWriteError,
)
from nvmeswap.io import Engine
from tests.deepspeed.partitions import MIB, DrivenSwapper, Status

ODD_NUMELS = (262_145, 300_001, 524_289, 262_144 + 250, 1_048_577)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Engine]]:
    """The engines that swappers open, each of which fails when it is told to."""
    made: list[Engine] = []

    def open_engine(**options: object) -> Engine:
        made.append(Engine(fault_script="", **options))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr("nvmeswap.deepspeed.files.Engine", open_engine)
    monkeypatch.setattr("nvmeswap.deepspeed.space.engines", Engines())
    yield made
    for engine in made:
        engine.inject("")


def fill(folder: Path, free_nbytes: int) -> Path:
    """Leave so much space on the filesystem."""
    hog = folder / "hog"
    usage = os.statvfs(folder)
    hog.touch()
    nbytes = usage.f_bfree * usage.f_frsize - free_nbytes
    with hog.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
    return hog


def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        time.sleep(0.001)


def drive_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.swp"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 16])
def test_partitions_of_odd_length_come_back(
    tmp_path: Path, dtype: torch.dtype, threads: int
) -> None:
    """DeepSpeed drops the last part of a sector, or all where threads share less than one each.

    field case A01"""
    driven = DrivenSwapper(tmp_path, dtype=dtype, intra_op_parallelism=threads)
    parameters = [driven.partition(ds_id, numel) for ds_id, numel in enumerate(ODD_NUMELS)]
    for _ in range(2):
        driven.forget_copies()
        for parameter in parameters:
            driven.gather([parameter])
            assert parameter.is_right
            driven.release([parameter])
            assert parameter.ds_tensor.data.dim() == 0
        driven.update(parameters)
    driven.swapper.close()


@pytest.mark.parametrize("begin", [0, 1, 7])
def test_callers_memory_is_filled_to_its_last_element_and_no_further(
    tmp_path: Path, begin: int
) -> None:
    """Where DeepSpeed reads the padding too, or at an odd address nothing.  field case A02"""
    driven = DrivenSwapper(tmp_path)
    parameter = driven.partition(0, 262_147)
    driven.forget_copies()
    guarded = torch.full((262_147 + 2 * begin + 24,), -7.0)
    driven.swapper.swap_into_buffer(parameter, guarded[begin : begin + 262_147])
    assert torch.equal(guarded[begin : begin + 262_147], parameter.expected)
    assert (guarded[:begin] == -7).all() and (guarded[begin + 262_147 :] == -7).all()
    assert parameter.ds_tensor.status is Status.NOT_AVAILABLE
    driven.swapper.close()


def test_full_disk_while_parameters_are_made(small_filesystem: Path) -> None:
    """DeepSpeed goes on, and reads back what the disk had room for.  field case K01"""
    driven = DrivenSwapper(small_filesystem)
    first = driven.partition(0, 300_001)
    hog = fill(small_filesystem, MIB // 2)
    with pytest.raises(SwapSpaceError) as raised:
        driven.partition(1, 500_000)
    error = raised.value
    assert error.path is not None and small_filesystem in Path(error.path).parents
    assert error.wanted_nbytes is not None and error.wanted_nbytes >= 2_000_000
    assert error.got_nbytes is not None and error.got_nbytes <= MIB
    assert error.fix
    hog.unlink()
    second = driven.partition(2, 500_000)
    driven.forget_copies()
    driven.gather([first, second])
    assert first.is_right and second.is_right
    driven.swapper.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("number", [1, 2])
def test_failed_write_after_a_step_loses_nothing(
    tmp_path: Path, faulty: list[Engine], code: int, number: int
) -> None:
    """DeepSpeed reports success, and the next forward has the weights of the step before. Here the
    next call says it, and the partition goes to the drive once the drive takes it.

    field case K01"""
    driven = DrivenSwapper(tmp_path)
    parameters = [driven.partition(ds_id, 262_145 + ds_id) for ds_id in range(3)]
    driven.swapper.synchronize_writes()
    faulty[-1].inject(f"write {number} errno {code}")
    driven.update(parameters)
    with pytest.raises(SwapWriteError) as raised:
        driven.swapper.synchronize_writes()
    assert raised.value.errno == code
    assert raised.value.path is not None and raised.value.fix
    faulty[-1].inject("")
    for _ in range(2):
        for parameter in parameters:
            driven.gather([parameter])
            assert parameter.is_right
            driven.release([parameter])
        driven.forget_copies()
    driven.swapper.close()


def test_failed_read_is_raised_by_who_needs_it_and_can_be_repeated(
    tmp_path: Path, faulty: list[Engine]
) -> None:
    """DeepSpeed hands the buffer out as it was."""
    driven = DrivenSwapper(tmp_path)
    parameters = [driven.partition(ds_id, 262_145) for ds_id in range(2)]
    driven.forget_copies()
    faulty[-1].inject("read 1 errno 5")
    with pytest.raises(SwapReadError) as raised:
        driven.gather(parameters)
    assert raised.value.errno == errno.EIO
    assert raised.value.path is not None and raised.value.offset_bytes is not None
    driven.gather([each for each in parameters if each.ds_tensor.status is not Status.AVAILABLE])
    assert all(parameter.is_right for parameter in parameters)
    driven.swapper.close()


def test_failed_read_ahead_is_no_error_of_another_parameter(
    tmp_path: Path, faulty: list[Engine]
) -> None:
    """It is raised when its own parameter is needed, or not at all if that read succeeds."""
    driven = DrivenSwapper(tmp_path)
    ahead, demanded = [driven.partition(ds_id, 262_145) for ds_id in range(2)]
    driven.forget_copies()
    faulty[-1].inject("read 1 errno 5")
    driven.swapper.swap_in([ahead])
    until(lambda: faulty[-1].stats().error_count > 0)
    driven.gather([demanded])
    assert demanded.is_right
    try:
        driven.gather([ahead])
    except SwapReadError:
        driven.gather([ahead])
    assert ahead.is_right
    driven.swapper.close()


def test_demand_waits_for_its_own_read_only(tmp_path: Path, faulty: list[Engine]) -> None:
    """DeepSpeed waits for all that was read ahead."""
    driven = DrivenSwapper(tmp_path)
    ahead, demanded = [driven.partition(ds_id, 262_145) for ds_id in range(2)]
    driven.forget_copies()
    faulty[-1].inject("read 1 never")
    before = faulty[-1].stats().block_count
    driven.swapper.swap_in([ahead])
    assert ahead.ds_tensor.status is Status.INFLIGHT
    until(lambda: faulty[-1].stats().block_count > before)  # the second one of two
    driven.gather([demanded])
    assert demanded.is_right and ahead.ds_tensor.status is Status.INFLIGHT
    faulty[-1].inject("")
    driven.gather([ahead])
    assert ahead.is_right
    driven.swapper.close()


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_damaged_file_is_an_error_with_its_place(tmp_path: Path, damage: str) -> None:
    """DeepSpeed trains on the flipped bit, and aborts the process at the short file."""
    driven = DrivenSwapper(tmp_path)
    parameter = driven.partition(0, 300_001)
    driven.forget_copies()
    (path,) = drive_files(tmp_path)
    before = path.read_bytes()
    if damage == "flip":
        with path.open("r+b") as file:
            file.seek(777_777)
            file.write(bytes([before[777_777] ^ 1]))
    else:
        os.truncate(path, 777_777)
    with pytest.raises(SwapChecksumError if damage == "flip" else SwapReadError) as raised:
        driven.gather([parameter])
    assert raised.value.path == path and raised.value.offset_bytes is not None
    assert parameter.ds_tensor.status is Status.NOT_AVAILABLE
    path.write_bytes(before)
    driven.gather([parameter])
    assert parameter.is_right
    driven.swapper.close()


def test_flipped_bit_on_the_way_is_an_error(tmp_path: Path, faulty: list[Engine]) -> None:
    driven = DrivenSwapper(tmp_path)
    parameter = driven.partition(0, 300_001)
    driven.forget_copies()
    faulty[-1].inject("read 1 flip")
    with pytest.raises(SwapChecksumError):
        driven.gather([parameter])
    driven.gather([parameter])
    assert parameter.is_right
    driven.swapper.close()


@pytest.mark.parametrize("seed", range(6))
def test_whatever_fails_it_is_right_or_raised(
    tmp_path: Path, faulty: list[Engine], seed: int
) -> None:
    """Three steps with two prefetches a forward, while one block in five meets a fault."""
    driven = DrivenSwapper(tmp_path, buffer_count=3, buffer_size=263_000)
    parameters = [driven.partition(ds_id, 262_145 + ds_id) for ds_id in range(5)]
    driven.swapper.synchronize_writes()
    faulty[-1].inject(f"seed {seed} rate 20 errno,short,refuse,late,delay")
    for step in range(3):
        patiently(lambda: one_forward(driven, parameters))
        for parameter in parameters:
            parameter.expected = parameter.expected + step
        patiently(lambda: driven.write_back(parameters))
    faulty[-1].inject("")
    patiently(driven.swapper.synchronize_writes)
    driven.forget_copies()
    one_forward(driven, parameters)
    driven.swapper.close()


def one_forward(driven: DrivenSwapper, parameters: list) -> None:
    for place, parameter in enumerate(parameters):
        ahead = [each for each in parameters[place + 1 : place + 3]
                 if each.ds_tensor.status is Status.NOT_AVAILABLE]
        driven.swapper.swap_in(ahead[: driven.swapper.available_swap_in_buffers()])
        driven.gather([parameter])
        assert parameter.is_right
        driven.release([parameter])


def patiently(call: Callable[[], None]) -> None:
    """Until it succeeds, as a script would that catches typed errors."""
    for _ in range(50):
        try:
            return call()
        except SwapError:
            pass
    raise AssertionError("it fails again and again")


def test_budget_used_up_is_no_error(tmp_path: Path) -> None:
    """DeepSpeed asserts that there are as many buffers as parameters of a module. Here one buffer
    is enough for what comes one by one, and for more a warning.  field cases P01, P03"""
    driven = DrivenSwapper(tmp_path, buffer_count=1, buffer_size=300_000)
    small = [driven.partition(ds_id, 262_145) for ds_id in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for parameter in small:
            driven.gather([parameter])
            driven.swapper.swap_in([each for each in small
                                    if each.ds_tensor.status is Status.NOT_AVAILABLE])
            assert parameter.is_right
            driven.release([parameter])
    with pytest.warns(ResourceWarning, match="buffer_count"):
        large = driven.partition(3, 1_000_001)
        driven.gather([*small, large])
    assert all(parameter.is_right for parameter in (*small, large))
    driven.swapper.close()


def test_blocks_of_8_mib_keep_the_threshold_at_1(tmp_path: Path) -> None:
    """In DeepSpeed all that is below block_size stays in memory then."""
    driven = DrivenSwapper(tmp_path, block_size=8 * MIB)
    assert driven.swapper.swappable_tensor(numel=262_144)
    assert not driven.swapper.swappable_tensor(numel=262_143)
    parameter = driven.partition(0, 262_144)
    driven.forget_copies()
    driven.gather([parameter])
    assert parameter.is_right
    driven.swapper.close()


def test_what_deepspeed_sees_does_not_depend_on_how_long_writes_take(
    tmp_path: Path, faulty: list[Engine]
) -> None:
    """Its coordinator derives collectives from it: ranks that differ would hang, or mix weights."""
    seen = []
    for script in ("", "write * delay 30", "read * delay 5"):
        driven = DrivenSwapper(tmp_path, buffer_count=5, buffer_size=263_000)
        faulty[-1].inject(script)
        parameters = [driven.partition(ds_id, 262_145) for ds_id in range(8)]
        statuses = []
        for _ in range(2):
            for number, parameter in enumerate(parameters):
                driven.gather([parameter])
                ahead = [p for p in parameters[number + 1 : number + 5]
                         if p.ds_tensor.status is Status.NOT_AVAILABLE]
                free = driven.swapper.available_swap_in_buffers()
                driven.swapper.swap_in(ahead[:free], async_op=True)
                statuses.append((free, [
                    p.ds_tensor.status is Status.NOT_AVAILABLE for p in parameters]))
                driven.release([parameter])
            driven.update(parameters)
        seen.append(statuses)
        faulty[-1].inject("")
        driven.swapper.close()
    assert seen[0] == seen[1] == seen[2]
    assert any(free > 0 for free, _ in seen[0])


def test_write_that_fails_while_its_values_are_asked_for_keeps_them(
    tmp_path: Path, faulty: list[Engine]
) -> None:
    """Read ahead from the memory that is being written, which is the only copy by then."""
    driven = DrivenSwapper(tmp_path)
    parameter = driven.partition(0, 300_001)
    driven.forget_copies()
    faulty[-1].inject("write 1 errno 5; write 2 delay 300")
    driven.update([parameter])
    driven.swapper.swap_in([parameter], async_op=True)
    assert parameter.ds_tensor.status is Status.INFLIGHT
    with pytest.raises(SwapWriteError):
        driven.gather([parameter])
    faulty[-1].inject("")
    driven.gather([parameter])
    assert parameter.is_right
    driven.release([parameter])  # and is written now
    driven.forget_copies()
    driven.gather([parameter])
    assert parameter.is_right
    driven.swapper.close()
