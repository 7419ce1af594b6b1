"""Training scripts as DeepSpeed's users write them: a JSON, `initialize`, `backward`, `step`.

None of them knows of nvmeswap. Each returns its losses and what it ends with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from torch import nn

from tests.deepspeed.cases import ROWS, SIDE, Json
from tests.oracle import Run

# --- models and loops ----------------------------------------------------------------------------


class Layers(nn.Module):
    """Matrices that are swapped, with biases that stay; `forward` gives the loss."""

    def __init__(self, count: int = 3, side: int = SIDE) -> None:
        super().__init__()
        self.side = side
        self.layers = nn.ModuleList(nn.Linear(side, side) for _ in range(count))

    def order(self) -> Sequence[int]:
        return range(len(self.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.pad(x, (0, self.side - SIDE))
        for index in self.order():
            x = x + torch.tanh(self.layers[index](x))
        return x.square().mean()


def build(json: Json, make: Callable[[], nn.Module] = Layers, *, in_init: bool = True) -> nn.Module:
    torch.manual_seed(0)
    if not in_init:
        return make()
    with deepspeed.zero.Init(config_dict_or_path=json):
        return make()


def start(json: Json, model: nn.Module, **arguments: Any) -> Any:
    trained = [each for each in model.parameters() if each.requires_grad]
    return deepspeed.initialize(model=model, config=json, model_parameters=trained, **arguments)[0]


def batch(number: int) -> torch.Tensor:
    """Another one on each rank."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    return torch.randn(ROWS, SIDE, generator=generator)


def train(engine: Any, numbers: range, *, first: int = 0) -> list[float]:
    """A micro batch for each of `numbers`; returns the losses."""
    losses = []
    for number in numbers:
        loss = engine(batch(first + number))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def end(engine: Any, losses: list[float]) -> Run:
    """What the run leaves: weights as the model has them, masters and moments. Ends the engine."""
    engine.eval()
    with torch.no_grad():
        losses.append(engine(batch(99)).item())
    tensors = weights(engine)
    for name, value in engine.module.named_parameters():
        if value.requires_grad:
            tensors |= {f"{name}: {key}": kept for key, kept in states(value)}
    engine.destroy()
    return Run(losses, tensors)


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """As the model has them, whole."""
    tensors = {}
    for name, value in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([value]):
            tensors[name] = value.detach().clone()
    return tensors


def states(value: nn.Parameter) -> Iterator[tuple[str, torch.Tensor]]:
    yield "fp32", safe_get_full_fp32_param(value).clone()
    for key in ("exp_avg", "exp_avg_sq"):
        yield key, safe_get_full_optimizer_state(value, key).clone()


# --- the scripts ---------------------------------------------------------------------------------


def trains(json: Json, folder: Path) -> Run:
    engine = start(json, build(json))
    return end(engine, train(engine, range(4)))


def engine_converts(json: Json, folder: Path) -> Run:
    engine = start(json, build(json, in_init=False))
    return end(engine, train(engine, range(3)))


