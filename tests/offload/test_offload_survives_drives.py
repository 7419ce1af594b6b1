"""A drive that fails, is late, full or wrong: a typed error, and trying again is right."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nvmeswap import OffloadManager
from nvmeswap.config import SwapBlock
from nvmeswap.errors import (
    SwapChecksumError,
    SwapError,
    SwapIOError,
    SwapReadError,
    SwapSpaceError,
    SwapTimeoutError,
)
from nvmeswap.io.engine import Engine
from tests.offload.conftest import Manage
from tests.offload.runs import (
    DIM,
    assert_equal,
    frozen,
    input_of,
    one_pass,
    train,
)
from tests.oracle import Run


def on_disk(layers: int = 6) -> nn.Sequential:
    """Units that are worth a file."""
    torch.manual_seed(0)
    inner = (nn.Linear(96, 96) for _ in range(layers - 2))
    return nn.Sequential(nn.Linear(DIM, 96), *inner, nn.Linear(96, DIM))


def until_it_succeeds(model: nn.Module, kinds: tuple[type[SwapError], ...]) -> tuple[Run, int]:
    for failure_count in range(5):
        try:
            return one_pass(model), failure_count
        except kinds as error:
            assert error.fix or error.errno or error.intact
    raise AssertionError("it never succeeds")


@pytest.mark.parametrize("kind", ["frozen", "trained"])
@pytest.mark.parametrize("number", [1, 2, 5, 8, 11])
def test_read_that_fails_is_told_and_tried_again(
    manage: Manage, engines: list[Engine], number: int, kind: str
) -> None:
    """In forward, in backward, ahead of a use. section 4: 25"""
    plain, model = on_disk(), on_disk()
    if kind == "frozen":
        frozen(plain), frozen(model)
    expected = one_pass(plain)
    manager = manage(model, trainable="nvme")
    for _ in range(2):  # the second one with reads ahead
        engines[-1].inject(f"read {number} errno {errno.EIO}")
        ours, failure_count = until_it_succeeds(model, (SwapReadError,))
        assert failure_count <= 1
        engines[-1].inject("")
        assert_equal(ours, expected)
        assert manager.stats().resident_nbytes == 0
        until_it_succeeds(model, (SwapReadError,))  # one may have failed ahead of its use
    assert_equal(train(model), train(plain))


def test_read_error_names_the_file_and_the_cause(manage: Manage, engines: list[Engine]) -> None:
    model = frozen(on_disk())
    manager = manage(model)
    engines[-1].inject(f"read * errno {errno.EIO}")
    with pytest.raises(SwapReadError) as raised:
        model(input_of(0))
    assert raised.value.errno == errno.EIO and raised.value.path
    assert manager.stats().resident_nbytes == 0
    engines[-1].inject("")
    assert torch.equal(model(input_of(0)), on_disk()(input_of(0)))


@pytest.mark.parametrize("script", ["read * short 4096", "read * busy", "seed 3 rate 50 late,delay",
                                    "read * delay 3", "read * late 2"])
def test_reads_that_come_in_parts_or_late_are_whole(
    manage: Manage, engines: list[Engine], script: str
) -> None:
    plain, model = on_disk(), on_disk()
    manage(model, trainable="nvme")
    if script == "read * busy":
        script = "; ".join(f"read {number} busy" for number in range(1, 20, 2))
    engines[-1].inject(script)
    assert_equal(train(model), train(plain))


def test_bit_that_flips_is_found(manage: Manage, engines: list[Engine]) -> None:
    model = frozen(on_disk())
    manager = manage(model)
    engines[-1].inject("read * flip")
    with pytest.raises(SwapChecksumError):
        model(input_of(0))
    assert manager.stats().resident_nbytes == 0
    engines[-1].inject("")
    assert torch.equal(model(input_of(0)), on_disk()(input_of(0)))


def test_drive_that_does_not_answer_is_given_up_and_waited_for_again(
    manage: Manage, engines: list[Engine]
) -> None:
    model = frozen(on_disk())
    manager = manage(model, swap=SwapBlock(timeout_s=0.2))
    engines[-1].inject("read 2 never")
    with pytest.raises(SwapTimeoutError):
        model(input_of(0))
    engines[-1].inject("")
    assert torch.equal(model(input_of(0)), on_disk()(input_of(0)))
    model(input_of(0)).sum()
    with torch.no_grad():
        model(input_of(0))
    assert manager.stats().resident_nbytes == 0


@pytest.mark.parametrize("number", [1, 3, 6])
def test_write_that_fails_is_told_and_loses_no_update(
    manage: Manage, engines: list[Engine], number: int
) -> None:
    """Updates made in place go to the drive some time; what fails can be tried again."""
    plain, model = on_disk(), on_disk()
    manager = manage(model, trainable="nvme")
    assert_equal(train(model, steps=1), train(plain, steps=1))
    engines[-1].inject(f"write {number} errno {errno.EIO}")
    with torch.no_grad():
        for each in (plain, model):
            for parameter in each.parameters():
                parameter.mul_(0.5)
    for _ in range(3):
        try:
            ours = one_pass(model)
            break
        except SwapIOError as error:
            assert error.errno == errno.EIO
    assert_equal(ours, one_pass(plain))
    manager.close()
    assert_equal(one_pass(model), one_pass(plain))


def test_disk_too_small_is_told_before_the_model_is_touched(
    mount_tmpfs: Callable[[str], Path],
) -> None:
    """section 4: 25"""
    folder = mount_tmpfs("tmpfs -o size=2m")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    places = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(SwapSpaceError) as raised:
        OffloadManager(model, "cpu", path=folder, trainable="nvme")
    assert raised.value.fix
    assert places == [parameter.data_ptr() for parameter in model.parameters()]
    for module in model.modules():
        assert not module._forward_pre_hooks and not module._forward_hooks
    assert [path for path in folder.rglob("*.swp") if path.stat().st_size] == []
    model(torch.ones(1, 512)).sum().backward()


def test_write_that_fails_while_it_is_made_leaves_the_model(
    engines: list[Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever it is, of weights or of space."""

    number = 0

    def open_engine(**options: Any) -> Engine:
        engines.append(Engine(fault_script=f"write {number} errno {errno.EIO}", **options))
        return engines[-1]

    monkeypatch.setattr("nvmeswap.swap.space.Engine", open_engine)
    expected = one_pass(on_disk())
    for number in (1, 2, 4):  # noqa: B007
        model = on_disk()
        with pytest.raises(SwapError):
            OffloadManager(model, "cpu", path=tmp_path, trainable="nvme")
        assert_equal(one_pass(model), expected)
        assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("buffer_count, prefetch", [(1, 0), (1, 4), (2, 100), (1, 1)])
@pytest.mark.parametrize("script", ["", "read * late 1", "seed 1 rate 30 delay"])
def test_full_pool_waits(
    manage: Manage, engines: list[Engine], buffer_count: int, prefetch: int, script: str
) -> None:
    """features B19, section 4: 19; field case C09"""
    plain, model = on_disk(), on_disk()
    manage(model, trainable="nvme", buffer_count=buffer_count, prefetch=prefetch)
    engines[-1].inject(script)
    assert_equal(train(model), train(plain))




def test_edits_that_nobody_can_tell_of_are_an_error(manage: Manage) -> None:
    """A write through `.data` is seen in the page table; without a descriptor to read that it would
    be lost in silence."""
    plain, model = frozen(on_disk()), frozen(on_disk())
    x = torch.randn(2, DIM)
    manage(model, tier="nvme")
    with torch.no_grad():
        for each in (plain, model):
            each[1].weight.data.add_(1)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        try:
            with pytest.raises(SwapReadError) as told:
                model(x)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert told.value.errno == errno.EMFILE
        assert torch.equal(model(x), plain(x))
