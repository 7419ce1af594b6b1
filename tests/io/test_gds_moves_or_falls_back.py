"""Device memory comes back bit for bit whatever cuFile does, or there is a typed error. Over a fake
driver, whose device memory can't be touched but by its copies."""

from __future__ import annotations

import ctypes.util
from pathlib import Path

import pytest

from nvmeswap.errors import SwapConfigError
from nvmeswap.io import Engine
from tests.io.fake_gds.programs import Programs

# Writes random bytes from the middle of device memory, poisons it all, and reads them back.
ROUND_TRIP = """
NBYTES, BEGIN, END = 8 << 20, 1 << 20, 6 << 20
memory = DeviceMemory(NBYTES, 0)
source = os.urandom(END - BEGIN)
tensor = device_tensor(memory)
part = tensor[BEGIN:END]

def round_trip(engine, file):
    memory.fill(b"\\x5c" * BEGIN + source + b"\\x5c" * (NBYTES - END))
    engine.write(file, 8192, part).wait()
    assert file_bytes(file.path, 8192, END - BEGIN) == source
    memory.fill(b"\\xaa" * NBYTES)
    engine.read(file, 8192, part).wait()
    content = memory.content()
    assert content[BEGIN:END] == source
    assert content[:BEGIN] == b"\\xaa" * BEGIN and content[END:] == b"\\xaa" * (NBYTES - END)
"""
ONE_ENGINE = ROUND_TRIP + """
with Engine(backend="gds", thread_count=4) as engine:
    assert engine.register_memory(tensor) == NBYTES
    file = engine.open(sized(folder / "a.swp", 16 << 20))
    round_trip(engine, file)
    stats = engine.stats()
    assert stats.gpudirect_nbytes + stats.device_bounced_nbytes >= 2 * len(source)
    print(stats.gpudirect_nbytes, stats.device_bounced_nbytes, stats.retry_count,
          engine.gds_refusal)
assert left() == (0, 0, 1)
"""


def test_cufile_moves_all_registers_once_and_leaves_nothing(
    fakes: Programs, tmp_path: Path
) -> None:
    """Else registration is paid for with every transfer, and each engine leaks handles.

    field case G06: registered once, whatever the number of transfers
    """
    told = fakes.run(ROUND_TRIP + """
cufile = library("libcufile.so.0")
for _ in range(3):
    with Engine(backend="gds", thread_count=4) as engine:
        engine.register_memory(tensor)
        files = [engine.open(sized(folder / name, 16 << 20)) for name in ("a.swp", "b.swp")]
        for file in files * 3:
            round_trip(engine, file)
        files[0].close()
        round_trip(engine, files[1])
        assert engine.gds_refusal is None
        stats = engine.stats()
        assert (stats.gpudirect_nbytes, stats.device_bounced_nbytes) == (14 * len(source), 0)
        assert cufile.fake_cufile_buffers() == 1
    assert cufile.fake_cufile_handles() == cufile.fake_cufile_buffers() == 0
assert cufile.fake_cufile_handles_ever() == 6
assert left() == (0, 0, 1)
""", tmp_path)
    assert told == ""


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("read=-5", "cuFileRead"),  # field case G01
        ("write=-5", "cuFileWrite"),
        ("read=-5 after=7", "cuFileRead"),
        ("read=-5013", "-5013"),
        ("read=-1 errno=22", "Invalid argument"),
        ("read=99999999", "99999999"),
        ("handle=5030", "5030"),  # field case G02
        ("driver=5007", "5007"),
    ],
)
def test_whatever_cufile_refuses_goes_through_host_memory(
    fakes: Programs, tmp_path: Path, script: str, reason: str
) -> None:
    """Else a failed transfer is taken for a good one, and stale bytes are served."""
    told = fakes.run(ONE_ENGINE, tmp_path, cufile=script).split(maxsplit=3)
    assert reason in told[3]
    assert int(told[1]) > 0


def test_refusal_ends_the_use_of_cufile(fakes: Programs, tmp_path: Path) -> None:
    """Else each transfer is tried in vain first.  field case G02: one refusal, then none asked"""
    fakes.run(ROUND_TRIP + """
cufile = library("libcufile.so.0")
with Engine(backend="gds", thread_count=1) as engine:
    engine.register_memory(tensor)
    file = engine.open(sized(folder / "a.swp", 16 << 20))
    round_trip(engine, file)
    assert cufile.fake_cufile_calls() == 1
    round_trip(engine, file)
    assert cufile.fake_cufile_calls() == 1
""", tmp_path, cufile="write=-5")


def test_without_cufile_device_memory_is_moved_all_the_same(
    fakes: Programs, tmp_path: Path
) -> None:
    """Else a missing package stops a run.  field case G04"""
    told = fakes.run(ONE_ENGINE, tmp_path, cufile=None).split(maxsplit=3)
    assert "libcufile.so.0" in told[3] and told[0] == "0"


@pytest.mark.skipif(bool(ctypes.util.find_library("cuda")), reason="CUDA is here")
def test_without_cuda_the_backend_says_so() -> None:
    """Else importing or building fails, or a symbol is missing in the middle.  field case G04"""
    with pytest.raises(SwapConfigError) as raised:
        Engine(backend="gds")
    assert "libcuda.so.1" in (raised.value.cause or "")


