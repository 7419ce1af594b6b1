"""AIO calls that take a part, refuse for now, or are interrupted: nothing lost, nothing hangs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.kernel import build_preload, run_program

# What io_submit and io_getevents answer, by MODE; calls in order are told to the program at exit.
PARTIAL_AIO = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static const char *mode;
static int refused, reaped_since_refusal, retries_without_reaping, short_submits, interrupts;
static __attribute__((constructor)) void begin(void) { mode = getenv("MODE"); }

int io_setup(int count, void **context) { return (int)kernel(SYS_io_setup, count, context); }

int io_submit(void *context, long count, void **iocbs)
{
    if (refused && !reaped_since_refusal)
        retries_without_reaping++;
    if (!strcmp(mode, "always busy"))
        return -EAGAIN;
    if (!strcmp(mode, "full until reaped") && !reaped_since_refusal) {
        refused = 1;
        return -EAGAIN;
    }
    refused = reaped_since_refusal = 0;
    if (strcmp(mode, "three, then busy") != 0)
        return (int)kernel(SYS_io_submit, context, count, iocbs);
    if (short_submits % 2) { /* the call after a short one */
        short_submits++;
        refused = 1;
        return -EAGAIN;
    }
    if (count > 3) {
        short_submits++;
        count = 3;
    }
    return (int)kernel(SYS_io_submit, context, count, iocbs);
}

int io_getevents(void *context, long least, long most, void *events, void *timeout)
{
    reaped_since_refusal = 1;
    if (!strcmp(mode, "interrupted")) {
        if (interrupts++ % 2)
            return -EINTR;
        most = most < 1 ? most : 1;
    }
    return (int)kernel(SYS_io_getevents, context, least, most, events, timeout);
}

__attribute__((destructor)) static void tell(void)
{
    fprintf(stdout, "short submits %d, interrupts %d, retries without reaping %d\\n",
            short_submits, interrupts, retries_without_reaping);
}
"""

MOVE_ALL = """
path = folder / "a.swp"
path.touch()
os.truncate(path, 256 * 8192)
with Engine(backend="aio", queue_depth=int(os.environ["DEPTH"])) as engine:
    file = engine.open(path)
    sources = [torch.full((4096 + i,), i % 251, dtype=torch.uint8) for i in range(256)]
    for request in [engine.write(file, i * 8192, each) for i, each in enumerate(sources)]:
        request.wait(30)
    copies = [torch.full_like(source, 0xAA) for source in sources]
    for request in [engine.read(file, i * 8192, each) for i, each in enumerate(copies)]:
        request.wait(30)
    assert all(map(torch.equal, sources, copies))
    assert engine.stats().in_flight_count == 0
"""


def aio_in_mode(folder: Path, mode: str, depth: int = 32) -> dict[str, str]:
    library = build_preload(folder, PARTIAL_AIO)
    return {"LD_PRELOAD": str(library), "MODE": mode, "DEPTH": str(depth)}


def counts_in(told: str) -> dict[str, int]:
    parts = [part.rsplit(" ", 1) for part in told.strip().split(", ")]
    return {name: int(number) for name, number in parts}


@pytest.mark.parametrize(
    ("mode", "depth"),
    (
        ("three, then busy", 32),  # field case H04: wrong: the rest of the batch is dropped
        ("full until reaped", 4),  # field case H05: wrong: trying again without reaping
        ("interrupted", 32),  # field case H06: wrong: waiting for more events than are left
    ),
)
def test_requests_all_end_right_whatever_part_of_them_each_call_takes(
    tmp_path: Path, mode: str, depth: int
) -> None:
    """Each of these hung a training run somewhere."""
    environment = aio_in_mode(tmp_path, mode, depth)
    counts = counts_in(run_program(MOVE_ALL, tmp_path, environment=environment))
    assert counts["retries without reaping"] == 0
    assert (counts["short submits"] > 0) == (mode == "three, then busy")
    assert (counts["interrupts"] > 0) == (mode == "interrupted")


def test_kernel_that_stays_busy_fails_the_request_in_bounded_time(tmp_path: Path) -> None:
    """Temporary is not for ever: neither a broken device at once, nor a hang.  field case I06"""
    told = run_program(
        "path = folder / 'a.swp'\n"
        "path.touch(); os.truncate(path, 8192)\n"
        "with Engine(backend='aio') as engine:\n"
        "    request = engine.read(engine.open(path), 0, torch.empty(4096, dtype=torch.uint8))\n"
        "    try: request.wait(30)\n"
        "    except Exception as error: print(type(error).__name__, error.errno, error.path)\n"
        "    print(engine.stats().retry_count > 1)\n",
        tmp_path, environment=aio_in_mode(tmp_path, "always busy"),
    )
    assert told.splitlines()[:2] == [f"SwapReadError 11 {tmp_path / 'a.swp'}", "True"]
