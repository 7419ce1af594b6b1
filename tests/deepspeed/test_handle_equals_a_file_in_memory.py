"""Whatever is called, in any order and without waiting: files and buffers are what plain Python
files and bytes would be."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvmeswap.deepspeed import aio_handle

MOST_NBYTES = 20_000
offsets = st.integers(0, MOST_NBYTES) | st.sampled_from([0, 512, 1024, 4096, 8192, 12_288])
lengths = st.integers(0, MOST_NBYTES) | st.sampled_from([512, 1024, 4096, 8192])


@st.composite
def calls(draw: st.DrawFn) -> list[tuple[str, str, int | None, int, int]]:
    """(what, file, offset, nbytes, step between the elements in memory)."""
    one = st.tuples(
        st.sampled_from(["write", "write", "read", "read", "wait"]),
        st.sampled_from("ab"), st.none() | offsets, lengths, st.integers(1, 2),
    )
    return draw(st.lists(one, max_size=30))


def put(content: bytearray, offset: int | None, data: bytes) -> None:
    """What a write does to a file."""
    begin = offset or 0
    if offset is None:
        del content[:]
    if data and begin > len(content):
        content.extend(bytes(begin - len(content)))
    content[begin : begin + len(data)] = data


@settings(max_examples=60, deadline=None)
@given(calls(), st.booleans(), st.integers(0, 2**32 - 1))
def test_handle_equals_a_file_in_memory(
    sequence: list[tuple[str, str, int | None, int, int]], pinned: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    handle = aio_handle(block_size=4096, queue_depth=4)
    locked_nbytes = 2 * MOST_NBYTES * max(len(sequence), 1)
    locked = handle.new_cpu_locked_tensor(locked_nbytes, torch.empty(0, dtype=torch.uint8))
    files: dict[str, bytearray] = {}
    expected: list[tuple[torch.Tensor, bytes]] = []
    pending = 0
    with tempfile.TemporaryDirectory() as folder:
        for index, (what, name, offset, nbytes, step) in enumerate(sequence):
            whole = locked.narrow(0, index * 2 * MOST_NBYTES, 2 * MOST_NBYTES)
            if not pinned:
                whole = torch.empty(2 * MOST_NBYTES, dtype=torch.uint8)
            buffer = whole[: nbytes * step : step]
            if what == "wait":
                assert handle.wait() == pending
                pending = 0
            elif what == "write":
                buffer.random_(0, 256, generator=generator)
                content = files.setdefault(name, bytearray())
                put(content, offset, bytes(buffer.tolist()))
                where = [] if offset is None else [offset]
                handle.async_pwrite(buffer, Path(folder) / name, *where)
                pending += 1
            elif name in files and (offset or 0) + nbytes <= len(files[name]):
                begin = offset or 0
                whole.fill_(0xA5)
                handle.async_pread(buffer, Path(folder) / name, begin)
                expected.append((buffer, bytes(files[name][begin : begin + nbytes])))
                pending += 1
        assert handle.wait() == pending
        assert all(bytes(buffer.tolist()) == content for buffer, content in expected)
        assert all((Path(folder) / name).read_bytes() == content for name, content in files.items())
    handle.free_cpu_locked_tensor(locked)
