"""TensorSwapper: what comes back is what went out, whatever the tensor looks like."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvmeswap import TensorSwapper
from nvmeswap.errors import SwapManifestError, SwapPathError, SwapUsageError

DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8,
    torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
]


@pytest.fixture
def swapper(tmp_path: Path) -> Iterator[TensorSwapper]:
    with TensorSwapper(tmp_path) as made:
        yield made


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    raw = torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    assert left.dtype is right.dtype and left.shape == right.shape
    flat = [t.contiguous().view(-1).view(torch.uint8) if t.numel() else t for t in (left, right)]
    return torch.equal(*flat)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(), (0,), (1,), (7,), (3, 0, 2), (511,), (37, 41), (4097,)], ids=str
)
def test_tensor_of_any_dtype_and_shape_comes_back(
    swapper: TensorSwapper, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Padding stays inside, and a dtype is stored as it is, not as a wider one.
    field cases A01, E01"""
    tensor = random_tensor(shape, dtype)
    swapper.swap_out("t", tensor)
    assert swapper.stats().write_nbytes == tensor.nbytes
    assert same_bits(swapper.swap_in("t"), tensor)


@pytest.mark.parametrize("numel", [1, 3, 511, 512, 513, 262_143, 14_412_000])
def test_bf16_tensor_of_odd_length_comes_back(swapper: TensorSwapper, numel: int) -> None:
    """A partial last block was lost elsewhere.  field case A01"""
    tensor = random_tensor((numel,), torch.bfloat16)
    swapper.swap_out("t", tensor)
    assert same_bits(swapper.swap_in("t"), tensor)


def test_strides_come_back(swapper: TensorSwapper) -> None:
    """channels_last and transposed tensors keep their layout; gaps and overlaps become dense."""
    cases = {
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "transposed": torch.randn(6, 7).t(),
        "sliced": torch.randn(10, 10)[::2, 1:5],
        "expanded": torch.randn(3, 1).expand(3, 5),
        "conjugate": torch.randn(3, 2, dtype=torch.complex64).conj(),
        "misaligned": torch.empty(1 << 20, dtype=torch.uint8)[3:].fill_(9),  # field case A10
    }
    for key, tensor in cases.items():
        swapper.swap_out(key, tensor)
        back = swapper.swap_in(key)
        assert torch.equal(back, tensor), key
        if key in ("channels_last", "transposed"):
            assert back.stride() == tensor.stride(), key


def test_reading_into_a_view_never_touches_its_neighbours(swapper: TensorSwapper) -> None:
    """A padded read wrote past a caller's view elsewhere.  field case A02"""
    tensor = random_tensor((1000,), torch.int8)
    swapper.swap_out("t", tensor)
    buffer = torch.full((1024,), -7, dtype=torch.int8)
    assert swapper.swap_in("t", out=buffer[7:1007]).data_ptr() == buffer[7:].data_ptr()
    assert torch.equal(buffer[7:1007], tensor)
    assert (buffer[:7] == -7).all() and (buffer[1007:] == -7).all()
    strided = torch.full((2000,), -7, dtype=torch.int8)
    swapper.swap_in("t", out=strided[::2])
    assert torch.equal(strided[::2], tensor) and (strided[1::2] == -7).all()


def test_reading_into_another_dtype_or_shape_names_the_field(swapper: TensorSwapper) -> None:
    """Half the bytes in the wrong dtype would be garbage.  field case A04"""
    swapper.swap_out("t", torch.zeros(4096, dtype=torch.float16))
    for out, field in ((torch.zeros(4096), "dtype"), (torch.zeros(64, 64).half(), "shape")):
        with pytest.raises(SwapManifestError) as raised:
            swapper.swap_in("t", out=out)
        assert raised.value.field == field


def test_rewriting_one_tensor_leaves_the_others(swapper: TensorSwapper) -> None:
    """The padding of a rewritten tensor must not reach its neighbours.  field case A09"""
    tensors = {name: random_tensor((5000,), torch.uint8, seed) for seed, name in enumerate("abc")}
    swapper.swap_out_many(tensors)
    for nbytes in (5000, 100, 20_000):
        tensors["b"] = random_tensor((nbytes,), torch.uint8, nbytes)
        swapper.swap_out("b", tensors["b"])
        for name, tensor in tensors.items():
            assert torch.equal(swapper.swap_in(name), tensor), (nbytes, name)