def test_registration_beyond_the_window_is_no_failure(fakes: Programs, tmp_path: Path) -> None:
    """Else the GPU's small window for drives is full, and 300 MB are not loaded.  field case G05"""
    fakes.run("""
memory = DeviceMemory(6_000_128, 0)
source = os.urandom(5 << 20)
whole = device_tensor(memory)
tensor = whole[: len(source)]
memory.fill(source + bytes(memory.nbytes - len(source)))
with Engine(backend="gds", thread_count=8) as engine:
    assert engine.register_memory(whole) == memory.nbytes
    file = engine.open(sized(folder / "a.swp", 6 << 20))
    engine.write(file, 0, tensor).wait()
    memory.fill(b"\\xaa" * memory.nbytes)
    engine.read(file, 0, tensor).wait()
    assert memory.content() == source + b"\\xaa" * (memory.nbytes - len(source))
    assert engine.gds_refusal is None
assert library("libcufile.so.0").fake_cufile_buffers() == 0
""", tmp_path, cufile="limit=4194304")


def test_memory_mapped_piece_by_piece_is_served_too(fakes: Programs, tmp_path: Path) -> None:
    """Else torch's own memory can't be moved under expandable_segments: cuFile itself ends the
    process when it is given such memory, so it is not.  field case G07"""
    told = fakes.run(ONE_ENGINE, tmp_path, cuda="mapped=1", cufile="limit=0 write=-5013")
    by_cufile, bounced, _, refusal = told.split()
    assert (by_cufile, refusal) == ("0", "None") and int(bounced) > 0


@pytest.mark.parametrize(
    ("script", "error", "errno"),
    [
        ("read=-1 errno=5", "SwapReadError", 5),
        ("write=-1 errno=5", "SwapWriteError", 5),
        ("write=-1 errno=28", "SwapSpaceError", 28),
    ],
)
def test_what_the_drive_says_is_the_transfers_end(
    fakes: Programs, tmp_path: Path, script: str, error: str, errno: int
) -> None:
    """Else a dying drive is taken for a refusal of GPUDirect Storage, and is asked again."""
    told = fakes.run(ROUND_TRIP + """
with Engine(backend="gds") as engine:
    engine.register_memory(tensor)
    file = engine.open(sized(folder / "a.swp", 16 << 20))
    try:
        round_trip(engine, file)
    except SwapError as raised:
        print(type(raised).__name__, raised.errno, engine.gds_refusal)
""", tmp_path, cufile=script)
    assert told == f"{error} {errno} None\n"


def test_short_counts_are_resumed(fakes: Programs, tmp_path: Path) -> None:
    """Else a tail is missing.  field case A07"""
    told = fakes.run(ONE_ENGINE, tmp_path, cufile="short=8704").split(maxsplit=3)
    assert int(told[2]) > 100 and told[3] == "None\n" and told[1] == "0"


@pytest.mark.parametrize("cuda", ("copy=700", "pinned=2"))
def test_failure_of_cuda_itself_is_a_typed_error(
    fakes: Programs, tmp_path: Path, cuda: str
) -> None:
    """Else there is nothing left to fall back to, and wrong bytes are served."""
    told = fakes.run(ROUND_TRIP + """
with Engine(backend="gds") as engine:
    engine.register_memory(tensor)
    file = engine.open(sized(folder / "a.swp", 16 << 20))
    for start in (engine.write, engine.read):
        try:
            start(file, 0, part).wait()
        except SwapError as raised:
            print(type(raised).__name__)
    print(engine.gds_refusal)
""", tmp_path, cuda=cuda, cufile="handle=5030")
    *errors, refusal = told.splitlines()
    assert errors == ["SwapWriteError", "SwapReadError"]
    assert "5030" in refusal and f"CUresult {cuda.partition('=')[2]}" in refusal


@pytest.mark.parametrize("cufile", ("", "handle=5030", "read=-5 after=2"))
def test_small_pieces_of_both_kinds_with_gaps_keep_to_their_places(
    fakes: Programs, tmp_path: Path, cufile: str
) -> None:
    """Else what is read over between two pieces, or a neighbour in host memory, lands in the wrong
    place."""
    fakes.run("""
memory = DeviceMemory(1 << 20, 0)
tensor = device_tensor(memory)
source = os.urandom(1 << 20)
path = sized(folder / "a.swp", 1 << 20)
path.write_bytes(source)
places = [(0, 4096), (4096, 8192), (20480, 4096), (32768, 12288), (49152, 4096), (57344, 5000)]
with Engine(backend="gds", thread_count=2) as engine:
    engine.register_memory(tensor)
    file = engine.open(path)
    memory.fill(b"\\xaa" * memory.nbytes)
    buffers = [
        torch.full((nbytes,), 0xAA, dtype=torch.uint8) if index % 3 == 2
        else tensor[500_000 // 4096 * 4096 + offset :][:nbytes]
        for index, (offset, nbytes) in enumerate(places)
    ]
    engine.read_many(file, [offset for offset, _ in places], buffers).wait()
    content = bytearray(b"\\xaa" * memory.nbytes)
    for index, (offset, nbytes) in enumerate(places):
        if index % 3 == 2:
            assert bytes(buffers[index].tolist()) == source[offset : offset + nbytes]
        else:
            begin = 500_000 // 4096 * 4096 + offset
            content[begin : begin + nbytes] = source[offset : offset + nbytes]
    assert memory.content() == bytes(content)
""", tmp_path, cufile=cufile)


