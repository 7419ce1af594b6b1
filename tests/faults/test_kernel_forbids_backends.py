"""Where io_uring or AIO is forbidden, limited or used up, training goes on and says why."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.faults.kernel import IO_SETUP, IO_URING_SETUP, build_preload, needs_x86_64, run_program

ROUND_TRIP = """
def round_trip(backend_wanted):
    assert probe_folder(folder).backend == backend_wanted, probe_folder(folder)
    with TensorSwapper(folder) as swapper:
        for seed, numel in enumerate((1, 513, 300_001)):
            tensor = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
            swapper.swap_out("t", tensor)
            assert torch.equal(swapper.swap_in("t"), tensor)
"""


@needs_x86_64
@pytest.mark.parametrize("code", (errno.EPERM, errno.ENOSYS))
@pytest.mark.parametrize(
    ("calls", "backend"), (((IO_URING_SETUP,), "aio"), ((IO_URING_SETUP, IO_SETUP), "posix"))
)
def test_swapper_in_a_container_climbs_down_and_moves_exact_data(
    tmp_path: Path, code: int, calls: tuple[int, ...], backend: str
) -> None:
    """Docker's profile forbids io_uring, a stricter one AIO too.  field case I01"""
    program = f"forbid({code}, {', '.join(map(str, calls))})\nround_trip({backend!r})\n"
    run_program(ROUND_TRIP + program, tmp_path)


@needs_x86_64
@pytest.mark.parametrize(
    ("code", "words"),
    (
        (errno.EPERM, ("EPERM", "seccomp", "kernel.io_uring_disabled")),
        (errno.ENOSYS, ("ENOSYS", "seccomp", "the kernel has no io_uring")),
    ),
)
def test_user_who_chose_io_uring_where_it_is_forbidden_learns_cause_and_remedy(
    tmp_path: Path, code: int, words: tuple[str, ...]
) -> None:
    """Else he looks for the fault in file permissions, or gets another backend in silence.

    field cases I01, I02
    """
    told = run_program(
        f"forbid({code}, {IO_URING_SETUP})\n"
        "try: probe_folder(folder, backend='uring')\n"
        "except Exception as error: print(type(error).__name__, error.cause, 'FIX', error.fix)\n",
        tmp_path,
    )
    assert told.startswith("SwapPathError uring")
    assert all(word in told for word in words), told
    assert '"backend"' in told.partition("FIX")[2]  # the setting that avoids it
    assert '"auto"' in told.partition("FIX")[2]


@needs_x86_64
def test_reasons_are_kept_and_nothing_is_printed_where_auto_found_a_backend(tmp_path: Path) -> None:
    """A message at every start teaches users to ignore messages.  field cases I01, I02, J01"""
    told = run_program(
        "warnings.simplefilter('error')\n"
        f"forbid({errno.EPERM}, {IO_URING_SETUP})\n"
        "found = probe_folder(folder)\n"
        "reasons = {each.backend: each.reason for each in found.refused}\n"
        "print(found.backend, list(reasons), 'seccomp' in reasons['uring'])\n",
        tmp_path,
    )
    assert told.strip() == "aio ['uring'] True"


def test_memory_that_may_not_be_locked_is_moved_unregistered(tmp_path: Path) -> None:
    """Swapping must not need `ulimit -l unlimited`.  field case I03

    16 MiB with a limit of 8 and of almost nothing, without CAP_IPC_LOCK, which lifts the limit. A
    limit of 0 costs the ring itself on some kernels.
    """
    told = run_program(
        "import resource, tempfile\n"
        "hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]\n"
        "from nvmeswap.memory.arena import Arena\n"
        "path = folder / 'a.swp'\n"
        "path.touch(); os.truncate(path, 16 << 20)\n"
        "user = os.geteuid()\n"
        "for limit in (8 << 20, 16384):\n"
        "    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, hard))\n"
        "    arena = Arena(16 << 20, pin_memory=False)\n"
        "    if user == 0: os.seteuid(65534)\n"  # a ring made without the capability
        "    engine = Engine(backend='uring')\n"
        "    if user == 0: os.seteuid(0)\n"
        "    registered = engine.register_memory(arena.memory)\n"
        "    assert engine.stats().registered_nbytes == registered\n"
        "    print(limit, registered < 16 << 20, registered <= limit)\n"
        "    source = torch.randint(0, 256, (16 << 20,), dtype=torch.uint8)\n"
        "    arena.memory.copy_(source)\n"
        "    file = engine.open(path)\n"
        "    engine.write(file, 0, arena.memory).wait()\n"
        "    arena.memory.fill_(0xAA)\n"
        "    engine.read(file, 0, arena.memory).wait()\n"
        "    assert torch.equal(arena.memory, source)\n"
        "    engine.close()\n"
        "    arena.close()\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, hard))\n"
        "with tempfile.TemporaryDirectory() as shared:\n"
        "    if user == 0: os.chown(shared, 65534, 65534); os.seteuid(65534)\n"
        "    found = probe_folder(Path(shared))\n"
        "    if user == 0: os.seteuid(0)\n"
        "print(found.backend)\n",
        tmp_path,
    )
    assert told.splitlines()[:2] == [f"{8 << 20} True True", "16384 True True"]
    assert told.splitlines()[2] in ("uring", "aio", "posix")


