"""Every wait can time out, every end is safe: timeouts, close, collection, fork, exit."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nvmeswap.errors import SwapForkError, SwapTimeoutError
from nvmeswap.io import Engine, Lane, Request

MakeBytes = Callable[..., torch.Tensor]
SHORTLY_S = 0.05


def run_python(program: str, path: Path) -> subprocess.CompletedProcess[str]:
    prelude = "import os, sys, torch\nfrom pathlib import Path\nfrom nvmeswap.io import *\n"
    command = [sys.executable, "-X", "faulthandler", "-c", prelude + program, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False,
                          cwd=Path(__file__).parents[2])


def test_waiter_for_what_never_comes_times_out_and_others_are_served(
    swap_path: Path, random_bytes: MakeBytes
) -> None:
    """Else one lost completion hangs the training run without a word."""
    engine = Engine(fault_script="read 1 never")
    file = engine.open(swap_path)
    lost = engine.read(file, 0, torch.empty(4096, dtype=torch.uint8))
    source = random_bytes(8192)
    engine.write(file, 8192, source).wait()
    for _ in range(2):
        with pytest.raises(SwapTimeoutError) as raised:
            lost.wait(SHORTLY_S)
        assert raised.value.path == swap_path
    assert not lost.done()
    for _ in range(2):
        with pytest.raises(SwapTimeoutError):
            engine.close(SHORTLY_S)
    assert not lost.done()


def test_waiter_after_a_timeout_gets_the_result_when_it_comes(swap_path: Path) -> None:
    """Else a slow disk turns into a failed step although the bytes are on their way."""
    with Engine(fault_script="read 1 never") as engine:
        file = engine.open(swap_path)
        request = engine.read(file, 0, torch.empty(4096, dtype=torch.uint8))
        with pytest.raises(SwapTimeoutError):
            request.wait(0.0)
        engine.inject("")
        request.wait(None)
        request.wait(0.0)


def test_closer_while_writes_are_queued_lands_them_first(
    swap_path: Path, random_bytes: MakeBytes
) -> None:
    """Else close frees memory that the kernel still reads, or drops writes."""
    source = random_bytes(4 << 20, 1)
    with Engine(fault_script="write 1 delay 50", queue_depth=1, block_nbytes=65_536) as engine:
        request = engine.write(engine.open(swap_path), 0, source, lane=Lane.WRITEBACK)
    assert request.done()
    assert swap_path.read_bytes()[: source.nbytes] == source.numpy().tobytes()


def test_reader_who_drops_every_reference_does_no_harm(
    swap_path: Path, random_bytes: MakeBytes
) -> None:
    """Else a late read lands in memory that belongs to somebody else.  field case H09"""
    with Engine(fault_script="read * never") as engine:
        file = engine.open(swap_path)
        buffer = torch.empty(1 << 20, dtype=torch.uint8)
        alive = weakref.ref(buffer)
        engine.read(file, 0, buffer)
        file.close()
        del buffer, file
        gc.collect()
        assert alive() is not None
        junk = [random_bytes(1 << 20) for _ in range(4)]
        kept = [tensor.clone() for tensor in junk]
        assert engine.stats().in_flight_count == 1
        engine.inject("")
    gc.collect()
    assert alive() is None
    assert all(map(torch.equal, junk, kept))


def test_engine_dropped_with_a_read_in_flight_outlives_it(swap_path: Path) -> None:
    """Else the collector frees engine, request and buffer as one heap of cycles."""

    def start() -> tuple[weakref.ref[Engine], weakref.ref[torch.Tensor], Request]:
        engine = Engine(fault_script="read 1 never")
        buffer = torch.empty(4096, dtype=torch.uint8)
        request = engine.read(engine.open(swap_path), 0, buffer)
        return weakref.ref(engine), weakref.ref(buffer), request

    engine, buffer, request = start()
    gc.collect()
    assert engine() is not None
    assert buffer() is not None
    engine().inject("")
    request.wait()
    gc.collect()
    assert engine() is None
    assert buffer() is None
    request.wait()


def test_waiters_in_many_threads_all_get_the_answer(
    swap_path: Path, random_bytes: MakeBytes
) -> None:
    """Else a request can be waited for by its submitter only, or by one thread only."""
    source = random_bytes(1 << 20)
    problems: list[BaseException] = []
    with Engine(queue_depth=4) as engine:
        file = engine.open(swap_path)
        engine.write(file, 0, source).wait()

        def work(number: int) -> None:
            try:
                for step in range(50):
                    destination = torch.empty(5000 + number + step, dtype=torch.uint8)
                    engine.read(file, 4096 * number, destination).wait()
                    assert torch.equal(destination, source[4096 * number :][: destination.numel()])
                shared.wait()
            except BaseException as error:
                problems.append(error)

        shared = engine.read(file, 0, torch.empty_like(source))
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert problems == []


def test_forked_child_gets_a_typed_error_and_the_parent_is_unharmed(
    swap_path: Path, random_bytes: MakeBytes
) -> None:
    """Else every DataLoader worker hangs on threads that it doesn't have."""
    source = random_bytes(65_536)
    with Engine(fault_script="read 1 never") as engine:
        file = engine.open(swap_path)
        engine.write(file, 0, source).wait()
        destination = torch.full_like(source, 0xAA)
        request = engine.read(file, 0, destination)
        child = os.fork()
        if child == 0:
            refused = 0
            calls = (
                engine.stats, request.wait, request.done, lambda: engine.open(swap_path),
                lambda: engine.read(file, 0, destination),
            )
            for call in calls:
                try:
                    call()
                except SwapForkError:
                    refused += 1
            engine.close()
            file.close()
            os._exit(0 if refused == len(calls) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        engine.inject("")
        request.wait()
        assert torch.equal(source, destination)


def test_process_that_fails_with_writes_in_flight_shows_its_own_error(swap_path: Path) -> None:
    """Else an abort at exit hides what went wrong.  field case H01"""
    done = run_python(
        "engine = Engine(fault_script='write * delay 20')\n"
        "file = engine.open(Path(sys.argv[1]))\n"
        "for i in range(8): engine.write(file, i << 20, torch.ones(1 << 20, dtype=torch.uint8))\n"
        "raise ValueError('the user is told this')\n",
        swap_path,
    )
    assert done.returncode == 1, done.stderr
    assert "ValueError: the user is told this" in done.stderr
    assert swap_path.read_bytes()[: 8 << 20] == b"\1" * (8 << 20)


def test_process_with_a_lost_read_exits_all_the_same(swap_path: Path) -> None:
    """Else a dead drive keeps the job from ending."""
    done = run_python(
        "engine = Engine(fault_script='read 1 never')\n"
        "engine.read(engine.open(Path(sys.argv[1])), 0, torch.empty(4096, dtype=torch.uint8))\n"
        "try: engine.close(0.05)\n"
        "except Exception as error: print(type(error).__name__)\n",
        swap_path,
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "SwapTimeoutError", "")


def test_forked_child_that_exits_normally_leaves_the_engine_alone(swap_path: Path) -> None:
    """Else the child's exit waits for, or closes, what the parent still uses."""
    done = run_python(
        "engine = Engine()\n"
        "file = engine.open(Path(sys.argv[1]))\n"
        "child = os.fork()\n"
        "if child == 0: sys.exit(3)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3\n"
        "engine.write(file, 0, torch.ones(4096, dtype=torch.uint8)).wait()\n",
        swap_path,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_waiter_who_presses_ctrl_c_is_let_go(swap_path: Path) -> None:
    """Else the only way out of a slow wait is kill -9."""
    done = run_python(
        "import signal, threading\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # background jobs ignore it
        "engine = Engine(fault_script='read 1 never')\n"
        "request = engine.read(engine.open(Path(sys.argv[1])), 0, torch.empty(1))\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.1)\n"
        "signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))\n"
        "try: request.wait(None)\n"
        "except KeyboardInterrupt: print('let go')\n"
        "try: engine.close(0.0)\n"
        "except Exception: pass\n",
        swap_path,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "let go"), done.stderr
