"""What the ranks of checkpoint tests run; started by `run_ranks(..., module=MODULE)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

import nvmeswap.zero3
from tests.zero3 import ranks
from tests.zero3.cases import VOCABULARY, AwkwardModel, Case

MODULE = "tests.zero3.checkpoint_ranks"
ROWS = 12  # of a step's batch over all ranks: each world size from 1 to 4 divides it

# One of each kind of home: swapped, small in RAM, all in RAM, resident; whole and split masters.
CASES = {
    "fp32": Case(),
    "bf16 beside fp32": Case(bf16=True, buffer_count=1),
    "built in bf16": Case(bf16=True, extra={"dtype": torch.bfloat16}),
    "parameters in RAM": Case(bf16=True, params="cpu"),
    "resident parameters": Case(params="none"),
    "resident bf16": Case(params="none", bf16=True, extra={"dtype": torch.bfloat16}),
}


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


def start(name: str, nvme_path: Path, *, seed: int = 0, **changes: Any) -> tuple[nn.Module, Any]:
    """Built and sharded; another seed gives other first weights."""
    case = CASES[name]
    torch.manual_seed(seed)
    model = WithBuffer(dim=case.dim)
    extra = {**case.extra, **changes}
    model.to(extra.pop("dtype", torch.float32))
    config = {**case.config(nvme_path), **extra}
    config.pop("dtype", None)
    return nvmeswap.zero3.shard(model, config)


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
    values = {
        name: value.full_tensor().clone() if isinstance(value, DTensor) else value.clone()
        for name, value in model.state_dict().items()
    }
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        for state in ("master", "exp_avg", "exp_avg_sq"):
            shard = optimizer.read_state(parameter, state)
            whole = DTensor.from_local(
                shard, parameter.device_mesh, parameter.placements,
                shape=parameter.shape, stride=parameter.stride(),
            )
            values[f"{name}/{state}"] = whole.full_tensor().clone()
        steps = [None] * dist.get_world_size()
        dist.all_gather_object(steps, optimizer.state.get(parameter, {}).get("step"))
        values[f"{name}/step"] = next(step for step in steps if step is not None)
    return values


def save_two_and_go_on(nvme_path: Path, checkpoints: Path, asynchronous: bool) -> dict[str, Any]:
    """Each case: two steps, a save, two more steps. Returns what the checkpoint should hold, and
    the later losses and values."""
    kept = {}
    for name in CASES:
        model, optimizer = start(name, nvme_path)
        train(model, optimizer, 0, 2)
        expected = everything(model, optimizer)
        saving = nvmeswap.zero3.save(
            model, optimizer, checkpoints / name, extra={"rank": dist.get_rank()},
            asynchronous=asynchronous,
        )
        losses = train(model, optimizer, 2, 2)
        path = saving.wait()
        assert path.name == "step-00000002"
        kept[name] = (expected, losses, everything(model, optimizer))
        optimizer.close()
    return kept


def resume(nvme_path: Path, checkpoints: Path, kept: Path) -> dict[str, tuple[Any, Any]]:
    """Each case: loaded into a model of other weights; what is wrong, and the later losses."""
    outcome = {}
    for name, (expected, losses, later) in torch.load(kept).items():
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


ranks.FUNCTIONS.update({each.__name__: each for each in (save_two_and_go_on, resume)})

if __name__ == "__main__":
    ranks.main()
