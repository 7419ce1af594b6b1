"""Several files behind one range of offsets: each byte in one place, and a lost one is named."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvmeswap.errors import (
    SwapPathError,
    SwapReadError,
    SwapSpaceError,
    SwapTimeoutError,
    SwapUsageError,
)
from nvmeswap.io import (
    BufferedFallbackWarning,
    DirectMode,
    Engine,
    File,
    Member,
    Stripes,
    padded_nbytes,
)

MIB = 1 << 20
POISON, GUARD = 0xAA, 0x5C
GUARD_NBYTES = 4096
BACKENDS = ("uring", "aio", "posix", "skeleton", "fault")

MakeBytes = Callable[..., torch.Tensor]
weights_of_rows = st.lists(st.integers(1, 9), min_size=1, max_size=7).map(tuple)


def make_members(
    folder: Path, stripes: Stripes, nbytes: int, direct: Sequence[DirectMode] = ()
) -> list[Member]:
    """Files that hold `nbytes` striped together, each with exactly its share."""
    members = []
    for index, weight in enumerate(stripes.weights):
        path = folder / f"drive{index}.swp"
        path.touch()
        os.truncate(path, stripes.share(index, nbytes))
        mode = direct[index] if direct else DirectMode.PREFER
        members.append(Member(path, weight, mode))
    return members


def open_striped(engine: Engine, members: Sequence[Member], stripe_nbytes: int) -> File:
    return engine.open_striped(members, stripe_nbytes=stripe_nbytes)


# --- the map -------------------------------------------------------------------------------------


@settings(deadline=None)
@given(weights=weights_of_rows, stripe_pages=st.integers(1, 5), row_count=st.integers(1, 3))
def test_every_offset_has_one_place_of_its_own(
    weights: tuple[int, ...], stripe_pages: int, row_count: int
) -> None:
    """Else two tensors lie on top of each other, or a member is longer than its share."""
    stripes = Stripes(weights, stripe_pages * 4096)
    end = row_count * sum(weights) * stripes.nbytes
    steps = range(0, end, 4096)
    places = [stripes.find(offset) for offset in steps]
    # Every page of every member exactly once, and no other.
    assert sorted(places) == [
        (member, offset)
        for member, weight in enumerate(weights)
        for offset in range(0, row_count * weight * stripes.nbytes, 4096)
    ]
    for offset, (member, member_offset) in zip(steps, places, strict=True):
        within = min(stripes.nbytes - offset % stripes.nbytes, 4096) - 1
        assert stripes.find(offset + within) == (member, member_offset + within)


@settings(deadline=None)
@given(weights=weights_of_rows, nbytes=st.integers(0, 1 << 20))
def test_share_is_where_the_last_byte_of_a_member_ends(
    weights: tuple[int, ...], nbytes: int
) -> None:
    """Else a member is too short for its bytes, or takes space that nobody uses."""
    stripes = Stripes(weights, 4096)
    shares = [stripes.share(member, nbytes) for member in range(len(weights))]
    assert sum(shares) == nbytes
    ends = [0] * len(weights)
    for offset in {*range(0, nbytes, 4096), *range(4095, nbytes, 4096), nbytes - 1} - {-1}:
        member, member_offset = stripes.find(offset)
        ends[member] = max(ends[member], member_offset + 1)
    assert ends == shares


@given(weights=weights_of_rows)
def test_stripes_of_a_member_are_spread_over_the_row(weights: tuple[int, ...]) -> None:
    """Else a drive idles while another one has its whole run."""
    stripes = Stripes(weights, 4096)
    row_count = sum(weights)
    row = [stripes.find(4096 * at)[0] for at in range(row_count)]
    for member, weight in enumerate(weights):
        for end in range(row_count + 1):
            given_so_far = row[:end].count(member)
            assert abs(given_so_far - weight * end / row_count) < len(weights)


def test_offset_beyond_32_bits_is_exact() -> None:
    """Else large models wrap round.  field case A05"""
    stripes = Stripes((3, 2, 1), MIB)
    offset = (1 << 43) + 5 * MIB + 4097
    row, at = divmod(offset // MIB, 6)
    assert [0, 1, 0, 2, 1, 0][at] == stripes.find(offset)[0]
    weight = (3, 2, 1)[stripes.find(offset)[0]]
    assert stripes.find(offset)[1] // MIB // weight == row


@pytest.mark.parametrize("weights", ((), (1, 0), (1,) * 17, (60, 5)))
def test_layout_that_the_engine_can_not_hold_is_refused(weights: tuple[int, ...]) -> None:
    """Else it is cut off silently, or the process aborts."""
    with pytest.raises(SwapUsageError):
        Stripes(weights)


# --- bytes ---------------------------------------------------------------------------------------


def guarded(nbytes: int, misaligned_by: int) -> tuple[torch.Tensor, torch.Tensor]:
    memory = torch.full((nbytes + 2 * GUARD_NBYTES + 4096,), GUARD, dtype=torch.uint8)
    start = GUARD_NBYTES + (-memory.data_ptr()) % 4096 + misaligned_by
    inside = memory[start : start + nbytes]
    inside.fill_(POISON)
    return memory, inside


@settings(max_examples=40, deadline=None)
@given(data=st.data(), backend=st.sampled_from(BACKENDS))
def test_any_mix_of_sizes_and_members_comes_back_equal(data: st.DataObject, backend: str) -> None:
    """Else some combination nobody thought of loses bytes where stripes, blocks and pieces meet."""
    sizes = data.draw(st.lists(st.integers(0, 60_000), min_size=1, max_size=10))
    weights = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple))
    modes = data.draw(st.lists(st.sampled_from((DirectMode.PREFER, DirectMode.OFF)),
                               min_size=len(weights), max_size=len(weights)))
    stripes = Stripes(weights, 4096 * data.draw(st.integers(1, 4)))
    places, at = [], 0
    for nbytes in sizes:
        places.append(at)
        at += padded_nbytes(nbytes, 4096) + data.draw(st.sampled_from((0, 0, 4096)))
    with (
        tempfile.TemporaryDirectory(prefix="nvmeswap-test-") as folder,
        Engine(
            backend=backend,
            queue_depth=data.draw(st.integers(1, 9)),
            block_nbytes=4096 * data.draw(st.integers(1, 6)),
        ) as engine,
    ):
        members = make_members(Path(folder), stripes, at, modes)
        file = open_striped(engine, members, stripes.nbytes)
        sources = [torch.randint(0, 256, (nbytes,), dtype=torch.uint8) for nbytes in sizes]
        guards = [guarded(nbytes, data.draw(st.integers(0, 513))) for nbytes in sizes]
        order = data.draw(st.permutations(range(len(sizes))))
        engine.write_many(file, [places[i] for i in order], [sources[i] for i in order]).wait()
        engine.read_many(file, [places[i] for i in order], [guards[i][1] for i in order]).wait()
        file.close()
        for source, (memory, inside) in zip(sources, guards, strict=True):
            assert torch.equal(source, inside)
            start = inside.data_ptr() - memory.data_ptr()
            assert bool((memory[:start] == GUARD).all())
            assert bool((memory[start + inside.numel() :] == GUARD).all())
        # And each byte lies where the map says: nothing else could find it there.
        for place, source in zip(places, sources, strict=True):
            for first in range(0, source.numel(), 4096):
                member, offset = stripes.find(place + first)
                piece = source[first : first + 4096].numpy().tobytes()
                with members[member].path.open("rb") as raw:
                    raw.seek(offset)
                    assert raw.read(len(piece)) == piece


@pytest.fixture(params=BACKENDS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine(backend=request.param, queue_depth=8, block_nbytes=65536) as engine:
        yield engine


def test_one_large_read_keeps_all_members_busy(tmp_path: Path, random_bytes: MakeBytes) -> None:
    """Else striping is no faster than one drive."""
    stripes = Stripes((2, 1, 1), 65536)
    source = random_bytes(4 * MIB)
    with Engine(backend="fault", fault_script="read 5 never", queue_depth=8,
                block_nbytes=65536) as engine:
        file = open_striped(engine, make_members(tmp_path, stripes, 4 * MIB), 65536)
        engine.write(file, 0, source).wait()
        destination = torch.full_like(source, POISON)
        request = engine.read(file, 0, destination)
        with pytest.raises(SwapTimeoutError):
            request.wait(0.5)
        # One block of one member hangs; all else of the same read has landed, on every member.
        blocks = zip(destination.split(65536), source.split(65536), strict=True)
        wrong = [i for i, (got, wanted) in enumerate(blocks) if not torch.equal(got, wanted)]
        assert wrong == [4]
        engine.inject("read 1000000 errno 5")
        request.wait()
        assert torch.equal(destination, source)


def test_unaligned_offset_of_a_striped_file_is_refused_even_when_buffered(
    engine: Engine, tmp_path: Path
) -> None:
    """Else a block would reach beyond its stripe."""
    members = make_members(tmp_path, Stripes((1, 1), 4096), 65536, [DirectMode.OFF] * 2)
    file = open_striped(engine, members, 4096)
    with pytest.raises(SwapUsageError):
        engine.write(file, 100, torch.zeros(8192, dtype=torch.uint8))


# --- one of them lost ----------------------------------------------------------------------------


def test_missing_member_is_named_when_the_file_is_opened(engine: Engine, tmp_path: Path) -> None:
    """Else nobody knows which drive is not mounted."""
    members = make_members(tmp_path, Stripes((1, 1, 1)), MIB)
    members[1].path.unlink()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SwapPathError) as raised:
        engine.open_striped(members)
    assert raised.value.path == members[1].path
    assert len(os.listdir("/proc/self/fd")) == before


def test_same_file_twice_is_refused(engine: Engine, tmp_path: Path) -> None:
    """Else its second stripes lie on its first."""
    (member,) = make_members(tmp_path, Stripes((1,)), MIB)
    link = tmp_path / "link.swp"
    link.hardlink_to(member.path)
    for twin in (member, Member(link)):
        with pytest.raises(SwapUsageError):
            engine.open_striped([member, twin])


def test_member_that_ends_early_is_named_and_the_others_go_on(
    engine: Engine, tmp_path: Path, random_bytes: MakeBytes
) -> None:
    """Else a damaged drive is looked for on the wrong one.  field case A07"""
    stripes = Stripes((1, 1), 65536)
    members = make_members(tmp_path, stripes, MIB)
    file = open_striped(engine, members, stripes.nbytes)
    source = random_bytes(MIB)
    engine.write(file, 0, source).wait()
    os.truncate(members[1].path, 65536 + 8192)
    buffers = [torch.full((65536,), POISON, dtype=torch.uint8) for _ in range(16)]
    request = engine.read_many(file, [i * 65536 for i in range(16)], buffers)
    failed = request.failed()
    assert sorted(failed) == [*range(3, 16, 2)]
    for error in failed.values():
        assert isinstance(error, SwapReadError)
        assert error.path == members[1].path
        assert error.offset_bytes is not None and error.offset_bytes >= 65536 + 8192
        assert error.intact is not None and str(members[0].path) in error.intact
    for i in set(range(16)) - set(failed):
        assert torch.equal(buffers[i], source[i * 65536 : (i + 1) * 65536])


def test_full_member_is_named_with_its_free_bytes(
    engine: Engine, tmp_path: Path, small_tmpfs: Path
) -> None:
    """Else the wrong drive is cleared.  field case K01"""
    stripes = Stripes((1, 1), 65536)
    members = [make_members(tmp_path, stripes, 8 * MIB)[0],
               make_members(small_tmpfs, stripes, 8 * MIB)[1]]
    file = open_striped(engine, members, stripes.nbytes)
    source = torch.ones(8 * MIB, dtype=torch.uint8)
    with pytest.raises(SwapSpaceError) as raised:
        engine.write(file, 0, source).wait()
    assert raised.value.path == members[1].path
    assert raised.value.got_nbytes is not None and raised.value.got_nbytes < MIB
    engine.write(file, 0, source[:65536]).wait()
    file.close()


def test_member_that_refuses_direct_io_falls_back_alone(
    tmp_path: Path, random_bytes: MakeBytes
) -> None:
    """Else one odd filesystem takes direct I/O from all drives."""
    stripes = Stripes((1, 1), 65536)
    source = random_bytes(MIB)
    with Engine(backend="fault", block_nbytes=65536, fault_script="write 2 errno 22") as engine:
        file = open_striped(engine, make_members(tmp_path, stripes, MIB), stripes.nbytes)
        with pytest.warns(BufferedFallbackWarning):
            engine.write(file, 0, source).wait()
        assert not file.direct
        before = engine.stats()
        destination = torch.full_like(source, POISON)
        engine.read(file, 0, destination).wait()
        after = engine.stats()
    assert torch.equal(destination, source)
    assert after.read_direct_nbytes - before.read_direct_nbytes == MIB // 2
    assert after.read_buffered_nbytes - before.read_buffered_nbytes == MIB // 2


def test_lost_drive_is_named_and_the_other_serves_its_own(
    engine: Engine, tmp_path: Path, random_bytes: MakeBytes,
    drive_to_lose: tuple[Path, Callable[[], None]],
) -> None:
    """Else one dead drive of several hangs the run, or is told as some other one."""
    folder, lose = drive_to_lose
    stripes = Stripes((1, 1), 65536)
    members = [make_members(tmp_path, stripes, 8 * MIB)[0],
               make_members(folder, stripes, 8 * MIB)[1]]
    file = open_striped(engine, members, stripes.nbytes)
    source = random_bytes(8 * MIB)
    engine.write(file, 0, source).wait()
    lose()
    destination = torch.full_like(source, POISON)
    with pytest.raises(SwapReadError) as raised:
        engine.read(file, 0, destination).wait(20)
    assert raised.value.path == members[1].path
    assert raised.value.errno is not None
    for first in range(0, 8 * MIB, 2 * 65536):
        piece = torch.full((65536,), POISON, dtype=torch.uint8)
        engine.read(file, first, piece).wait(20)
        assert torch.equal(piece, source[first : first + 65536])
    file.close()


def test_link_in_place_of_a_member_is_refused(tmp_path: Path) -> None:
    """Else whoever plants a link there reads the weights, or has another file overwritten."""
    real, link = tmp_path / "real.swp", tmp_path / "link.swp"
    real.write_bytes(bytes(8192))
    link.symlink_to(real)
    with Engine() as engine:
        with pytest.raises(SwapPathError):
            engine.open_striped([Member(link)])
        engine.open_striped([Member(link, follows_links=True)]).close()