@needs_x86_64
def test_ranks_that_get_no_ring_fall_back_each_for_itself(tmp_path: Path) -> None:
    """Older kernels count rings against a limit of the user, not of the process.  field case I04"""
    told = run_program(
        ROUND_TRIP
        + "children = []\n"
        "for rank in range(8):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        code = 1\n"
        "        try:\n"
        f"            if rank >= 4: forbid({errno.ENOMEM}, {IO_URING_SETUP})\n"
        "            round_trip('aio' if rank >= 4 else 'uring')\n"
        "            code = 0\n"
        "        finally:\n"
        "            os._exit(code)\n"
        "    children.append(child)\n"
        "print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])\n",
        tmp_path,
    )
    assert told.strip() == str([0] * 8)
    assert [path.name for path in (tmp_path / "nvmeswap").iterdir()] == [".lock"]


# Grants contexts of a few events only, as where fs.aio-max-nr is nearly used up, and counts what is
# in flight.
SMALL_IO_SETUP = """
#include <stdio.h>
#include <stdlib.h>
static long granted, in_flight, most_in_flight;
int io_setup(int count, void **context)
{
    if (count > atoi(getenv("EVENTS_LEFT")))
        return -EAGAIN;
    granted = count;
    return (int)kernel(SYS_io_setup, count, context);
}
int io_submit(void *context, long count, void **iocbs)
{
    long taken = kernel(SYS_io_submit, context, count, iocbs);
    in_flight += taken > 0 ? taken : 0;
    if (in_flight > most_in_flight)
        most_in_flight = in_flight;
    return (int)taken;
}
int io_getevents(void *context, long least, long most, void *events, void *timeout)
{
    long count = kernel(SYS_io_getevents, context, least, most, events, timeout);
    in_flight -= count > 0 ? count : 0;
    return (int)count;
}
__attribute__((destructor)) static void tell(void)
{
    if (granted)
        printf("granted %ld, within %d\\n", granted, most_in_flight <= granted);
}
"""


def few_events(folder: Path, count: int) -> dict[str, str]:
    return {"LD_PRELOAD": str(build_preload(folder, SMALL_IO_SETUP)), "EVENTS_LEFT": str(count)}


def test_engine_where_events_are_short_takes_a_shallower_queue(tmp_path: Path) -> None:
    """io_setup counts against fs.aio-max-nr for the whole machine.  field case I05"""
    told = run_program(
        "path = folder / 'a.swp'\n"
        "path.touch(); os.truncate(path, 4 << 20)\n"
        "source = torch.randint(0, 256, (4 << 20,), dtype=torch.uint8)\n"
        "copy = torch.full_like(source, 0xAA)\n"
        "with Engine(backend='aio', queue_depth=128, block_nbytes=4096) as engine:\n"
        "    file = engine.open(path)\n"
        "    engine.write(file, 0, source).wait()\n"
        "    engine.read(file, 0, copy).wait()\n"
        "assert torch.equal(source, copy)\n",
        tmp_path, environment=few_events(tmp_path, 32),
    )
    assert told.strip() == "granted 32, within 1"


def test_user_of_aio_where_all_events_are_used_up_is_shown_both_numbers(tmp_path: Path) -> None:
    """EAGAIN says "try again", which never helps here.  field case I05"""
    told = run_program(
        "try: probe_folder(folder, backend='aio')\n"
        "except Exception as error: print(type(error).__name__, error.cause)\n",
        tmp_path, environment=few_events(tmp_path, 0),
    )
    most = Path("/proc/sys/fs/aio-max-nr").read_text().strip()
    assert told.startswith("SwapPathError")
    assert f"fs.aio-max-nr {most}" in told
    assert "fs.aio-nr is " in told