@pytest.mark.parametrize("cufile", ("", "write=-5 after=40"))
def test_threads_with_files_and_memory_of_their_own_get_their_bytes(
    fakes: Programs, tmp_path: Path, cufile: str
) -> None:
    """Else threads share a stream or a bounce block, and take each other's bytes."""
    fakes.run("""
import threading
NBYTES = 3 << 20
wrong = []
with Engine(backend="gds", thread_count=3, block_nbytes=1 << 18) as engine:
    def work(number):
        memory = DeviceMemory(NBYTES, 0)
        tensor = device_tensor(memory)
        engine.register_memory(tensor)
        file = engine.open(sized(folder / f"{number}.swp", NBYTES))
        for turn in range(5):
            source = bytes([number, turn, 7]) * (NBYTES // 3)
            memory.fill(source)
            engine.write(file, 0, tensor).wait()
            memory.fill(b"\\xaa" * NBYTES)
            engine.read(file, 0, tensor).wait()
            if memory.content() != source:
                wrong.append((number, turn))
        engine.unregister_memory(tensor)
        file.close()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
assert not wrong, wrong
""", tmp_path, cufile=cufile)


def test_host_memory_of_any_size_is_served_by_the_same_engine(
    fakes: Programs, tmp_path: Path
) -> None:
    """Else one store needs two engines, whose orders nobody keeps.  field case A01"""
    fakes.run(ROUND_TRIP + """
with Engine(backend="gds") as engine:
    assert engine.register_memory(torch.zeros(1 << 20, dtype=torch.uint8)) == 0
    file = engine.open(sized(folder / "a.swp", 16 << 20))
    for nbytes in (1, 511, 4097, (1 << 20) + 1):
        for begin in (0, 1):
            source = torch.randint(0, 256, (nbytes + 1,), dtype=torch.uint8)[begin:]
            engine.write(file, 4096, source).wait()
            copy = torch.full_like(source, 0xAA)
            engine.read(file, 4096, copy).wait()
            assert torch.equal(source, copy), nbytes
    stats = engine.stats()
    assert stats.gpudirect_nbytes == stats.device_bounced_nbytes == 0
""", tmp_path)


def test_buffers_that_can_not_be_served_are_refused_before_anything_moves(
    fakes: Programs, tmp_path: Path
) -> None:
    """Else the engine copies device memory by the processor, which ends the process.

    field case G06: a place that is not aligned, which is slow, never reaches cuFile
    """
    told = fakes.run(ROUND_TRIP + """
with Engine(backend="gds") as engine:
    engine.register_memory(tensor)
    file = engine.open(sized(folder / "a.swp", 16 << 20))
    for buffer, offset in ((tensor[1:4097], 0), (tensor[:100], 0), (tensor[:4096], 512),
                           (tensor[4096:8000], 4096)):
        for start in (engine.read, engine.write):
            try:
                start(file, offset, buffer)
            except SwapError as raised:
                assert raised.fix
                print(end="x")
    engine.unregister_memory(tensor)
with Engine(backend="posix") as engine:
    try:
        engine.register_memory(torch.empty(4096, device="meta"))
    except SwapError as raised:
        print(end="x")
assert library("libcufile.so.0").fake_cufile_calls() == 0
""", tmp_path)
    assert told == "x" * 9


def test_forked_child_touches_nothing_of_it(fakes: Programs, tmp_path: Path) -> None:
    """Else the child gives back the parent's memory, or hangs in a copied lock."""
    fakes.run(ROUND_TRIP + """
engine = Engine(backend="gds")
engine.register_memory(tensor)
file = engine.open(sized(folder / "a.swp", 16 << 20))
round_trip(engine, file)
pid = os.fork()
if pid == 0:
    code = 1
    try:
        engine.read(file, 0, part)
    except SwapError as raised:
        assert 'child' in str(raised)
        engine.close()
        del memory, tensor, part
        code = 0 if library("libcuda.so.1").fake_cuda_retained() == 1 else 2
    os._exit(code)
round_trip(engine, file)
engine.close()
""", tmp_path)


def test_faults_of_the_drive_below_are_survived(fakes: Programs, tmp_path: Path) -> None:
    """The script that every backend is tested with."""
    fakes.run(ROUND_TRIP + """
with Engine(backend="gds", fault_script="any 1 errno 11; any 3 short 8192") as engine:
    engine.register_memory(tensor)
    round_trip(engine, engine.open(sized(folder / "a.swp", 16 << 20)))
    stats = engine.stats()
    assert stats.retry_count > 0 and stats.gpudirect_nbytes > 0
""", tmp_path)
