"""What only a GPU can show of TensorSwapper: the order of copies and kernels, memory that is freed
and taken again, and that nobody waits for the whole device. Skipped where there is none."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from nvmeswap import TensorSwapper
from nvmeswap.config import AioConfig
from nvmeswap.errors import SwapChecksumError, SwapManifestError, SwapUsageError
from nvmeswap.memory.slot import SlotClass
from nvmeswap.swap import staging
from tests.swap.test_many_tensors_come_back import MAKERS
from tests.swap.test_tensors_come_back import DTYPES, random_tensor, same_bits

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: streams are its own"
)
SPIN_CYCLES = 100_000_000  # about 60 ms: longer than any copy here
MIB = 1 << 20
SIZES = [1, 4095, 4096, 4097, 65536, 8 * MIB - 1, 8 * MIB, 8 * MIB + 1, 20 * MIB + 12_345]

Open = Callable[..., TensorSwapper]


@pytest.fixture(params=[False, True], ids=["host slots", "gds"])
def use_gds(request: pytest.FixtureRequest) -> bool:
    """Where it can't be had there is a warning, and all must be as without."""
    return bool(request.param)


@pytest.fixture
def open_swapper(tmp_path: Path, use_gds: bool) -> Iterator[Open]:
    opened: list[TensorSwapper] = []

    def make() -> TensorSwapper:
        opened.append(TensorSwapper(tmp_path, aio=AioConfig(use_gds=use_gds)))
        return opened[-1]

    yield make
    for swapper in opened:
        swapper.close()


@pytest.fixture(params=[None, (65536, 1)], ids=["usual slots", "one small slot"])
def any_slots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(staging, "SLOTS", SlotClass(*request.param))


def on_gpu(nbytes: int, seed: int = 0) -> torch.Tensor:
    return random_tensor((nbytes,), torch.uint8, seed).cuda()


@pytest.mark.usefixtures("any_slots")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_of_any_dtype_and_shape_comes_back(
    open_swapper: Open, dtype: torch.dtype
) -> None:
    swapper = open_swapper()
    shapes = [(), (0,), (1,), (7,), (3, 0, 2), (511,), (37, 41), (4097,), (512, 513)]
    tensors = {str(shape): random_tensor(shape, dtype).cuda() for shape in shapes}
    swapper.swap_out_many(tensors)
    assert swapper.stats().write_nbytes == sum(tensor.nbytes for tensor in tensors.values())
    back = swapper.swap_in_many(tensors)
    for key, tensor in tensors.items():
        assert back[key].device == tensor.device and same_bits(back[key], tensor), key
    swapper.swap_out("again", tensors["(512, 513)"])
    assert same_bits(swapper.swap_in("again"), tensors["(512, 513)"])


@pytest.mark.usefixtures("any_slots")
def test_tensors_of_any_size_come_back_each_way(open_swapper: Open) -> None:
    """Written at once or not waited for, read at once, not waited for, prefetched, to the CPU."""
    swapper = open_swapper()
    tensors = {str(nbytes): on_gpu(nbytes, nbytes % 97) for nbytes in SIZES}
    for is_async in (False, True, False):
        if is_async:
            for future in [swapper.swap_out_async(*each) for each in tensors.items()]:
                future.wait()
        else:
            swapper.swap_out_many(tensors)
        verified_nbytes = swapper.stats().verified_nbytes
        out = {key: torch.full_like(each, 0xA5) for key, each in tensors.items()}
        host = {key: torch.full(each.shape, 0xA5, dtype=torch.uint8)
                for key, each in tensors.items()}
        ways = [swapper.swap_in_many(tensors), swapper.swap_in_many(tensors, out=out),
                swapper.swap_in_many(tensors, out=host)]
        ways.append({key: swapper.swap_in_async(key).wait() for key in tensors})
        swapper.prefetch(tensors)
        ways.append({key: swapper.swap_in(key) for key in tensors})
        for way in ways:
            assert all(torch.equal(way[key].cpu(), tensors[key].cpu()) for key in tensors)
        assert swapper.stats().verified_nbytes - verified_nbytes == 5 * sum(SIZES)


