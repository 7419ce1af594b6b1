"""Bytes that come back are those that went out, in the order of the calls, or there is an error."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvmeswap.errors import (
    SwapChecksumError,
    SwapClosedError,
    SwapReadError,
    SwapUsageError,
    SwapWriteError,
)
from nvmeswap.io.engine import Lane
from nvmeswap.store.manifest import Manifest, TensorSpec
from nvmeswap.store.store import Checksum, Store

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.bool, torch.complex64,
          torch.float8_e4m3fn]
NUMELS = [0, 1, 3, 511, 512, 513, 1023, 2049, 70_001]


def flat(numel: int, dtype: torch.dtype = torch.uint8) -> TensorSpec:
    return TensorSpec(dtype, (numel,), (1,))


def values(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def put(store: Store, key: str, memory: torch.Tensor, first_byte: int = 0) -> None:
    store.write(key, memory, lane=Lane.WRITEBACK, first_byte=first_byte).wait()


def get(store: Store, key: str, nbytes: int, first_byte: int = 0) -> torch.Tensor:
    memory = torch.full((nbytes,), 0xA5, dtype=torch.uint8)
    store.read(key, memory, lane=Lane.DEMAND, first_byte=first_byte).wait()
    return memory


@pytest.fixture(params=["disk", "memory"])
def nvme_path(request: pytest.FixtureRequest, tmp_path: Path,
              mount_tmpfs: Callable[[str], Path]) -> Path:
    return tmp_path if request.param == "disk" else mount_tmpfs("tmpfs -o size=64m")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_any_dtype_and_length_come_back_within_their_bounds(
    workshop: Any, guarded: Any, nvme_path: Path, dtype: torch.dtype
) -> None:
    """An odd length that is rounded up overwrites the neighbour, on the disk or in memory."""
    # field case A01
    store = workshop.store(nvme_path)
    specs = {str(numel): flat(numel, dtype) for numel in NUMELS}
    store.create_file("params.swp", specs)
    sources = {key: values(spec.nbytes, seed=int(key)) for key, spec in specs.items()}
    for request in [store.write(key, source, lane=Lane.WRITEBACK)
                    for key, source in sources.items()]:
        request.wait()
    for key, source in sources.items():
        target = guarded(source.numel())
        store.read(key, target.memory, lane=Lane.DEMAND).wait()
        assert torch.equal(target.memory, source)
        assert target.intact()


def test_typed_memory_goes_out_and_comes_back_as_it_is(workshop: Any, tmp_path: Path) -> None:
    """A cast on the way, or a NaN made canonical, changes weights silently."""
    store = workshop.store(tmp_path)
    source = values(2 * 3000).view(torch.bfloat16).view(30, 100)  # NaNs included
    store.create_file("params.swp", {"weight": TensorSpec(torch.bfloat16, (30, 100), (100, 1))})
    put(store, "weight", source)
    target = torch.empty_like(source)
    store.read("weight", target, lane=Lane.DEMAND).wait()
    assert torch.equal(target.view(torch.uint8), source.view(torch.uint8))


@settings(max_examples=25, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(1, 4), st.booleans()),
                max_size=20))
def test_store_whatever_is_called_without_waiting_equals_memory(
    workshop: Any, tmp_path_factory: pytest.TempPathFactory,
    calls: list[tuple[int, int, int, bool]],
) -> None:
    """A read that overtakes the write before it returns last step's weights."""
    # field case D: right the newest bytes, wrong those of the step before
    store = workshop.store(tmp_path_factory.mktemp("store"))
    nbytes = 10 * 4096 + 77
    store.create_file("params.swp", {str(key): flat(nbytes) for key in range(3)})
    expected = {key: values(nbytes, seed=key) for key in range(3)}
    requests = [store.write(str(key), each.clone(), lane=Lane.WRITEBACK)
                for key, each in expected.items()]
    reads = []
    for seed, (key, page, pages, writes) in enumerate(calls):
        first, end = page * 4096, min((page + pages) * 4096, nbytes)
        if writes:
            source = values(end - first, seed=seed + 100)
            expected[key][first:end] = source
            requests.append(store.write(str(key), source, lane=Lane.WRITEBACK, first_byte=first))
        else:
            target = torch.full((end - first,), 0xA5, dtype=torch.uint8)
            request = store.read(str(key), target, lane=Lane.PREFETCH, first_byte=first)
            reads.append((request, target, expected[key][first:end].clone()))
    for request, target, wanted in reads:
        request.wait()
        assert torch.equal(target, wanted)
    for request in requests:
        request.wait()
    for key, each in expected.items():
        assert torch.equal(get(store, str(key), nbytes), each)
    store.close()


def test_read_right_after_a_slow_write_returns_the_new_bytes(workshop: Any, tmp_path: Path) -> None:
    """The layer swapped out a moment ago is needed again: the old bytes are still on the disk."""
    store = workshop.store(tmp_path, fault_script="write 2 delay 100")
    store.create_file("params.swp", {"weight": flat(8192)})
    put(store, "weight", values(8192, seed=1))
    newest = values(8192, seed=2)
    write = store.write("weight", newest, lane=Lane.WRITEBACK)
    assert torch.equal(get(store, "weight", 8192), newest)
    write.wait()


