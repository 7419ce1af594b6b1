"""A master comes back from its bf16 parameter and the rest, bit for bit, whatever it is."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nvmeswap.swap.master import MasterRest

POISON = 0xA5
GUARD_NBYTES = 64
UPPER_HALVES = (
    0x0000, 0x0001,  # zero, denormals
    0x007E, 0x007F, 0x0080, 0x0081,  # up to the least normal ones
    0x3F80, 0x3F81, 0x4049, 0x477F,
    0x7F7E, 0x7F7F,  # up to those that round to infinity
    0x7F80, 0x7F81, 0x7FC0, 0x7FFF,  # infinity, NaN
)
NEAR_TIES = np.concatenate([np.arange(begin, begin + 64) for begin in (0, 0x7FC0, 0x8000, 0xFFC0)])


class Region:
    """A tensor at any address, poisoned, between guards that must stay as they are."""

    def __init__(self, numel: int, dtype: torch.dtype, skew_nbytes: int = 0) -> None:
        nbytes = numel * dtype.itemsize
        self._bytes = torch.full((nbytes + 2 * GUARD_NBYTES + skew_nbytes,), POISON,
                                 dtype=torch.uint8)
        start = GUARD_NBYTES + skew_nbytes
        self._guards = (self._bytes[:start], self._bytes[start + nbytes :])
        self.tensor = (
            torch.frombuffer(self._bytes.numpy(), dtype=dtype, count=numel, offset=start)
            if numel else torch.empty(0, dtype=dtype)
        )

    def assert_guards_stand(self) -> None:
        assert all((guard == POISON).all() for guard in self._guards)


def floats(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32))


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.dtype is torch.float32 else torch.int16)


def assert_comes_back(
    master: torch.Tensor, cuts: list[int], skews_nbytes: tuple[int, int, int, int] = (0, 0, 0, 0)
) -> None:
    """Split and joined range by range, each ending at a cut, equal to torch and to `master`."""
    numel = master.numel()
    source = Region(numel, torch.float32, skews_nbytes[0])
    source.tensor.copy_(master)
    parameter = Region(numel, torch.bfloat16, skews_nbytes[1])
    joined = Region(numel, torch.float32, skews_nbytes[2])
    memory = Region(MasterRest.nbytes_for(numel), torch.uint8, skews_nbytes[3])
    rest = MasterRest(memory.tensor, numel)
    ranges = [slice(*ends) for ends in pairwise([0, *cuts, numel])]
    for each in reversed(ranges):
        rest.split(each.start, source.tensor[each], parameter.tensor[each])
    for each in ranges:
        rest.join(each.start, parameter.tensor[each], joined.tensor[each])

    is_nan = master.isnan()
    assert torch.equal(bits_of(source.tensor), bits_of(master))
    assert torch.equal(parameter.tensor.isnan(), is_nan)
    assert torch.equal(joined.tensor.isnan(), is_nan)
    rounded = master.to(torch.bfloat16)
    assert torch.equal(bits_of(parameter.tensor)[~is_nan], bits_of(rounded)[~is_nan])
    assert torch.equal(bits_of(joined.tensor)[~is_nan], bits_of(master)[~is_nan])
    for region in (source, parameter, joined, memory):
        region.assert_guards_stand()


@st.composite
def masters(draw: st.DrawFn) -> torch.Tensor:
    """Any bits, many of them about a tie, at infinity, or NaN."""
    numel = draw(st.integers(0, 700))
    generator = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    upper = generator.integers(0, 1 << 16, numel)
    lower = generator.integers(0, 1 << 16, numel)
    special = generator.random(numel) < draw(st.sampled_from((0.0, 0.5, 1.0)))
    upper[special] = generator.choice(UPPER_HALVES, special.sum())
    upper[special] |= generator.integers(0, 2, special.sum()) << 15
    near_tie = generator.random(numel) < 0.5
    lower[near_tie] = generator.choice((0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF), near_tie.sum())
    return floats(upper << 16 | lower)


@given(
    masters(),
    st.lists(st.integers(0, 87), max_size=6),
    st.tuples(*[st.integers(0, 33)] * 4),
)
def test_any_master_in_any_ranges_at_any_address_comes_back(
    master: torch.Tensor, cut_eights: list[int], skews_nbytes: tuple[int, int, int, int]
) -> None:
    """Else a run drifts from the one in RAM, or writes over what lies beside."""
    cuts = sorted(8 * eight for eight in cut_eights if 8 * eight <= master.numel())
    assert_comes_back(master, cuts, skews_nbytes)


@pytest.mark.parametrize("sign", (0, 0x8000))
@pytest.mark.parametrize("upper", UPPER_HALVES)
def test_every_lower_half_comes_back(upper: int, sign: int) -> None:
    """Else one in 65536 elements, the tie, comes back a bf16 step off."""
    assert_comes_back(floats((upper | sign) << 16 | np.arange(1 << 16)), [])


@pytest.mark.parametrize("sign", (0, 0x8000))
@pytest.mark.parametrize("upper", UPPER_HALVES)
def test_lower_halves_near_a_tie_come_back_eight_by_eight(upper: int, sign: int) -> None:
    """Eight elements fill no vector, so this is what a processor without AVX2 computes."""
    master = floats((upper | sign) << 16 | NEAR_TIES)
    assert_comes_back(master, list(range(8, master.numel(), 8)))


def test_nan_parameter_with_any_rest_is_nan_and_settles() -> None:
    """Else a NaN turns into a number at a later step, and the run goes on as if nothing were."""
    generator = np.random.default_rng(1)
    upper = np.tile(np.concatenate((np.arange(0x7F80, 0x8000), np.arange(0xFF80, 0x10000))), 64)
    master = floats(upper << 16 | generator.integers(1, 1 << 16, upper.size))
    assert master.isnan().all()
    parameter = torch.zeros(upper.size, dtype=torch.bfloat16)
    first, second = torch.zeros_like(master), torch.zeros_like(master)
    memory = torch.full((MasterRest.nbytes_for(upper.size),), POISON, dtype=torch.uint8)
    rest = MasterRest(memory, upper.size)
    rest.split(0, master, parameter)
    rest.join(0, parameter, first)
    rest.split(0, first, parameter)
    rest.join(0, parameter, second)
    assert parameter.isnan().all() and first.isnan().all()
    assert torch.equal(bits_of(first), bits_of(second))


def test_cleared_rest_of_every_parameter_joins_to_that_very_value() -> None:
    """Else a master that begins as its parameter begins with noise."""
    bits = torch.arange(1 << 16, dtype=torch.int32)
    parameter = bits.to(torch.int16).view(torch.bfloat16)
    rest = MasterRest(
        torch.full((MasterRest.nbytes_for(1 << 16),), POISON, dtype=torch.uint8), 1 << 16
    )
    rest.clear()
    joined = torch.full((1 << 16,), -1, dtype=torch.int32).view(torch.float32)
    rest.join(0, parameter, joined)
    assert torch.equal(bits_of(joined), bits << 16)


@given(masters())
def test_equal_masters_have_equal_bytes(master: torch.Tensor) -> None:
    """Else checksums of the same state differ by what the memory held before."""
    numel = master.numel()
    held = []
    for poison in (0x00, 0xFF):
        memory = torch.full((MasterRest.nbytes_for(numel),), poison, dtype=torch.uint8)
        MasterRest(memory, numel).split(0, master, torch.empty(numel, dtype=torch.bfloat16))
        held.append(memory)
    assert torch.equal(*held)


@pytest.mark.parametrize(
    ("begin", "length"), ((4, 8), (-8, 8), (0, 12), (96, 8), (104, 0), (0, 101), (8, 100))
)
def test_range_that_shares_a_byte_or_leaves_the_segment_is_our_bug(
    begin: int, length: int
) -> None:
    """Else two threads' carries would meet in one byte, or a write pass the end."""
    numel = 100
    memory = torch.full((MasterRest.nbytes_for(numel),), POISON, dtype=torch.uint8)
    rest = MasterRest(memory, numel)
    master, parameter = torch.ones(length), torch.ones(length, dtype=torch.bfloat16)
    with pytest.raises(AssertionError):
        rest.split(begin, master, parameter)
    with pytest.raises(AssertionError):
        rest.join(begin, parameter, master)
    assert (memory == POISON).all()


