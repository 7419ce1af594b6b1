"""Ways to train a model, each a `Program` known by its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from nvmeswap.errors import SwapUsageError
from nvmeswap.zero3.tensor import SwappedTensor
from tests.zero3.programs import BF16, DIM, Block, Dice, Program, Stack

# --- several backward passes a step --------------------------------------------------------------


class Accumulation(Program):
    """Every micro-batch reduces its gradients."""

    micro_batches = 3

    def step(self, model: nn.Module, optimizer: Any, dice: Dice) -> list[float]:
        numbers = []
        for index in range(self.micro_batches):
            self.before_micro_batch(model, is_last=index == self.micro_batches - 1)
            loss = self.loss(model, dice) / self.micro_batches
            loss.backward()
            numbers.append(loss.item())
        return numbers + self.update(model, optimizer)

    def before_micro_batch(self, model: nn.Module, *, is_last: bool) -> None:
        pass


class AccumulationWithoutSync(Accumulation):
    """Gradients stay whole on the device until the last micro-batch."""

    def before_micro_batch(self, model: nn.Module, *, is_last: bool) -> None:
        model.set_requires_gradient_sync(is_last)


class AccumulationWithoutSyncInBf16(AccumulationWithoutSync):
    policy = BF16


class AccumulationGatheredInBetween(Accumulation):
    def before_micro_batch(self, model: nn.Module, *, is_last: bool) -> None:
        model.set_reshard_after_backward(is_last)


class AccumulationTellingTheLast(Accumulation):
    def before_micro_batch(self, model: nn.Module, *, is_last: bool) -> None:
        model.set_is_last_backward(is_last)


# --- gradients in users' hands -------------------------------------------------------------------


class ClippedByTorch(Accumulation):
    """torch's own function, by norm and by value; gradients are looked at and changed."""

    def update(self, model: nn.Module, optimizer: Any) -> list[float]:
        parameters = list(model.parameters())
        nn.utils.clip_grad_value_(parameters, 0.02)
        total = nn.utils.clip_grad_norm_(parameters, 0.1).full_tensor()
        numbers = [p.grad.norm().full_tensor().item() for p in parameters]
        parameters[1].grad.mul_(0.5)
        parameters[3].grad = None
        self.clips = False
        return [total.item(), *numbers, *super().update(model, optimizer)]


class ForgottenByHand(Accumulation):
    """`p.grad = None` in a loop over the parameters, and in the middle of the micro-batches."""

    clips = False

    def before_micro_batch(self, model: nn.Module, *, is_last: bool) -> None:
        if is_last:
            for parameter in model.parameters():
                parameter.grad = None

    def update(self, model: nn.Module, optimizer: Any) -> list[float]:
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None
        return []


class ZeroedInPlace(Program):
    def update(self, model: nn.Module, optimizer: Any) -> list[float]:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return [p.grad.abs().sum().full_tensor().item() for p in model.parameters()]


class ScaledByTorch(Program):
    """GradScaler, with a loss that overflows once, on one rank."""

    steps = 4

    def step(self, model: nn.Module, optimizer: Any, dice: Dice) -> list[float]:
        if not hasattr(self, "scaler"):
            self.scaler, self.turn = torch.amp.GradScaler(self.device, init_scale=4.0), 0
        self.turn += 1
        overflows = self.turn == 2 and dist.get_rank() == 0
        loss = self.loss(model, dice) * (float("inf") if overflows else 1.0)
        self.scaler.scale(loss).backward()
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad()
        return [self.scaler.get_scale()]


# --- evaluation ----------------------------------------------------------------------------------


class EvaluationBetweenSteps(Program):
    """Another batch size, no gradients, after each step and before the first."""

    context = staticmethod(torch.no_grad)

    def step(self, model: nn.Module, optimizer: Any, dice: Dice) -> list[float]:
        return self.evaluate(model, dice) + super().step(model, optimizer, dice)

    def evaluate(self, model: nn.Module, dice: Dice) -> list[float]:
        model.eval()
        with self.context():
            number = model(dice.batch(7, DIM)).sum().item()
        model.train()
        return [number]


class EvaluationInInferenceMode(EvaluationBetweenSteps):
    """Not before the first step: resident FSDP2 would fail in training."""

    context = staticmethod(torch.inference_mode)

    def step(self, model: nn.Module, optimizer: Any, dice: Dice) -> list[float]:
        return Program.step(self, model, optimizer, dice) + self.evaluate(model, dice)


class InferenceModeBeforeTheFirstStep(EvaluationInInferenceMode):
    """The swapped run may. In RAM FSDP2 needs what it says here."""

    def step(self, model: nn.Module, optimizer: Any, dice: Dice) -> list[float]:
        if not hasattr(optimizer, "swap"):
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.unshard()
                    module.reshard()
        return self.evaluate(model, dice) + Program.step(self, model, optimizer, dice)


