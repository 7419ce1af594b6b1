"""A state file is a safetensors file like any other, and never passes through memory whole."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from nvmeswap.errors import (
    SwapClosedError,
    SwapManifestError,
    SwapPathError,
    SwapReadError,
    SwapUsageError,
)
from nvmeswap.swap.state_file import StateFileReader, StateFileWriter, TensorShape
from tests.swap.state_files import OLDER, MiB, assert_same, raw, save, shapes_of

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.complex64, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8,
    torch.bool,
]
SHAPES = [(), (0,), (1,), (37,), (5, 7), (3, 0, 2), (2, 3, 4)]

names = st.text(max_size=8).filter(lambda name: name != "__metadata__")
texts = st.dictionaries(st.text(max_size=8), st.text(max_size=20), max_size=3)
shapes = st.builds(TensorShape, st.sampled_from(DTYPES), st.sampled_from(SHAPES))
plans = st.dictionaries(names, shapes, max_size=6)


def filled(tensor: TensorShape, seed: int) -> torch.Tensor:
    """Any bits, NaNs and negative zeros too."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if tensor.dtype is torch.bool else 256
    content = torch.randint(high, (tensor.nbytes,), dtype=torch.uint8, generator=generator)
    return content.view(tensor.dtype).reshape(tensor.shape)


def cuts(draw: st.DrawFn, numel: int) -> list[tuple[int, int]]:
    """The ranges that some cuts leave."""
    ends = sorted(draw(st.sets(st.integers(1, max(1, numel - 1)), max_size=4)) | {0, numel})
    return list(itertools.pairwise(ends))


@st.composite
def pieces(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], list[tuple[str, int, int]]]:
    """Tensors, and all their elements in pieces of any size, in any order."""
    tensors = {
        name: filled(tensor, seed) for seed, (name, tensor) in enumerate(draw(plans).items())
    }
    parts = [
        (name, start, stop)
        for name, tensor in tensors.items()
        for start, stop in cuts(draw, tensor.numel())
        if stop <= tensor.numel()
    ]
    return tensors, draw(st.permutations(parts))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all examples of a property."""
    return tmp_path_factory.mktemp("state")


# --- the format ----------------------------------------------------------------------------------


@settings(deadline=None)
@given(pieces(), texts)
def test_what_is_written_in_any_order_the_library_loads(
    folder: Path,
    plan: tuple[dict[str, torch.Tensor], list[tuple[str, int, int]]],
    metadata: dict[str, str],
) -> None:
    """Else a checkpoint can be read by nobody else."""
    tensors, parts = plan
    path = folder / "ours.safetensors"
    with StateFileWriter(path, shapes_of(tensors), metadata) as file:
        for name, start, stop in parts:
            file.write(name, start, tensors[name].reshape(-1)[start:stop])
    assert_same(load_file(path), tensors)
    with safe_open(path, framework="pt") as library:
        assert (library.metadata() or {}) == metadata
    assert os.listdir(folder) == [path.name]


@settings(deadline=None)
@given(pieces(), texts)
def test_what_the_library_saves_is_read_in_any_order(
    folder: Path,
    plan: tuple[dict[str, torch.Tensor], list[tuple[str, int, int]]],
    metadata: dict[str, str],
) -> None:
    """Else a checkpoint of a plain run can't be continued."""
    tensors, parts = plan
    path = folder / "ours.safetensors"
    save_file(tensors, path, metadata=metadata or None)  # no tensors and {}: it writes bad JSON
    with StateFileReader(path) as file:
        assert dict(file.metadata) == metadata
        assert dict(file.tensors) == shapes_of(tensors)
        for name, start, stop in parts:
            part = file.read(name, start, stop)
            assert part.dtype == tensors[name].dtype
            assert raw(part) == raw(tensors[name].reshape(-1)[start:stop])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e8m0fnu], ids=str)
