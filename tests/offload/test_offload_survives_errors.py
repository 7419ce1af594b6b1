"""After any error the device is empty, the error is the original one, and trying again is right.

Torch tells nobody that a backward has failed, nor of Ctrl-C in a forward: what they leave, the
window at most, goes with the next forward, or with `after_backward()`.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nvmeswap import OffloadManager
from nvmeswap.config import SwapBlock
from nvmeswap.errors import (
    SwapChecksumError,
    SwapClosedError,
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
    call,
    forward_and_backward,
    frozen,
    infer,
    input_of,
    stack,
    train,
)
from tests.oracle import Run
from tests.swap.interrupts import Interrupt, interrupted_everywhere

tiers = pytest.mark.parametrize("tier", ["cpu", "nvme"])


class Boom(Exception):
    pass


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise Boom


class Fuse(nn.Module):
    """Raises where it is told to; in other calls it is nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.where = ""
        self.error: type[BaseException] = Boom

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward" or (
            self.where == "recomputation" and torch._C._current_graph_task_id() != -1
        ):
            raise self.error
        return RaisesInBackward.apply(x) if self.where == "backward" else x.clone()


class Fused(nn.Module):
    """Layers of which one may fail, inside a block."""

    def __init__(self, checkpointing: str = "none") -> None:
        super().__init__()
        self.first, self.last = stack(2), stack(2)
        self.fuse = Fuse()
        self.middle = nn.Sequential(nn.Linear(DIM, DIM), self.fuse, nn.Linear(DIM, DIM))
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.checkpointing == "none":
            x = self.middle(x)
        else:
            reentrant = self.checkpointing == "reentrant"
            x = checkpoint(self.middle, x, use_reentrant=reentrant)
        return self.last(x)


def fused(checkpointing: str = "none") -> Fused:
    torch.manual_seed(0)
    return Fused(checkpointing)


def one_pass(model: nn.Module, number: int = 0) -> Run:
    model.zero_grad()
    numbers = forward_and_backward(model, call, number)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            numbers[f"gradient of {name}"] = parameter.grad.detach().cpu().clone()
    return Run([], numbers)


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("where", ["forward", "recomputation", "backward"])
@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt, MemoryError])
@tiers
def test_error_of_the_model_comes_out_and_leaves_nothing(
    manage: Manage, tier: str, where: str, error: type[BaseException], checkpointing: str
) -> None:
    """features C5, C6, F10, G1, section 4: 9"""
    if where == "recomputation" and checkpointing == "none":
        pytest.skip("nothing is computed again")
    expected = one_pass(fused(checkpointing))
    model = fused(checkpointing)
    manager = manage(model, tier=tier, trainable=tier)
    for _ in range(2):
        model.fuse.where, model.fuse.error = where, error
        with pytest.raises(Boom if where == "backward" else error):
            one_pass(model)
        assert_emptied(manager, is_told=where == "forward" and issubclass(error, Exception))
        model.fuse.where = ""
        assert_equal(one_pass(model), expected)
        assert manager.stats().resident_nbytes == 0
    model.fuse.where = where
    with torch.no_grad():
        if where == "forward":
            with pytest.raises(error):
                model(input_of(0))
        assert_emptied(manager, is_told=issubclass(error, Exception))
    model.fuse.where = ""
    assert_equal(train(model), train(fused(checkpointing)))


def assert_emptied(manager: OffloadManager, *, is_told: bool) -> None:
    """`is_told`: whether torch tells of such errors."""
    if not is_told:
        assert manager.stats().resident_unit_count <= 2
        manager.after_backward()
    assert manager.stats().resident_nbytes == 0


HOOKS: dict[str, Callable[[nn.Module, Callable[..., None]], Any]] = {
    "forward pre-hook": lambda layer, hook: layer.register_forward_pre_hook(hook),
    "forward hook": lambda layer, hook: layer.register_forward_hook(hook),
    "backward pre-hook": lambda layer, hook: layer.register_full_backward_pre_hook(hook),
    "backward hook": lambda layer, hook: layer.register_full_backward_hook(hook),
    "gradient hook": lambda layer, hook: layer.weight.register_hook(hook),
    "accumulated": lambda layer, hook: layer.weight.register_post_accumulate_grad_hook(hook),
}