class GenerationBetweenSteps(EvaluationBetweenSteps):
    """A forward for each new token."""

    def evaluate(self, model: nn.Module, dice: Dice) -> list[float]:
        x = dice.batch(2, DIM)
        with torch.no_grad():
            for _ in range(4):
                x = torch.roll(x, 1) + model(x).sum(dim=1, keepdim=True)
        return [x.sum().item()]


class EvaluationBeforeTheUpdate(EvaluationBetweenSteps):
    """Between backward and step(): FSDP2 keeps the root's old weights, unless it is told."""

    def step(self, model: nn.Module, optimizer: Any, dice: Dice) -> list[float]:
        loss = self.loss(model, dice)
        loss.backward()
        numbers = [loss.item(), *self.evaluate(model, dice)]
        if not hasattr(optimizer, "swap"):
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return numbers + self.update(model, optimizer)


# --- exceptions of the user's own ----------------------------------------------------------------


class Raises(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise Interruption("in backward")


class Interruption(Exception):
    """The user's."""


class Interrupted(Stack):
    """Raises in block `at`, in forward or in backward, when told to."""

    def __init__(self) -> None:
        super().__init__(layers=4)
        self.phase: str | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 1 and self.phase == "forward":
                raise Interruption("in forward")
            if index == 1 and self.phase == "backward":
                x = Raises.apply(x)
        return self.head(x)


class ExceptionInForward(Program):
    """Then the same batch again, without any other call."""

    phase = "forward"
    steps = 4

    def build(self) -> nn.Module:
        return Interrupted()

    def step(self, model: nn.Module, optimizer: Any, dice: Dice) -> list[float]:
        if hasattr(optimizer, "swap"):  # the run in RAM is undisturbed
            state = dice.own.get_state()
            model.phase = self.phase
            with pytest.raises(Interruption):
                self.attempt(model, dice)
            model.phase = None
            dice.own.set_state(state)
            self.recover(model, optimizer)
        return super().step(model, optimizer, dice)

    def attempt(self, model: nn.Module, dice: Dice) -> None:
        self.loss(model, dice).backward()

    def recover(self, model: nn.Module, optimizer: Any) -> None:
        pass


class ExceptionInBackward(ExceptionInForward):
    """It is refused to go on; zero_grad(), then the same batch again."""

    phase = "backward"
    needs = "reset_iter_state"

    def recover(self, model: nn.Module, optimizer: Any) -> None:
        for refused in (optimizer.step, lambda: model(torch.zeros(4, DIM))):
            with pytest.raises(SwapUsageError, match="zero_grad"):
                refused()
        optimizer.zero_grad()


class ExceptionInEvaluation(ExceptionInForward):
    """In the forward of a batch that nobody trains on."""

    def attempt(self, model: nn.Module, dice: Dice) -> None:
        with torch.no_grad():
            self.loss(model, dice)


class ExceptionInTheLastMicroBatch(Accumulation):
    """In its forward; the gradients of the earlier ones are still good."""

    def build(self) -> nn.Module:
        return Interrupted()

    def before_micro_batch(self, model: nn.Module, *, is_last: bool) -> None:
        model.set_requires_gradient_sync(is_last)
        if is_last and isinstance(next(model.parameters())._local_tensor, SwappedTensor):
            model.phase = "forward"
            with pytest.raises(Interruption):
                model(torch.zeros(4, DIM))
            model.phase = None


# --- meshes --------------------------------------------------------------------------------------


class ReplicatedOnTwo(Program):
    """HSDP, each copy on one rank."""

    mesh_shape = (2, 1)


class HybridOnOneReplica(Program):
    mesh_shape = (1, 2)


class HybridOnFour(Accumulation):
    """Two copies, each sharded over two ranks."""

    mesh_shape = (2, 2)


class HybridWithoutAllReduceInBetween(HybridOnFour):
    def before_micro_batch(self, model: nn.Module, *, is_last: bool) -> None:
        model.set_requires_all_reduce(is_last)


class TensorParallel(Program):
    """Two-way tensor parallel, each part sharded over the other dimension of the mesh."""

    mesh_shape = (2, 2)
    clips = False

    def build(self) -> nn.Module:
        return Stack(layers=2, block=lambda: Block(hidden=2 * DIM))

    def update(self, model: nn.Module, optimizer: Any) -> list[float]:
        if hasattr(optimizer, "swap"):  # a norm over part of the ranks would pass for the whole
            with pytest.raises(SwapUsageError, match="two dimensions"):
                optimizer.clip_grad_norm_(1.0)
        return super().update(model, optimizer)

    def group(self, model: nn.Module, mesh: DeviceMesh) -> None:
        for block in model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["shard"], plan)
        for module in [*model.blocks, model]:
            self.fully_shard(module, mesh["replicate"])
