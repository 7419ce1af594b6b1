"""Runs of a model that leave all their numbers behind, to compare managed and plain ones."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from tests.oracle import Run, first_difference

DIM = 16
LEARNING_RATE = 1e-2

Forward = Callable[[nn.Module, torch.Tensor, int], Any]
"""Of a model, an input of (3, 5, DIM) and the number of the call: its outputs, in any container."""


def call(model: nn.Module, x: torch.Tensor, number: int) -> Any:
    """The usual one."""
    return model(x)


def input_of(number: int) -> torch.Tensor:
    """The same for the same number."""
    return torch.randn(3, 5, DIM, generator=torch.Generator().manual_seed(number))


def tensors_in(outputs: Any) -> Iterator[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif is_dataclass(outputs):
        for each in fields(outputs):
            yield from tensors_in(getattr(outputs, each.name))
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            yield from tensors_in(value)
    elif isinstance(outputs, (tuple, list)):
        for value in outputs:
            yield from tensors_in(value)


def loss_of(outputs: Any) -> torch.Tensor:
    total = torch.zeros(())
    for output in tensors_in(outputs):
        if output.is_floating_point() or output.is_complex():
            total = total + output.abs().to(torch.float32).square().mean().to(total.device)
    return total


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """A copy to compare: of the bits where torch can't compare the numbers."""
    copied = tensor.detach().cpu().clone().contiguous()
    return copied.view(torch.uint8) if "float8" in str(copied.dtype) else copied


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """What each parameter and buffer holds, and how it lies in memory."""
    numbers = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        numbers[f"tensor {name}"] = as_it_is(tensor)
        numbers[f"strides of {name}"] = torch.tensor(tensor.stride())
        numbers[f"{name} is trained"] = torch.tensor(tensor.requires_grad)
    return numbers


def train(
    model: nn.Module,
    forward: Forward = call,
    *,
    steps: int = 3,
    accumulation: int = 1,
    optimizer: torch.optim.Optimizer | None = None,
    between: Callable[[], object] = lambda: None,
    device: str = "cpu",
) -> Run:
    """Outputs and gradients of each step, weights and buffers after the last one. `between` is
    called between backward and step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if optimizer is None and trained:
        optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE)
    numbers: dict[str, torch.Tensor] = {}
    for step in range(steps):
        if optimizer is not None:
            optimizer.zero_grad()
        for number in range(step * accumulation, (step + 1) * accumulation):
            numbers |= forward_and_backward(model, forward, number, device)
        between()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                numbers[f"step {step}, gradient of {name}"] = as_it_is(parameter.grad.to_dense())
        if optimizer is not None:
            optimizer.step()
    return Run([], numbers | weights_of(model))


def forward_and_backward(
    model: nn.Module, forward: Forward, number: int, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """The outputs, and the input's gradient."""
    torch.manual_seed(number)
    x = input_of(number).to(device).requires_grad_()
    outputs = forward(model, x, number)
    kept = [as_it_is(output) for output in tensors_in(outputs)]
    loss = loss_of(outputs)
    if loss.requires_grad:
        loss.backward()
    numbers = {f"call {number}, output {index}": each for index, each in enumerate(kept)}
    if x.grad is not None:
        numbers[f"call {number}, gradient of the input"] = as_it_is(x.grad)
    return numbers


def one_pass(model: nn.Module, number: int = 0) -> Run:
    model.zero_grad()
    numbers = forward_and_backward(model, call, number)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            numbers[f"gradient of {name}"] = parameter.grad.detach().cpu().clone()
    return Run([], numbers)


def infer(model: nn.Module, forward: Forward = call, *, calls: int = 2) -> Run:
    """Outputs without gradients, and what is in the model afterwards."""
    numbers = {}
    for number in range(calls):
        torch.manual_seed(number)
        with torch.no_grad():
            outputs = forward(model, input_of(number), number)
        for index, output in enumerate(tensors_in(outputs)):
            numbers[f"call {number}, output {index}"] = as_it_is(output)
    return Run([], numbers | weights_of(model))


def assert_equal(ours: Run, reference: Run) -> None:
    """Bitwise, of everything that the two left."""
    assert list(ours.weights) == list(reference.weights)
    difference = first_difference(ours, reference)
    assert difference is None, difference


def twins(build: Callable[[], nn.Module], seed: int = 0) -> tuple[nn.Module, nn.Module]:
    """Two models of equal numbers; old weight_norm can't be copied, so both are built."""
    torch.manual_seed(seed)
    first = build()
    torch.manual_seed(seed)
    return first, build()


def copies_of(tensors: Iterable[torch.Tensor], device: str) -> list[torch.Tensor]:
    """Copies that lie in memory as these do, and share it as these do. (`model.cuda()` makes other
    strides and breaks ties, which changes the order of sums.)"""
    storages: dict[int, torch.UntypedStorage] = {}
    copies = []
    for tensor in tensors:
        own = tensor.untyped_storage()
        if own._cdata not in storages:
            whole = torch.empty(0, dtype=torch.uint8, device=own.device).set_(own)
            storages[own._cdata] = whole.to(device, copy=True).untyped_storage()
        copies.append(torch.empty(0, dtype=tensor.dtype, device=device).set_(
            storages[own._cdata], tensor.storage_offset(), tensor.shape, tensor.stride()
        ))
    return copies


def place(model: nn.Module, device: str) -> nn.Module:
    """Move a plain model as it lies in memory."""
    tensors = [*model.parameters(), *model.buffers()]
    for tensor, there in zip(tensors, copies_of(tensors, device), strict=True):
        tensor.data = there
    return model


def frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


def collect() -> None:
    """What is only held by itself goes; tensors among it take a second time."""
    for _ in range(3):
        gc.collect()


def stack(layers: int = 6, dim: int = DIM) -> nn.Sequential:
    """Layers of equal size, each a unit."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(dim, dim) for _ in range(layers)))


def copied(model: nn.Module) -> nn.Module:
    """A plain one like it, for the reference."""
    return copy.deepcopy(model)