@pytest.mark.parametrize("wrong", ("master dtype", "parameter dtype", "stride", "length", "memory"))
def test_memory_of_another_kind_is_our_bug(wrong: str) -> None:
    """Else bytes are taken for what they are not."""
    master = torch.ones(64, dtype=torch.float64 if wrong == "master dtype" else torch.float32)
    parameter = torch.ones(
        72 if wrong == "length" else 64,
        dtype=torch.float16 if wrong == "parameter dtype" else torch.bfloat16,
    )
    nbytes = MasterRest.nbytes_for(64) + (1 if wrong == "memory" else 0)
    if wrong == "stride":
        master = torch.ones(128)[::2]
    with pytest.raises(AssertionError):
        MasterRest(torch.zeros(nbytes, dtype=torch.uint8), 64).split(0, master, parameter)


def test_parameter_that_others_wrote_is_never_far_from_its_master() -> None:
    """A write through `.data` is not seen; the master must still round to what was written."""
    numel = 1 << 12
    masters = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    memory = torch.empty(MasterRest.nbytes_for(numel), dtype=torch.uint8)
    rest, parameter = MasterRest(memory, numel), torch.empty(numel, dtype=torch.bfloat16)
    rest.split(0, masters, parameter)
    for value in (0.0, -0.0, 1.0, -3.5, 1e-30, 7.8125e-3):
        for begin in (0, numel - 8):  # vectors, and what is left of them
            count = numel - begin
            written = torch.full((count,), value, dtype=torch.bfloat16)
            out = torch.full((count,), torch.nan)
            rest.join(begin, written, out)
            far = (out - written.float()).abs().max()
            assert bool(out.isfinite().all()) and float(far) <= abs(value) * 2**-8 + 1e-40