def own_optimizer(json: Json, folder: Path) -> Run:
    """Two groups, that of the second without decay."""
    del json["optimizer"]
    model = build(json)
    groups = [{"params": [model.layers[0].weight, model.layers[2].weight]},
              {"params": [model.layers[1].weight, *(each.bias for each in model.layers)],
               "weight_decay": 0.0, "lr": 1e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    engine = deepspeed.initialize(model=model, config=json, optimizer=optimizer)[0]
    return end(engine, train(engine, range(3)))


class Wide(Layers):
    """bf16 matrices of more than 2 MiB, multiplied in fp32: this is quick everywhere."""

    def __init__(self) -> None:
        super().__init__(0)
        self.matrices = nn.ParameterList(
            torch.randn(1025, 1025) / 32 for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.pad(x.float(), (0, 1025 - SIDE))
        for matrix in self.matrices:
            x = x + torch.tanh(x @ matrix.float())
        return x.square().mean()


def low_precision(json: Json, folder: Path) -> Run:
    engine = start(json, build(json, Wide))
    return end(engine, train(engine, range(4)))


def accumulates(json: Json, folder: Path) -> Run:
    engine = start(json, build(json))
    return end(engine, train(engine, range(9)))


class Adapted(nn.Module):
    """A frozen base on NVMe, and adapters that are trained; one of them is as large as a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.base = Layers()
        self.base.requires_grad_(False)
        self.down = nn.ParameterList(torch.randn(SIDE, 4) / SIDE for _ in range(3))
        self.up = nn.ParameterList(torch.zeros(4, SIDE) for _ in range(3))
        self.head = nn.Linear(SIDE, SIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, down, up in zip(self.base.layers, self.down, self.up, strict=True):
            x = x + torch.tanh(layer(x) + x @ down @ up)
        return self.head(x).square().mean()


def frozen_base(json: Json, folder: Path) -> Run:
    engine = start(json, build(json, Adapted))
    return end(engine, train(engine, range(4)))


class Endless(Layers):
    """An evaluation may end after the first layer."""

    stops_early = False

    def order(self) -> Sequence[int]:
        return (0,) if self.stops_early else super().order()


def evaluates(json: Json, folder: Path) -> Run:
    """Also one that is left after the first layer, and one that sees nothing of the second."""
    engine = start(json, build(json, Endless))
    losses = train(engine, range(2))
    for number in range(2, 4):
        engine.eval()
        with torch.no_grad():
            for stops_early in (False, True, False):
                engine.module.stops_early = stops_early
                losses.append(engine(batch(50 + number)).item())
        engine.train()
        losses += train(engine, range(number, number + 1))
    return end(engine, losses)


class Left(Exception):
    """What leaves an evaluation."""


class Interrupted(Layers):
    """Its forward is left by an exception after the second layer, when asked."""

    interrupts = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.interrupts:
            return super().forward(x)
        self.layers[1](self.layers[0](x))
        raise Left


def interrupts_an_evaluation(json: Json, folder: Path) -> Run:
    engine = start(json, build(json, Interrupted))
    losses = train(engine, range(2))
    engine.eval()
    engine.module.interrupts = True
    try:
        with torch.no_grad():
            engine(batch(50))
    except Left:
        losses.append(-1.0)
    engine.module.interrupts = False
    engine.train()
    return end(engine, losses + train(engine, range(2, 4)))


class Experts(Layers):
    """Another order of its layers each step, as a router chooses: the same on all ranks."""

    chosen = (0, 1, 2)
    touches_all = False

    def order(self) -> Sequence[int]:
        return self.chosen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = super().forward(x)
        for left in {0, 1, 2}.difference(self.chosen if self.touches_all else {0, 1, 2}):
            loss = loss + 0.0 * self.layers[left](x).sum()
        return loss


def train_in_orders(
    json: Json, orders: list[tuple[int, ...]], *, touches_all: bool = False
) -> Run:
    engine = start(json, build(json, Experts))
    engine.module.touches_all = touches_all
    losses = []
    for number, order in enumerate(orders):
        engine.module.chosen = order
        losses += train(engine, range(number, number + 1))
    return end(engine, losses)


def reorders_experts(json: Json, folder: Path) -> Run:
    return train_in_orders(json, [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1, 0), (0, 1, 2)])


SOME = [(0, 1), (2, 1), (0, 2), (1,), (0, 1, 2)]


def leaves_experts_out(json: Json, folder: Path) -> Run:
    """Parameters without gradient in a step. DeepSpeed's CPU offload takes the gradient of an
    earlier step for them once more; on NVMe they have none."""
    return train_in_orders(json, SOME)


def gives_left_experts_zero(json: Json, folder: Path) -> Run:
    """What `leaves_experts_out` means."""
    return train_in_orders(json, SOME, touches_all=True)


class Tied(Layers):
    """The last layer is the first one's matrix once more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].weight = self.layers[0].weight


def tied_weights(json: Json, folder: Path) -> Run:
    engine = start(json, build(json, Tied, in_init=False))
    return end(engine, train(engine, range(3)))


def changes_weights(json: Json, folder: Path) -> Run:
    """`GatheredParameters` with `modifier_rank`: the master is not asked, as DeepSpeed has it."""
    engine = start(json, build(json))
    losses = train(engine, range(2))
    for layer in engine.module.layers:
        with deepspeed.zero.GatheredParameters([layer.weight, layer.bias], modifier_rank=0):
            if dist.get_rank() == 0:
                layer.weight.data.mul_(0.5)
                layer.bias.data.add_(1.0)
    engine.eval()
    with torch.no_grad():
        losses.append(engine(batch(50)).item())
    engine.train()
    return end(engine, losses + train(engine, range(2, 4)))


def sets_weights_first(json: Json, folder: Path) -> Run:
    model = build(json)
    for layer in model.layers:
        with deepspeed.zero.GatheredParameters([layer.weight], modifier_rank=0):
            if dist.get_rank() == 0:
                nn.init.eye_(layer.weight)
    engine = start(json, model)
    return end(engine, train(engine, range(3)))


def reads_and_sets_states(json: Json, folder: Path) -> Run:
    """`safe_get_*` and `safe_set_*`: gradients between backward and step, the rest anywhere. Of
    even partitions: `safe_set_*` can't cut others."""
    side = SIDE + 1
    engine = start(json, build(json, lambda: Layers(side=side)))
    losses = train(engine, range(1))
    matrices = [each.weight for each in engine.module.layers]
    for number in range(1, 4):
        loss = engine(batch(number))
        engine.backward(loss)
        losses.append(loss.item())
        for weight in matrices:
            gradient = safe_get_full_grad(weight)
            losses.append(gradient.double().sum().item())
        safe_set_full_grad(matrices[1], torch.full((side, side), 1e-3 * number))
        losses.append(safe_get_full_grad(matrices[1]).double().sum().item())
        engine.step()
        safe_set_full_fp32_param(matrices[0], safe_get_full_fp32_param(matrices[0]) * 0.5)
        moment = safe_get_full_optimizer_state(matrices[2], "exp_avg")
        safe_set_full_optimizer_state(matrices[2], moment + 1.0, "exp_avg")
        losses.append(safe_get_full_fp32_param(matrices[0]).double().sum().item())
    return end(engine, losses)


def several_engines(json: Json, folder: Path) -> Run:
    """One after the other."""
    runs = []
    for count in (3, 2):
        engine = start(json, build(json, lambda count=count: Layers(count)))
        runs.append(end(engine, train(engine, range(2))))
    tensors = {f"{run}: {name}": value for run, each in enumerate(runs)
               for name, value in each.weights.items()}
    return Run([*runs[0].losses, *runs[1].losses], tensors)


def two_engines_at_once(json: Json, folder: Path) -> Run:
    """Such as a student and its teacher, which is trained too."""
    engines = [start(json, build(json, lambda count=count: Layers(count))) for count in (3, 2)]
    losses = [loss for number in range(3) for engine in engines
              for loss in train(engine, range(number, number + 1))]
    runs = [end(engine, []) for engine in engines]
    tensors = {f"{run}: {name}": value for run, each in enumerate(runs)
               for name, value in each.weights.items()}
    return Run([*losses, *runs[0].losses, *runs[1].losses], tensors)


class Flat(nn.Module):
    """Matrices for Muon, a vector for Adam. Muon multiplies in bf16, the short side of its matrices
    with itself: a few rows are quick everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.randn(17, 30_881) for _ in range(2))
        self.vector = nn.Parameter(torch.randn(SIDE * SIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = (self.vector * x.mean()).tanh().square().mean()
        for matrix in self.matrices:
            loss = loss + torch.tanh(x[:, :17] @ matrix).square().mean()
        return loss


def muon(json: Json, folder: Path) -> Run:
    engine = start(json, build(json, Flat))
    losses = train(engine, range(3))
    return Run(losses, weights(engine))


def checkpoint_saved(
    json: Json, folder: Path, make: Callable[[], nn.Module] = Layers
) -> Run:
    """Two steps, a checkpoint, two more."""
    engine = start(json, build(json, make))
    losses = train(engine, range(2))
    engine.save_checkpoint(str(folder / "checkpoint"))
    return end(engine, losses + train(engine, range(2, 4)))


def checkpoint_resumed(
    json: Json, folder: Path, make: Callable[[], nn.Module] = Layers
) -> Run:
    """The two more, in a process that began anew, with other weights."""
    engine = start(json, build(json, make))
    for value in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([value], modifier_rank=0):
            if dist.get_rank() == 0:
                value.data.fill_(0.5)
    path, _ = engine.load_checkpoint(str(folder / "checkpoint"))
    assert path is not None
    return end(engine, train(engine, range(2, 4)))


def adapted_checkpoint_saved(json: Json, folder: Path) -> Run:
    return checkpoint_saved(json, folder, Adapted)


def adapted_checkpoint_resumed(json: Json, folder: Path) -> Run:
    return checkpoint_resumed(json, folder, Adapted)