def test_each_dtype_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    """One wrong name in the table, and a state of that dtype is lost."""
    tensors = {"a": filled(TensorShape(dtype, (3, 5)), 1), "b": filled(TensorShape(dtype, ()), 2)}
    path = tmp_path / "state"
    save(path, tensors)
    with StateFileReader(path) as file:
        back = {
            name: file.read(name, 0, tensor.numel).reshape(tensor.shape)
            for name, tensor in file.tensors.items()
        }
    assert_same(back, tensors)


def test_header_is_padded_and_every_tensor_aligned(tmp_path: Path) -> None:
    """A reader that maps the file can't use a float32 at an odd byte."""
    tensors = {
        f"{dtype}.{numel}": filled(TensorShape(dtype, (numel,)), 1)
        for numel in (1, 3) for dtype in reversed(DTYPES)
    }
    save(tmp_path / "state", tensors)
    content = (tmp_path / "state").read_bytes()
    nbytes = int.from_bytes(content[:8], "little")
    assert nbytes % 8 == 0
    header = json.loads(content[8 : 8 + nbytes])
    for name, tensor in tensors.items():
        assert header[name]["data_offsets"][0] % tensor.dtype.itemsize == 0


def test_pieces_of_any_layout_are_written_in_their_logical_order(tmp_path: Path) -> None:
    """A transposed moment would be saved scrambled."""
    matrix = torch.complex(torch.arange(12.0), torch.ones(12)).reshape(3, 4).requires_grad_()
    save(tmp_path / "state", {"t": matrix.T, "c": matrix.conj(), "step": matrix[:, 1]})
    expected = {"t": matrix.T, "c": matrix.conj(), "step": matrix[:, 1]}
    assert_same(
        load_file(tmp_path / "state"),
        {name: each.detach().resolve_conj().contiguous() for name, each in expected.items()},
    )


# --- files that are not what they should be ------------------------------------------------------


def file_of(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


WRONG = {
    "empty": (b"", "header"),
    "short": (b"abc", "header"),
    "torch.save's": (b"PK\x03\x04" + bytes(500), "header"),
    "no json": (file_of({})[:8] + b"xy", "header"),
    "header longer than the file": ((1 << 40).to_bytes(8, "little") + b"{}", "header"),
    "a list": (file_of([]), "header"),
    "cut short": (file_of({"a": entry("U8", [4], 0, 4)}, bytes(3)), "data_offsets"),
    "too long": (file_of({"a": entry("U8", [4], 0, 4)}, bytes(5)), "data_offsets"),
    "a gap": (file_of({"a": entry("U8", [4], 1, 5)}, bytes(5)), "data_offsets"),
    "shape": (file_of({"a": entry("U8", [5], 0, 4)}, bytes(4)), "shape"),
    "dtype": (file_of({"a": entry("Q8", [4], 0, 4)}, bytes(4)), "dtype"),
    "half bytes": (file_of({"a": entry("F4", [4], 0, 2)}, bytes(2)), "dtype"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_file_is_refused_by_path_and_field(tmp_path: Path, name: str) -> None:
    content, field = WRONG[name]
    path = tmp_path / "state"
    path.write_bytes(content)
    with pytest.raises(SwapManifestError) as refused:
        StateFileReader(path)
    assert (refused.value.path, refused.value.field) == (path, field)


@settings(deadline=None)
@given(st.data())
def test_file_cut_anywhere_is_refused(folder: Path, data: st.DataObject) -> None:
    """A half copied checkpoint must not be continued from."""
    path = folder / "cut"
    save(path, {"a": torch.arange(9), "b": torch.ones(3, 3)})
    os.truncate(path, data.draw(st.integers(0, path.stat().st_size - 1)))
    with pytest.raises(SwapManifestError):
        StateFileReader(path)
    path.unlink()


@settings(deadline=None)
@given(st.data())
def test_garbled_header_is_refused_or_stays_inside_the_file(
    folder: Path, data: st.DataObject
) -> None:
    path = folder / "garbled"
    save(path, {"a": torch.arange(9), "b": torch.ones(3, 3)})
    content = bytearray(path.read_bytes())
    header_nbytes = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, header_nbytes - 1))
        content[place] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with contextlib.suppress(SwapManifestError), StateFileReader(path) as file:
        for name, tensor in file.tensors.items():
            assert file.read(name, 0, tensor.numel).numel() == tensor.numel
    path.unlink()


def test_places_that_can_not_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "missing", tmp_path / "folder", tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(SwapPathError) as refused:
            StateFileReader(path)
        assert refused.value.path == path


def test_file_that_gets_shorter_is_an_error_and_no_signal(tmp_path: Path) -> None:
    path = tmp_path / "state"
    save(path, {"a": torch.arange(MiB)})
    with StateFileReader(path) as file:
        os.truncate(path, MiB)
        with pytest.raises(SwapReadError):
            file.read("a", 0, MiB)


def test_file_that_is_replaced_is_read_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "state"
    save(path, OLDER)
    with StateFileReader(path) as file:
        save(path, {"newer": torch.ones(3)})
        assert raw(file.read("older", 0, 5)) == raw(OLDER["older"])


# --- misuse --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "metadata"),
    [
        ({"a": TensorShape(torch.complex128, (1,))}, {}),
        ({"a": TensorShape(torch.float4_e2m1fn_x2, (1,))}, {}),
        ({"__metadata__": TensorShape(torch.int8, (1,))}, {}),
        ({}, {"step": 3}),
        ({}, {"long": "x" * 100_000_001}),
    ],
    ids=("complex128", "float4", "reserved name", "metadata not a text", "header too long"),
)
def test_what_the_format_can_not_hold_is_refused(
    tmp_path: Path, tensors: dict[str, TensorShape], metadata: dict[str, str]
) -> None:
    with pytest.raises(SwapUsageError):
        StateFileWriter(tmp_path / "state", tensors, metadata)
    assert os.listdir(tmp_path) == []


