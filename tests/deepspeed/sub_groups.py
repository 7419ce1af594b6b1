"""A swapper driven as DeepSpeed's ZeRO-3 drives it, beside the same optimizer in RAM."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nvmeswap.deepspeed.optimizer_swapper import OptimizerSwapper

AIO = {"block_size": 1 << 20, "queue_depth": 8, "intra_op_parallelism": 1, "single_submit": False,
       "overlap_events": True, "use_gds": False}
PLENTY = 64
ODD = 524_289
NUMELS = (ODD + 524_288, 262_145, 300_001, ODD)

MakeOptimizer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


@dataclass
class SwapConfig:
    """DeepSpeed's block offload_optimizer, as far as it matters."""

    nvme_path: Path
    buffer_count: int = PLENTY
    pipeline_read: bool = False
    pipeline_write: bool = False


def adamw(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().view(torch.int32)


def poisoned(numel: int) -> torch.Tensor:
    return torch.full((numel,), float("nan"))


@dataclass
class Run:
    """Sub-groups of `numels` elements under a swapper in `config.nvme_path`, and in RAM."""

    config: SwapConfig
    numels: Sequence[int] = NUMELS
    make: MakeOptimizer = adamw
    timers: Any = None
    seed: int = 0
    first_id: int = 0
    swapper: OptimizerSwapper = field(init=False)

    def __post_init__(self) -> None:
        self.draw = torch.Generator().manual_seed(self.seed)
        sources = [torch.randn(numel, generator=self.draw) for numel in self.numels]
        self.twins = [source.clone().requires_grad_() for source in sources]
        self.masters = [torch.empty(0).requires_grad_() for _ in self.numels]
        for number, master in enumerate(self.masters):
            first = self.first_id + 2 * number
            master.ds_id = f"{first}_{first + 1}"  # type: ignore[attr-defined]
        self.optimizer = self.make(self.masters)
        self.twin_optimizer = self.make(self.twins)
        self.optimizer.param_groups[0]["params"] = []
        self.swapper = OptimizerSwapper(
            swap_config=self.config, aio_config=AIO, base_folder="unused",
            optimizer=self.optimizer, largest_numel=max(self.numels), device="cpu",
            dtype=torch.float32, timers=self.timers,
        )
        self.swapper.initialize_parameters(parameters=self.masters, src_tensors=sources)

    def backward(self, pieces: int = 3, gap: int = 0) -> None:
        """Gradients of all sub-groups, the last one's first, in odd pieces, between which the last
        `gap` elements of each piece have none."""
        self.swapper.pre_backward()
        for master, twin in reversed(list(zip(self.masters, self.twins, strict=True))):
            twin.grad = torch.zeros_like(twin)
            bounds = [twin.numel() * part // pieces for part in range(pieces + 1)]
            offsets, tensors = [], []
            for begin, end in itertools.pairwise(bounds):
                gradient = torch.randn(end - begin - gap, generator=self.draw)
                twin.grad[begin : end - gap] = gradient
                offsets.append(begin)
                tensors.append(gradient)
            self.swapper.swap_out_gradients(
                parameter=master, gradient_offsets=offsets, gradient_tensors=tensors
            )
        self.swapper.post_backward()

    def step(self) -> None:
        """One sub-group after the other, the next one being announced."""
        following: list[torch.Tensor | None] = [*self.masters[1:], None]
        for master, later in zip(self.masters, following, strict=True):
            self.swapper.swap_in_optimizer_state(parameter=master, async_parameter=later)
            self.optimizer.param_groups[0]["params"] = [master]
            self.optimizer.step()
            self.optimizer.param_groups[0]["params"] = []
            self.swapper.swap_out_optimizer_state(parameter=master, async_swap=later is not None)
            master.grad = None
            assert master.numel() == 0
        self.twin_optimizer.step()

    def train(self, steps: int, **how: int) -> None:
        for _ in range(steps):
            self.backward(**how)
            self.step()

    def check(self) -> None:
        """Masters and states are those in RAM, bit for bit."""
        for number in range(len(self.masters)):
            self.check_group(number)

    def check_group(self, number: int) -> None:
        master, twin = self.masters[number], self.twins[number]
        self.swapper.swap_in_optimizer_state(parameter=master)
        assert torch.equal(bits(master), bits(twin)), f"master {number}"
        states, twin_states = self.optimizer.state[master], self.twin_optimizer.state[twin]
        assert states.keys() == twin_states.keys()
        for name, state in twin_states.items():
            assert torch.equal(bits(states[name]), bits(state)), f"{name} of {number}"
        self.swapper.release_swap_buffers(parameter=master)
        master.grad = None
        assert master.numel() == 0
