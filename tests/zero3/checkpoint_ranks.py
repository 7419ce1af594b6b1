"""What the ranks of checkpoint tests run; started by `run_ranks(..., module=MODULE)`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dcp_state
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

import nvmeswap.zero3
from nvmeswap.errors import SwapError
from tests.zero3 import ranks
from tests.zero3.cases import VOCABULARY, AwkwardModel, Case, shard_in_ram

MODULE = "tests.zero3.checkpoint_ranks"
ROWS = 12  # of a step's batch over all ranks: each world size from 1 to 4 divides it

DIM = 67  # matrices are cut in the middle of rows, on one, two and three ranks
# One of each kind of home, with the dtype that the model is built in: swapped, in RAM, resident;
# whole and split masters, and parameters that are their own.
KINDS = {
    "fp32": (Case(dim=DIM), torch.float32),
    "bf16 beside fp32": (Case(dim=DIM, bf16=True, buffer_count=1), torch.float32),
    "built in bf16": (Case(dim=DIM, bf16=True), torch.bfloat16),
    "parameters in RAM": (Case(dim=DIM, bf16=True, params="cpu"), torch.float32),
    "resident parameters": (Case(dim=DIM, params="none"), torch.float32),
    "resident bf16": (Case(dim=DIM, params="none", bf16=True), torch.bfloat16),
}
RESUMED = [kind for kind in KINDS if kind != "bf16 beside fp32"]  # that is in all other tests


class WithBuffer(AwkwardModel):
    """A buffer that training changes, and one that isn't saved."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return super().forward(tokens)


def start(
    kind: str, nvme_path: Path, *, seed: int = 0, mesh: DeviceMesh | None = None
) -> tuple[nn.Module, Any]:
    """Built and sharded; another seed gives other first weights."""
    case, dtype = KINDS[kind]
    torch.manual_seed(seed)
    config = case.config(nvme_path)
    config["zero_optimization"]["sub_group_size"] = 20_000  # each is a file, and is synced
    return nvmeswap.zero3.shard(WithBuffer(dim=case.dim).to(dtype), config, mesh=mesh)