def test_read_of_what_was_never_written_is_refused(workshop: Any, tmp_path: Path) -> None:
    """An extent's zeros, or the last user's values, would pass for weights."""
    store = workshop.store(tmp_path)
    store.create_file("params.swp", {"weight": flat(8192 + 10)})
    with pytest.raises(SwapUsageError):
        get(store, "weight", 8192)
    put(store, "weight", values(4096), first_byte=4096)
    with pytest.raises(SwapUsageError):
        get(store, "weight", 4097 + 4096)
    assert torch.equal(get(store, "weight", 4096, first_byte=4096), values(4096))


def test_unknown_key_names_the_nearest(workshop: Any, tmp_path: Path) -> None:
    """A misspelled layer among thousands takes an hour to find."""
    store = workshop.store(tmp_path)
    store.create_file("params.swp", {"layer.0.weight": flat(8), "layer.1.bias": flat(8)})
    with pytest.raises(SwapUsageError) as caught:
        store.spec("layer.0.wieght")
    assert "layer.0.weight" in (caught.value.fix or "")
    assert store.spec("layer.0.weight") == flat(8)
    assert store.path("layer.1.bias") == store.folder / "params.swp"


# --- checksums ------------------------------------------------------------------------------------


def test_read_when_a_bit_flips_names_key_place_and_both_sums(workshop: Any, tmp_path: Path) -> None:
    """A failing drive's wrong bit becomes a wrong model, unnoticed."""
    store = workshop.store(tmp_path, fault_script="read 1 flip")
    store.create_file("params.swp", {"first": flat(4096), "weight": flat(5000)})
    source = values(5000)
    put(store, "weight", source)
    with pytest.raises(SwapChecksumError) as caught:
        get(store, "weight", 5000)
    assert caught.value.path == store.folder / "params.swp"
    assert caught.value.offset_bytes == 4096
    assert "weight" in caught.value.what and "expected" in (caught.value.cause or "")
    assert torch.equal(get(store, "weight", 5000), source)
    assert store.stats().verified_nbytes == 5000


def test_read_when_somebody_changed_the_file_is_an_error(workshop: Any, tmp_path: Path) -> None:
    """Another program writes into the swap file."""
    store = workshop.store(tmp_path)
    store.create_file("params.swp", {"weight": flat(8192)})
    put(store, "weight", values(4096, seed=1))
    put(store, "weight", values(4096, seed=2), first_byte=4096)
    with store.path("weight").open("r+b") as file:
        file.seek(4096)
        file.write(b"vandal")
    assert torch.equal(get(store, "weight", 4096), values(4096, seed=1))
    with pytest.raises(SwapChecksumError) as caught:
        get(store, "weight", 8192)
    assert caught.value.offset_bytes == 4096


def test_store_when_checksums_are_off_verifies_nothing(workshop: Any, tmp_path: Path) -> None:
    """The switch must switch: sums cost CPU time."""
    store = workshop.store(tmp_path, checksum=Checksum.OFF, fault_script="read 1 flip")
    store.create_file("params.swp", {"weight": flat(4096)})
    put(store, "weight", values(4096))
    assert not torch.equal(get(store, "weight", 4096), values(4096))
    assert store.stats().verified_nbytes == 0


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("waits", [True, False])
def test_write_when_it_fails_is_reported_and_its_bytes_are_not_readable(
    workshop: Any, tmp_path: Path, waits: bool
) -> None:
    """After a failed write the disk holds half old, half new bytes: a read must not return them."""
    # field case K01: right SwapWriteError and the source intact, wrong a short file found later
    store = workshop.store(tmp_path, fault_script="write 2 errno 28")
    store.create_file("params.swp", {"weight": flat(8192)})
    put(store, "weight", values(8192, seed=1))
    source = values(8192, seed=2)
    request = store.write("weight", source, lane=Lane.WRITEBACK)
    if waits:
        with pytest.raises(SwapWriteError):
            request.wait()
    with pytest.raises(SwapUsageError):
        get(store, "weight", 8192)
    with pytest.raises(SwapWriteError):
        request.wait()
    assert torch.equal(source, values(8192, seed=2))
    put(store, "weight", source)
    assert torch.equal(get(store, "weight", 8192), source)


def test_read_when_it_fails_can_be_repeated(workshop: Any, tmp_path: Path) -> None:
    """One failed read must not make the key unreadable."""
    store = workshop.store(tmp_path, fault_script="read 1 errno 61")
    store.create_file("params.swp", {"weight": flat(4096)})
    put(store, "weight", values(4096))
    with pytest.raises(SwapReadError):
        get(store, "weight", 4096)
    assert torch.equal(get(store, "weight", 4096), values(4096))