@pytest.mark.usefixtures("any_slots")
def test_strides_come_back_and_any_stride_is_filled(open_swapper: Open) -> None:
    swapper = open_swapper()
    tensors = {kind: make(3).cuda() for kind, make in MAKERS.items() if kind != "parameter"}
    tensors |= {
        "wide": torch.randn(300, 1000, device="cuda").t(),
        "sliced": torch.randn(1000, 1000, device="cuda")[::2, 1:701],
        "expanded": torch.randn(300, 1, device="cuda").expand(300, 500),
        "conjugate in slots": torch.randn(300, 700, dtype=torch.complex64, device="cuda").conj(),
    }
    swapper.swap_out_many(tensors)
    back = swapper.swap_in_many(tensors)
    assert all(torch.equal(back[key], tensors[key]) for key in tensors)
    assert back["channels last"].stride() == tensors["channels last"].stride()
    assert back["wide"].stride() == tensors["wide"].stride()
    out = {
        "wide": torch.zeros(1000, 300, device="cuda"),
        "sliced": torch.zeros(500, 1400, device="cuda")[:, ::2],
    }
    swapper.swap_in_many(out, out=out)
    assert all(torch.equal(out[key], tensors[key]) for key in out)
    parameter = torch.nn.Parameter(torch.zeros(500, 700, device="cuda"))
    assert swapper.swap_in("sliced", out=parameter) is parameter
    assert torch.equal(parameter, tensors["sliced"])


def test_kernels_before_and_after_see_the_right_values(open_swapper: Open) -> None:
    """A slow kernel is under way at swap_out; the source is overwritten right after it, and what
    comes back is used at once."""
    swapper = open_swapper()
    for nbytes in (100_000, 20 * MIB + 1):
        tensor, wanted = on_gpu(nbytes), on_gpu(nbytes, 1)
        for step in range(3):
            torch.cuda.synchronize()
            torch.cuda._sleep(SPIN_CYCLES)
            tensor.copy_(wanted).add_(step)
            swapper.swap_out("t", tensor)
            tensor.fill_(0xA5)
            out = torch.empty_like(tensor).fill_(0x5A)
            torch.cuda._sleep(SPIN_CYCLES)  # `out` is still in use when it is read into
            out.fill_(0x77)
            back = swapper.swap_in("t", out=out) + 1
            fresh = swapper.swap_in("t") + 1
            assert torch.equal(back, wanted + (step + 1))
            assert torch.equal(fresh, wanted + (step + 1))