def train(model: nn.Module, optimizer: Any, first: int, count: int) -> list[float]:
    """Steps first to first + count; the losses over all ranks. The batches of a step are the same
    whatever the world size."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, VOCABULARY, (ROWS, 9), generator=generator)
        mine = tokens.chunk(world_size)[rank]
        loss = cross_entropy(model(mine).float().flatten(0, 1), mine.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / world_size)
    return losses


def everything(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """All weights, exact values and states, unsharded, by name; buffers."""
    parts, values = {}, {}
    for name, value in model.state_dict().items():
        if isinstance(value, DTensor):
            parts[name] = value.to_local().clone()
        else:
            values[name] = value.clone()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        for state in ("master", "exp_avg", "exp_avg_sq"):
            parts[f"{name}/{state}"] = optimizer.read_state(parameter, state)
        parts[f"{name}/step"] = optimizer.state.get(parameter, {}).get("step")
    return values | unsharded(parts, next(model.parameters()).device_mesh)


def unsharded(parts: dict[str, Any], mesh: DeviceMesh) -> dict[str, torch.Tensor]:
    """Of each rank's parts of tensors, cut along their first dimension, and steps, which not every
    rank has. One exchange for all: `full_tensor` takes milliseconds a tensor."""
    group = mesh.get_group(mesh.ndim - 1)
    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, parts, group=group)
    whole = {}
    for name in parts:
        found = [each[name] for each in of_ranks if each[name] is not None]
        whole[name] = found[0] if name.endswith("/step") else torch.cat(found)
    return whole


def save_and_resume(nvme_path: Path, checkpoints: Path) -> dict[str, tuple[Any, ...]]:
    """Each kind: two steps, a save (every other one behind training), two more steps. What the
    checkpoint should hold, and the later losses and values, go to kept.pt; then `resume`."""
    kept = {}
    for number, name in enumerate(RESUMED):
        model, optimizer = start(name, nvme_path)
        train(model, optimizer, 0, 2)
        expected = everything(model, optimizer)
        saving = nvmeswap.zero3.save(
            model, optimizer, checkpoints / name, extra={"rank": dist.get_rank()},
            asynchronous=number % 2 == 0,
        )
        losses = train(model, optimizer, 2, 2)
        path = saving.wait()
        assert path.name == "step-00000002"
        kept[name] = (expected, losses, everything(model, optimizer))
        optimizer.close()
    if dist.get_rank() == 0:
        torch.save(kept, checkpoints / "kept.pt")
    dist.barrier()
    return resume(nvme_path, checkpoints, RESUMED)


def resume(
    nvme_path: Path, checkpoints: Path, kinds: Sequence[str]
) -> dict[str, tuple[Any, ...]]:
    """Kinds, each loaded into a model of other weights; what is wrong, and the later losses."""
    outcome = {}
    kept = torch.load(checkpoints / "kept.pt")
    for name in kinds:
        expected, losses, later = kept[name]
        model, optimizer = start(name, nvme_path, seed=1)
        train(model, optimizer, 7, 1)
        resumed = nvmeswap.zero3.load(model, optimizer, checkpoints / name)
        assert resumed.step == 2
        assert resumed.world_size == 2
        assert resumed.extra == {"rank": dist.get_rank() if dist.get_rank() < 2 else 0}
        differing = unequal(everything(model, optimizer), expected)
        ours = train(model, optimizer, 2, 2)
        still = unequal(everything(model, optimizer), later)
        outcome[name] = (differing, ours, losses, still)
        optimizer.close()
    return outcome


def unequal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    assert ours.keys() == theirs.keys()
    return [name for name in theirs if not torch.equal(ours[name], theirs[name])]


def one_rank_fails(nvme_path: Path, checkpoints: Path) -> dict[str, Any]:
    """Rank 1 can't read its states in a save, then a file of a checkpoint; rank 1's path leads
    elsewhere. Returns the names of the errors, and what is left."""
    model, optimizer = start("bf16 beside fp32", nvme_path)
    train(model, optimizer, 0, 1)
    path = nvmeswap.zero3.save(model, optimizer, checkpoints).wait()
    expected = everything(model, optimizer)
    optimizer.flush()
    (swap,) = nvme_path.rglob(f"rank0000{dist.get_rank()}/optimizer.swp")
    raised = {}
    with damaged(swap):
        for asynchronous in (False, True):
            raised[f"save, asynchronous={asynchronous}"] = error_of(
                lambda asynchronous=asynchronous: nvmeswap.zero3.save(
                    model, optimizer, checkpoints, step=2, asynchronous=asynchronous
                )
            )
    with damaged(path / "__1_00001_0.distcp"):
        raised["load"] = error_of(lambda: nvmeswap.zero3.load(model, optimizer, checkpoints))
    dist.barrier()
    model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
    raised["step"] = error_of(optimizer.step)
    seen = checkpoints if dist.get_rank() == 0 else checkpoints / "not mounted here"
    resumed = nvmeswap.zero3.load(model, optimizer, seen)
    assert resumed.path == path
    assert unequal(everything(model, optimizer), expected) == []
    train(model, optimizer, 1, 1)
    optimizer.close()
    return {"raised": raised, "left": sorted(each.name for each in checkpoints.iterdir())}


@contextlib.contextmanager
def damaged(path: Path) -> Iterator[None]:
    """Rank 1 finds other bytes there."""
    dist.barrier()
    if dist.get_rank() == 1:
        before = path.read_bytes()
        path.write_bytes(b"\xa5" * len(before))
    yield
    dist.barrier()
    if dist.get_rank() == 1:
        path.write_bytes(before)
    dist.barrier()


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except SwapError as error:
        return type(error).__name__
    return "nothing"


def async_errors_come_later(nvme_path: Path, checkpoints: Path) -> list[str]:
    """The folder turns into a file while a copy is being made: the save behind training fails."""
    model, optimizer = start("bf16 beside fp32", nvme_path)
    train(model, optimizer, 0, 1)
    expected = everything(model, optimizer)
    blocked = checkpoints / "blocked"
    if dist.get_rank() == 0:
        blocked.write_text("in the way")
    dist.barrier()
    raised = []
    first = nvmeswap.zero3.save(model, optimizer, blocked, asynchronous=True)
    train(model, optimizer, 1, 1)  # training goes on
    raised.append(error_of(first.wait))
    nvmeswap.zero3.save(model, optimizer, blocked, asynchronous=True)
    raised.append(error_of(lambda: nvmeswap.zero3.save(model, optimizer, checkpoints / "good")))
    saving = nvmeswap.zero3.save(model, optimizer, checkpoints / "good", asynchronous=True)
    kept = everything(model, optimizer)
    train(model, optimizer, 2, 1)
    nvmeswap.zero3.save(model, optimizer, checkpoints / "good", step=9)  # waits for it
    assert saving.done()
    resumed = nvmeswap.zero3.load(model, optimizer, checkpoints / "good", step=2)
    assert resumed.path == saving.wait()
    assert unequal(everything(model, optimizer), kept) == []
    assert unequal(kept, expected) != []
    optimizer.close()
    return raised


def plain_fsdp2_reads_it(nvme_path: Path, checkpoints: Path) -> None:
    """None of our parts: FSDP2 over a model in RAM, and torch's own loader and optimizer."""
    model, optimizer = start("fp32", nvme_path)
    train(model, optimizer, 0, 2)
    path = nvmeswap.zero3.save(model, optimizer, checkpoints / "plain").wait()
    expected = everything(model, optimizer)
    optimizer.close()
    torch.manual_seed(5)
    plain = WithBuffer(dim=DIM)
    shard_in_ram(plain, bf16=False)
    adam = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], fused=True)
    state = {
        "model": plain.state_dict(), "optimizer": dcp_state.get_optimizer_state_dict(plain, adam)
    }
    dcp.load(state, checkpoint_id=path)
    plain.load_state_dict(state["model"])
    dcp_state.set_optimizer_state_dict(plain, adam, state["optimizer"])
    for name, value in plain.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(whole, expected[name]), name
    for name, parameter in plain.named_parameters():
        if parameter.requires_grad:
            moment = adam.state[parameter]["exp_avg_sq"].full_tensor()
            assert torch.equal(moment, expected[f"{name}/exp_avg_sq"]), name