def test_tied_tensors_are_stored_once(swapper: TensorSwapper) -> None:
    """Peers store a tied weight twice, or compute with half of it."""
    weight = random_tensor((1 << 16,), torch.uint8)
    swapper.swap_out_many({"embedding": weight, "head": weight, "other": weight.clone()})
    assert swapper.stats().write_nbytes == 2 << 16
    assert all(torch.equal(swapper.swap_in(key), weight) for key in sorted(swapper.keys()))
    swapper.discard("embedding")
    assert torch.equal(swapper.swap_in("head"), weight)
    swapper.swap_out("embedding", weight + 2)
    swapper.swap_out("head", weight + 1)
    assert torch.equal(swapper.swap_in("head"), weight + 1)
    swapper.swap_out_many({"embedding": weight, "head": weight})
    swapper.swap_out("embedding", weight + 3)
    assert torch.equal(swapper.swap_in("head"), weight)
    assert torch.equal(swapper.swap_in("embedding"), weight + 3)


def test_prefetched_tensor_is_taken_and_rewritten_one_is_not(swapper: TensorSwapper) -> None:
    """A prefetch from before a rewrite would give back old values."""
    old, new = random_tensor((9000,), torch.uint8), random_tensor((9000,), torch.uint8, 1)
    swapper.swap_out("t", old)
    swapper.prefetch(["t"])
    assert torch.equal(swapper.swap_in("t"), old)
    assert swapper.stats().read_nbytes == 9000
    swapper.prefetch(["t"])
    swapper.swap_out("t", new)
    assert torch.equal(swapper.swap_in("t"), new)


def test_borrowed_tensor_is_written_back(swapper: TensorSwapper) -> None:
    """Else edits made in the block are lost; with write_back=False they are meant to be."""
    swapper.swap_out("t", torch.zeros(100))
    with swapper.borrow("t") as tensor:
        tensor += 1
    with swapper.borrow("t", write_back=False) as tensor:
        tensor += 1
    assert torch.equal(swapper.swap_in("t"), torch.ones(100))


def test_wrong_calls_get_typed_errors(swapper: TensorSwapper, tmp_path: Path) -> None:
    """Each names the fix."""
    swapper.swap_out("weight", torch.zeros(3))
    with pytest.raises(SwapUsageError, match="weight"):
        swapper.swap_in("wieght")
    with pytest.raises(SwapUsageError):
        swapper.swap_out("sparse", torch.zeros(3, 3).to_sparse())
    with pytest.raises(SwapPathError):
        TensorSwapper(tmp_path / "missing")
    swapper.close()
    with pytest.raises(SwapUsageError, match="closed"):
        swapper.swap_in("weight")


def test_closing_leaves_no_files(tmp_path: Path) -> None:
    """Swap files are scratch; running a script twice must not fill the drive.  field case F02"""
    for _ in range(2):
        with TensorSwapper(tmp_path) as swapper:
            swapper.swap_out("t", torch.zeros(1000))
            assert list(tmp_path.rglob("*.swp"))
        assert not list(tmp_path.rglob("*.swp"))


@settings(
    max_examples=30, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["out", "in", "discard", "prefetch"]),
            st.sampled_from("abcd"),
            st.integers(0, 20_000),
        ),
        max_size=30,
    )
)
def test_any_sequence_of_calls_behaves_like_a_dict(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[str, str, int]]
) -> None:
    """Freed places are used again; no tensor may ever get another's bytes."""
    model: dict[str, torch.Tensor] = {}
    with TensorSwapper(tmp_path_factory.mktemp("dict")) as swapper:
        for place, (call, key, nbytes) in enumerate(calls):
            if call == "out":
                model[key] = random_tensor((nbytes,), torch.uint8, place)
                swapper.swap_out(key, model[key])
            elif key not in model:
                with pytest.raises(SwapUsageError):
                    swapper.swap_in(key)
            elif call == "discard":
                swapper.discard(key)
                del model[key]
            elif call == "prefetch":
                swapper.prefetch([key])
            else:
                assert torch.equal(swapper.swap_in(key), model[key])
        assert sorted(swapper.keys()) == sorted(model)
        assert all(torch.equal(swapper.swap_in(key), model[key]) for key in model)