def test_wrong_pieces_are_refused(tmp_path: Path) -> None:
    values = torch.arange(6)
    with StateFileWriter(tmp_path / "state", shapes_of({"a": values})) as file:
        for name, start, piece in (
            ("b", 0, values), ("a", -1, values), ("a", 1, values), ("a", 0, values.float()),
            ("a", 0, values.to("meta")), ("a", 0, values.to_sparse()),
        ):
            with pytest.raises(SwapUsageError):
                file.write(name, start, piece)
        file.write("a", 0, values)
    with StateFileReader(tmp_path / "state") as reader:
        with pytest.raises(SwapManifestError) as missing:
            reader.read("b", 0, 1)
        assert missing.value.field == "b"
        for start, stop in ((-1, 2), (0, 7), (4, 3)):
            with pytest.raises(SwapUsageError):
                reader.read("a", start, stop)
    with pytest.raises(SwapClosedError):
        reader.read("a", 0, 1)


# --- memory --------------------------------------------------------------------------------------


def test_stream_takes_the_memory_of_a_piece(tmp_path: Path) -> None:
    """Else a save at the end of an epoch is killed for memory."""
    script = """if True:
        import sys, torch
        from nvmeswap.swap.state_file import StateFileReader, StateFileWriter, TensorShape

        def peak_nbytes():
            for line in open("/proc/self/status"):
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024

        path, numel, count = sys.argv[1], 1 << 18, 200
        piece = torch.arange(numel, dtype=torch.float32)
        open("/proc/self/clear_refs", "w").write("5")  # the peak is the present from here on
        before = peak_nbytes()
        with StateFileWriter(path, {"a": TensorShape(torch.float32, (count, numel))}) as file:
            for index in reversed(range(count)):
                file.write("a", index * numel, piece)
        with StateFileReader(path) as file:
            for index in range(count):
                assert torch.equal(file.read("a", index * numel, (index + 1) * numel), piece)
        print(peak_nbytes() - before)
    """
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "state")], check=True,
                          capture_output=True, text=True, timeout=120)
    assert int(done.stdout) < 30_000_000