def exports(nvme_path: Path, checkpoints: Path) -> dict[str, Any]:
    """Of a model built in bf16: exact fp32, bf16, and a part of it; the values expected, and the
    bytes that the part had to read."""
    model, optimizer = start("built in bf16", nvme_path)
    train(model, optimizer, 0, 2)
    expected = everything(model, optimizer)
    nvmeswap.zero3.export(model, optimizer, checkpoints / "exact", dtype=torch.float32)
    nvmeswap.zero3.export(
        model, optimizer, checkpoints / "rounded", max_shard_nbytes=60_000, dtype=torch.bfloat16
    )
    before = read_so_far(optimizer)
    nvmeswap.zero3.export(
        model, optimizer, checkpoints / "part", only=lambda name: "scale" in name
    )
    read_nbytes = read_so_far(optimizer) - before
    full = error_of(lambda: nvmeswap.zero3.export(model, optimizer, checkpoints / "exact"))
    optimizer.close()
    return {"expected": expected, "read_nbytes": read_nbytes, "full": full}


def read_so_far(optimizer: Any) -> int:
    """Bytes that this rank's drive has read."""
    stats = optimizer.swap.stats().engine
    return int(stats.read_direct_nbytes + stats.read_buffered_nbytes)


def hsdp(nvme_path: Path, checkpoints: Path) -> tuple[dict[str, torch.Tensor], int]:
    """Two replicas of two shards each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, optimizer = start("bf16 beside fp32", nvme_path, mesh=mesh)
    train(model, optimizer, 0, 2)
    assert error_of(lambda: optimizer.save(checkpoints / "states")) == "SwapUsageError"
    nvmeswap.zero3.save(model, optimizer, checkpoints / "hsdp")
    kept = everything(model, optimizer)
    train(model, optimizer, 2, 1)
    nvmeswap.zero3.load(model, optimizer, checkpoints / "hsdp")
    assert unequal(everything(model, optimizer), kept) == []
    nbytes = sum(each.stat().st_size for each in checkpoints.rglob("*.distcp"))
    optimizer.close()
    return kept, nbytes


def all_of_them(nvme_path: Path, checkpoints: Path) -> dict[str, Any]:
    """What needs two ranks, in one launch."""
    results = {}
    for function in (one_rank_fails, async_errors_come_later, plain_fsdp2_reads_it, exports):
        folder = checkpoints / "failing" if function is one_rank_fails else checkpoints
        folder.mkdir(exist_ok=True)
        results[function.__name__] = function(nvme_path, folder)
    return results


ranks.FUNCTIONS.update({
    each.__name__: each for each in (all_of_them, hsdp, resume, save_and_resume)
})
