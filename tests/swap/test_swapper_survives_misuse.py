"""What a user's slip, a fork or a full disk in the middle does to a swapper: nothing lasting."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nvmeswap import TensorSwapper
from nvmeswap.errors import SwapForkError, SwapSpaceError, SwapUsageError


def test_forked_child_changes_nothing_of_its_parents(tmp_path: Path) -> None:
    """Else a worker that touches the swapper cuts off its parent's file."""
    with TensorSwapper(tmp_path) as swapper:
        swapper.swap_out("a", torch.arange(10.0))
        (path,) = tmp_path.rglob("tensors.swp")
        nbytes = path.stat().st_size
        huge = torch.zeros(50_000_000)  # not in the child: torch's threads are not there
        child = os.fork()
        if child == 0:
            code = 1
            try:
                swapper.swap_out("huge", huge)
            except SwapForkError:
                code = 0
            finally:
                swapper.close()
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert path.stat().st_size == nbytes
        assert torch.equal(swapper.swap_in("a"), torch.arange(10.0))


def test_disk_that_fills_up_in_the_middle_of_many_names_what_was_not_written(
    tmp_path: Path, mount_tmpfs: Callable[[str], Path]
) -> None:
    """Else old values are read as if they were the new ones."""
    folder = mount_tmpfs("tmpfs -o size=150m")
    old = {f"k{i:04d}": torch.full((8192,), float(i)) for i in range(2000)}
    with TensorSwapper(folder) as swapper:
        swapper.swap_out_many(old)
        new = {
            key: tensor + 0.5 if i < 500 or i >= 1500 else torch.full((64_000,), i + 0.5)
            for i, (key, tensor) in enumerate(old.items())
        }
        with pytest.raises(SwapSpaceError) as raised:
            swapper.swap_out_many(new)
        assert "also failed" in (raised.value.cause or "")
        written = 0
        left = swapper.keys()
        for key in left:
            got = swapper.swap_in(key)
            fresh = got.shape == new[key].shape and torch.equal(got, new[key])
            assert fresh or torch.equal(got, old[key])
            written += fresh
        assert written >= 500  # those whose block had space, before and behind the full one
        swapper.swap_out("more", torch.ones(10))
        assert torch.equal(swapper.swap_in("more"), torch.ones(10))


def test_tensor_whose_storage_was_freed_is_refused(tmp_path: Path) -> None:
    """Else the process dies of it."""
    program = f"""
import torch
from nvmeswap import TensorSwapper
from nvmeswap.errors import SwapUsageError
with TensorSwapper({str(tmp_path)!r}) as swapper:
    tensor = torch.ones(4096)
    swapper.swap_out("a", tensor)
    tensor.untyped_storage().resize_(0)
    for call in (lambda: swapper.swap_out("a", tensor), lambda: swapper.swap_in("a", out=tensor),
                 lambda: swapper.swap_out("b", torch._efficientzerotensor((1000,)))):
        try:
            call()
        except SwapUsageError:
            continue
        raise SystemExit("accepted")
    swapper.swap_out("c", torch.ones(5))
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True,
                          check=False, timeout=120, cwd=Path(__file__).parents[2])
    assert done.stdout.strip() == "fine", done.stderr


def test_parameter_of_another_stride_takes_what_was_stored(tmp_path: Path) -> None:
    """Else "any stride" is untrue for the tensors that matter most."""
    with TensorSwapper(tmp_path) as swapper:
        tensor = torch.randn(4, 5).t()
        swapper.swap_out("a", tensor)
        parameter = torch.nn.Parameter(torch.empty(5, 4))
        swapper.swap_in("a", out=parameter)
        assert torch.equal(parameter, tensor)
        for useless in (torch.empty(1, 4).expand(5, 4), torch.empty(5, 4, device="meta")):
            with pytest.raises(SwapUsageError):
                swapper.swap_in("a", out=useless)


def test_interrupts_at_any_time_leave_memory_sound(tmp_path: Path) -> None:
    """Else a read lands in memory that was freed, and the process dies of it later."""
    program = f"""
import faulthandler, random, signal, time, torch
from nvmeswap import TensorSwapper
faulthandler.dump_traceback_later(150)
class Interrupt(KeyboardInterrupt): pass
def interrupt(*_): raise Interrupt
swapper = TensorSwapper({str(tmp_path)!r})
tensors = {{f"k{{i}}": torch.full((1024,), 7.0) for i in range(4096)}}
swapper.swap_out_many(tensors)
signal.signal(signal.SIGALRM, interrupt)
random.seed(5)
for _ in range(15):
    try:
        signal.setitimer(signal.ITIMER_REAL, random.random() * 0.05)
        swapper.swap_in_many(tensors)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Interrupt:
        pass
    others = [torch.zeros(1024) for _ in range(4096)]
    time.sleep(0.02)
    assert not any(each.any() for each in others)
back = swapper.swap_in_many(tensors)
assert all(torch.equal(back[key], tensors[key]) for key in tensors)
print("fine", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True,
                          check=False, timeout=200, cwd=Path(__file__).parents[2])
    assert done.stdout.strip() == "fine", done.stderr[-2000:]