@pytest.mark.parametrize("registered", ["before", "after"])
@pytest.mark.parametrize("kind", HOOKS)
@tiers
def test_error_of_a_users_hook_comes_out_and_leaves_nothing(
    manage: Manage, tier: str, kind: str, registered: str
) -> None:
    def hook(*_: Any) -> None:
        raise Boom

    expected, model = one_pass(fused()), fused()
    if registered == "before":
        handle = HOOKS[kind](model.middle[0], hook)
    manager = manage(model, tier=tier, trainable=tier)
    if registered == "after":
        handle = HOOKS[kind](model.middle[0], hook)
    with pytest.raises(Boom):
        one_pass(model)
    assert_emptied(manager, is_told=kind.startswith("forward"))
    handle.remove()
    assert_equal(one_pass(model), expected)
    assert manager.stats().resident_nbytes == 0


@pytest.mark.parametrize("kind", ["frozen", "trained"])
@tiers
def test_interrupted_anywhere_it_goes_on(manage: Manage, tier: str, kind: str) -> None:
    """Ctrl-C in our own code. features C5"""
    plain, model = stack(2), stack(2)
    if kind == "frozen":
        frozen(plain), frozen(model)
    expected = one_pass(plain)
    manager = manage(model, tier=tier, trainable=tier)
    one_pass(model)
    points = []
    for point in interrupted_everywhere(lambda: one_pass(model), apart=37):
        points.append(point)
        assert_equal(one_pass(model), expected)
        assert manager.stats().resident_nbytes == 0
    assert len(points) > 5
    manager.close()
    assert_equal(one_pass(model), expected)


@tiers
def test_interrupted_while_it_is_made_the_model_is_as_before(
    tmp_path: Path, tier: str
) -> None:
    plain, model = stack(2), stack(2)
    expected = one_pass(plain)
    options: dict[str, Any] = {"path": tmp_path} if tier == "nvme" else {}

    def make() -> None:
        OffloadManager(model, "cpu", tier=tier, trainable=tier, **options).close()

    for _ in interrupted_everywhere(make, apart=211):
        assert_equal(one_pass(model), expected)
    assert not any(module._forward_pre_hooks for module in model.modules())


@tiers
def test_interrupt_at_a_load_leaves_nothing(manage: Manage, tier: str) -> None:
    """Also in a layer that a prefetched one follows. features G1"""
    expected, model = one_pass(stack()), stack()
    manager = manage(model, tier=tier, trainable=tier)
    one_pass(model)

    def interrupt(*_: Any) -> None:
        raise Interrupt

    for layer in model:
        handle = layer.register_forward_pre_hook(interrupt)
        with pytest.raises(Interrupt):
            one_pass(model)
        handle.remove()
        assert_emptied(manager, is_told=False)
        assert_equal(one_pass(model), expected)


# --- the drive -----------------------------------------------------------------------------------


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


@pytest.mark.parametrize("script", ["read * short 4096", "read * busy", "seed 3 rate 50 late,short",
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


# --- misuse --------------------------------------------------------------------------------------


@tiers
def test_closed_manager_refuses_and_the_model_goes_on(manage: Manage, tier: str) -> None:
    plain, model = stack(), stack()
    manager = manage(model, tier=tier, trainable=tier)
    infer(model)
    manager.close()
    manager.close()
    for refused in (manager.load, manager.state_dict):
        with pytest.raises(SwapClosedError):
            refused()
    with pytest.raises(SwapClosedError), manager.materialize("0"):
        pass
    assert_equal(train(model), train(plain))


@tiers
def test_model_that_is_managed_already_is_refused(manage: Manage, tier: str) -> None:
    """A part of it too. field case E04"""
    plain, model = stack(), stack()
    manager = manage(model, tier=tier, trainable=tier)
    for part in (model, model[0], nn.Sequential(model)):
        with pytest.raises(SwapError) as raised:
            manage(part, tier=tier, trainable=tier)
        assert raised.value.fix
    assert_equal(train(model), train(plain))
    manager.close()
    manage(model, tier=tier, trainable=tier)
    assert_equal(infer(model), infer(plain))


@pytest.mark.parametrize(
    "options",
    [{"tier": "disk"}, {"granularity": "leaves"}, {"granularity": 0}, {"granularity": "12 apples"},
     {"prefetch": -1}, {"trainable": "gpu"}, {"buffers": "yes"}, {"buffer_count": 0},
     {"keep_resident_bytes": -1}, {"tier": "nvme", "path": None}, {"path": "/no/such/folder"},
     {"tier": "cpu", "trainable": "nvme", "path": None}, {"unified_memory": "maybe"}],
    ids=str,
)
def test_setting_that_is_wrong_is_told_with_its_fix(options: dict[str, Any]) -> None:
    model = stack()
    with pytest.raises(SwapError) as raised:
        OffloadManager(model, "cpu", **options)
    assert raised.value.fix
    assert_equal(infer(model), infer(stack()))