@pytest.mark.parametrize(
    ("first_byte", "nbytes"), [(1, 8), (4096, 4097), (0, 100), (0, 8193), (8192, 1)]
)
def test_write_when_it_would_touch_other_bytes_is_our_bug(
    workshop: Any, tmp_path: Path, first_byte: int, nbytes: int
) -> None:
    """A direct write is padded with zeros: midway in a key they would erase what follows."""
    store = workshop.store(tmp_path)
    store.create_file("params.swp", {"weight": flat(8192), "next": flat(8192)})
    with pytest.raises(AssertionError):
        store.write("weight", values(nbytes), lane=Lane.DEMAND, first_byte=first_byte)


# --- one tensor at a time -------------------------------------------------------------------------


def test_tensors_allocated_one_by_one_come_back_and_freed_space_is_used_again(
    workshop: Any, tmp_path: Path
) -> None:
    """The standalone API would grow its file for ever."""
    store = workshop.store(tmp_path)
    sources = [values(1 << 20, seed=index) for index in range(3)]
    for step in range(30):
        for index, source in enumerate(sources):
            store.allocate_many("tensors.swp", {f"{step}.{index}": flat(1 << 20)})
            put(store, f"{step}.{index}", source)
        for index, source in enumerate(sources):
            assert torch.equal(get(store, f"{step}.{index}", 1 << 20), source)
            store.free(f"{step}.{index}")
    assert store.stats().allocated_nbytes <= 65 << 20  # 90 were allocated in all
    with pytest.raises(SwapUsageError):
        store.spec("0.0")


def test_key_when_freed_with_a_write_in_flight_waits_for_it(workshop: Any, tmp_path: Path) -> None:
    """The late write would land in the next tensor's place."""
    store = workshop.store(tmp_path, fault_script="write 1 delay 100")
    store.allocate_many("tensors.swp", {"old": flat(4096)})
    store.write("old", values(4096, seed=1), lane=Lane.WRITEBACK)
    store.free("old")
    store.allocate_many("tensors.swp", {"new": flat(4096)})
    put(store, "new", values(4096, seed=2))
    assert torch.equal(get(store, "new", 4096), values(4096, seed=2))


# --- the end --------------------------------------------------------------------------------------


def test_close_removes_the_folder_and_refuses_later_calls(workshop: Any, tmp_path: Path) -> None:
    """Files that stay fill the drive; calls that pass silently lose data."""
    store = workshop.store(tmp_path)
    store.create_file("params.swp", {"weight": flat(4096)})
    store.write("weight", values(4096), lane=Lane.WRITEBACK)  # nobody waits for it
    store.close()
    store.close()
    assert not store.folder.exists()
    with pytest.raises(SwapClosedError):
        get(store, "weight", 4096)
    with pytest.raises(SwapClosedError):
        store.create_file("more.swp", {})


def test_close_without_removal_leaves_a_manifest_that_matches_the_bytes(
    workshop: Any, tmp_path: Path
) -> None:
    """Files whose manifest is older than they are can't be trusted."""
    store = workshop.store(tmp_path, run="kept", rank=1, world_size=2)
    specs = {"a": flat(5000), "b": TensorSpec(torch.bfloat16, (3, 4), (4, 1))}
    store.create_file("params.swp", specs)
    source = values(5000)
    put(store, "a", source)
    put(store, "a", source)
    store.close(remove=False)
    manifest = Manifest.load(store.folder / "manifest.json")
    manifest.check_header(run="kept", rank=1, world_size=2)
    for key, spec in specs.items():
        manifest.check(key, spec)
    entry = manifest.entries["a"]
    assert entry.generation == 2 and entry.written.whole is not None
    content = (store.folder / entry.file).read_bytes()
    offset_bytes = entry.extent.offset_bytes
    assert content[offset_bytes : offset_bytes + 5000] == bytes(source.tolist())


def test_stats_count_bytes_once(workshop: Any, tmp_path: Path) -> None:
    """Endurance is planned from these figures."""
    store = workshop.store(tmp_path)
    store.create_file("params.swp", {"weight": flat(5000), "empty": flat(0)})
    put(store, "weight", values(5000))
    put(store, "empty", values(0))
    assert get(store, "empty", 0).numel() == 0
    request = store.read("weight", torch.empty(5000, dtype=torch.uint8), lane=Lane.DEMAND)
    for _ in range(2):
        request.wait()
    assert request.done() and request.nbytes == 5000
    stats = store.stats()
    assert (stats.write_nbytes, stats.read_nbytes, stats.verified_nbytes) == (5000, 5000, 5000)
    assert stats.allocated_nbytes == 8192


def test_memory_when_its_requests_are_over_is_not_kept(workshop: Any, tmp_path: Path) -> None:
    """Buffers of finished swap-outs that are never dropped fill the host step by step."""
    # field case B10
    store = workshop.store(tmp_path)
    store.create_file("params.swp", {"weight": flat(1 << 16)})
    kept = []
    for _ in range(3):
        source = values(1 << 16)
        kept.append(weakref.ref(source))
        store.write("weight", source, lane=Lane.WRITEBACK).wait()
    del source
    gc.collect()
    assert [each() for each in kept] == [None] * 3