def test_memory_that_is_freed_at_once_is_nobody_elses_too_early(open_swapper: Open) -> None:
    """The allocator gives it to the next tensor while copies are on their way."""
    swapper = open_swapper()
    wanted = {str(n): on_gpu(8 * MIB + n, n) for n in range(6)}
    for step in range(8):
        for key, tensor in wanted.items():
            torch.cuda._sleep(SPIN_CYCLES // 50)
            source = tensor.clone()
            swapper.swap_out(key, source)
            del source
            torch.full((8 * MIB + step,), 0xA5, dtype=torch.uint8, device="cuda")
        kept = []
        for key in wanted:
            torch.cuda._sleep(SPIN_CYCLES // 50)
            swapper.swap_in(key)  # dropped
            kept.append(torch.full((8 * MIB + 3,), step, dtype=torch.uint8, device="cuda"))
        assert all(bool((each == step).all()) for each in kept)
    assert all(torch.equal(swapper.swap_in(key), wanted[key]) for key in wanted)


@pytest.mark.usefixtures("any_slots")
def test_calls_on_several_streams_keep_their_order(open_swapper: Open) -> None:
    swapper = open_swapper()
    streams = [torch.cuda.Stream() for _ in range(3)] + [torch.cuda.current_stream()]
    wanted = {str(n): on_gpu(MIB // 2 + n, n) for n in range(8)}
    torch.cuda.synchronize()
    for step in range(6):
        results: dict[str, torch.Tensor] = {}
        for number, (key, tensor) in enumerate(wanted.items()):
            with torch.cuda.stream(streams[(number + step) % len(streams)]):
                torch.cuda._sleep(SPIN_CYCLES // 20)
                swapper.swap_out(key, tensor + step)
            with torch.cuda.stream(streams[number % len(streams)]):
                torch.cuda._sleep(SPIN_CYCLES // 20)
                results[key] = swapper.swap_in(key) - step
        torch.cuda.synchronize()
        assert all(torch.equal(results[key], wanted[key]) for key in wanted)


def test_nobody_waits_for_the_device(open_swapper: Open, use_gds: bool) -> None:
    """A kernel on another stream goes on all the time. Torch sees no call that would wait for a
    stream; sums of device memory do, for one of their own."""
    swapper = open_swapper()
    tensors = {str(n): on_gpu(n) for n in (5, 4096, 70_000, 20 * MIB)}
    strided = torch.randn(1000, 1000, device="cuda")[:, ::2]
    swapper.swap_out_many(tensors)  # takes the slots
    swapper.swap_in_many(tensors)
    swapper.swap_out("strided", strided)
    swapper.swap_in("strided", out=torch.empty_like(strided))
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        torch.cuda._sleep(100 * SPIN_CYCLES)
        over = other.record_event()
    torch.cuda.set_sync_debug_mode("default" if use_gds else "error")
    try:
        swapper.swap_out_many(tensors)
        swapper.swap_out("strided", strided)
        back = swapper.swap_in_many(tensors)
        back_strided = swapper.swap_in("strided", out=torch.empty_like(strided))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not over.query(), "the device was waited for"
    torch.cuda.synchronize()
    assert all(torch.equal(back[key], tensors[key]) for key in tensors)
    assert torch.equal(back_strided, strided)


def test_thousands_of_tensors_are_rewritten_in_place(open_swapper: Open) -> None:
    swapper = open_swapper()
    allocated = set()
    for step in range(3):
        tensors = {str(n): on_gpu(4096 + n % 3, step + n) for n in range(3000)}
        swapper.swap_out_many(tensors)
        tied = {"tied": tensors["7"], "7": tensors["7"]}
        swapper.swap_out_many(tied)
        back = swapper.swap_in_many(tensors | tied)
        assert all(torch.equal(back[key], (tensors | tied)[key]) for key in back)
        allocated.add(swapper.stats().allocated_nbytes)
    assert len(allocated) == 1


def test_what_was_changed_on_disk_is_named_and_the_others_are_good(
    open_swapper: Open, tmp_path: Path
) -> None:
    swapper = open_swapper()
    tensors = {"first": on_gpu(4096), "large": on_gpu(20 * MIB), "last": on_gpu(4096, 2)}
    swapper.swap_out_many(tensors)
    (path,) = tmp_path.rglob("*.swp")
    with path.open("r+b") as file:
        file.seek(4096 + 9 * MIB)
        file.write(b"vandal")
    out = {key: torch.empty_like(each) for key, each in tensors.items()}
    with pytest.raises(SwapChecksumError, match="large"):
        swapper.swap_in_many(tensors, out=out)
    assert all(torch.equal(out[key], tensors[key]) for key in ("first", "last"))


def test_wrong_calls_get_typed_errors(open_swapper: Open) -> None:
    swapper = open_swapper()
    tensor = on_gpu(70_000)
    swapper.swap_out("t", tensor)
    with pytest.raises(SwapManifestError):
        swapper.swap_in("t", out=torch.empty(70_000, device="cuda"))
    with pytest.raises(SwapUsageError):
        swapper.swap_in("u")
    tensor.untyped_storage().resize_(0)
    with pytest.raises(SwapUsageError):
        swapper.swap_out("v", tensor)
    with pytest.raises(SwapUsageError):
        swapper.swap_in("t", out=tensor)
    assert torch.equal(swapper.swap_in("t"), on_gpu(70_000))


def test_tensors_of_both_devices_go_in_one_call(open_swapper: Open) -> None:
    swapper = open_swapper()
    tensors = {str(n): on_gpu(9000, n) if n % 2 else on_gpu(9000, n).cpu() for n in range(40)}
    swapper.swap_out_many(tensors)
    back = swapper.swap_in_many(tensors)
    for key, tensor in tensors.items():
        assert back[key].device == tensor.device and torch.equal(back[key], tensor)


def test_memory_taken_for_slots_is_all_that_is_taken(open_swapper: Open) -> None:
    swapper = open_swapper()
    tensor = on_gpu(64 * MIB)
    swapper.swap_out("t", tensor)
    swapper.swap_in("t", out=tensor)
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    swapper.swap_out("t", tensor)
    swapper.swap_in("t", out=tensor)
    assert torch.cuda.max_memory_allocated() == before
