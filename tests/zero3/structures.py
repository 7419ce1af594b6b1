"""Models of every structure, each a `Program` known by its name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.nn.functional import cross_entropy, gelu

from tests.zero3.programs import BF16, DIM, LEARNING_RATE, Block, Dice, Program, Stack

VOCABULARY = 13


# --- which parameters ----------------------------------------------------------------------------


class LanguageModel(nn.Module):
    """Its head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.features(tokens)))


class TiedOnTheRoot(Program):
    """One owner, one extent: the root's."""

    def build(self) -> nn.Module:
        return LanguageModel()

    def loss(self, model: nn.Module, dice: Dice) -> torch.Tensor:
        tokens = dice.tokens(VOCABULARY, 3, 5)
        return cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())

    def watch(self, model: nn.Module, optimizer: Any) -> None:
        numel = sum(p._local_tensor.numel() for p in set(model.parameters()))
        assert optimizer.swap.stats().params.nvme_nbytes == 4 * numel


class TiedInAGroupOfTheirOwn(TiedOnTheRoot):
    def group(self, model: nn.Module, mesh: DeviceMesh) -> None:
        for module in [[model.embedding, model.head], *model.blocks, model]:
            self.fully_shard(module, mesh)


class Adapted(nn.Module):
    """A frozen layer and a low-rank adapter beside it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        base = torch.randn(DIM + 1, DIM) / DIM
        self.quantised = dtype is torch.int8
        if self.quantised:
            base = (base * 100).round().clamp(-127, 127)
        self.base = nn.Parameter(base.to(dtype), requires_grad=False)
        self.down = nn.Parameter(torch.randn(4, DIM) / DIM)
        self.up = nn.Parameter(torch.zeros(DIM + 1, 4))
        self.out = nn.Linear(DIM + 1, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = self.base.to(x.dtype) / 100 if self.quantised else self.base.to(x.dtype)
        return x + self.out(gelu(x @ base.t() + x @ self.down.t() @ self.up.t()))


class FrozenBase(Program):
    """Frozen and trained parameters, of different dtypes, in one group."""

    dtype = torch.float32

    def build(self) -> nn.Module:
        return Stack(block=lambda: Adapted(self.dtype))


class FrozenBaseInBf16(FrozenBase):
    dtype = torch.bfloat16


class FrozenBaseInInt8(FrozenBase):
    needs = "reset_iter_state"  # before, fully_shard itself refuses such parameters
    dtype = torch.int8


class FrozenBaseInInt8UnderBf16(FrozenBaseInInt8):
    policy = BF16


class FrozenBlocks(Program):
    """Whole groups without anything to train, below and above one that has."""

    def build(self) -> nn.Module:
        model = Stack(layers=4)
        for index in (0, 1, 3):
            model.blocks[index].requires_grad_(False)
        return model


class SmallOnesInRam(Program):
    """What is smaller than min_swap_nbytes stays in host memory."""

    min_swap_nbytes = 1000


class FewerElementsThanRanks(Program):
    """Shards are empty on some ranks; an empty shard has no extent."""

    def build(self) -> nn.Module:
        return Stack(block=lambda: Scaled())


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.three = nn.Parameter(torch.randn(3))
        self.one = nn.Parameter(torch.randn(1))
        self.cube = nn.Parameter(torch.randn(5, 3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.one + self.three.sum() * self.cube.square().mean()


class ShardedAlongTheSecondDimension(Program):
    def group(self, model: nn.Module, mesh: DeviceMesh) -> None:
        def place(parameter: nn.Parameter) -> Shard | None:
            even = parameter.dim() == 2 and parameter.size(1) % mesh.size() == 0
            return Shard(1) if even else None

        for module in [*model.blocks, model]:
            self.fully_shard(module, mesh, shard_placement_fn=place)


class InBf16(Program):
    """Parameters claim fp32, compute in bf16."""

    policy = BF16


class BuiltInBf16(Program):
    """Parameters claim bf16; their masters are fp32."""

    clips = False

    def build(self) -> nn.Module:
        return Stack().bfloat16()

    def loss(self, model: nn.Module, dice: Dice) -> torch.Tensor:
        return model(dice.batch().bfloat16()).float().square().mean()

    def resident_optimizer(self, parameters: Any) -> Any:
        return AdamWOnMasters(parameters)


class AdamWOnMasters:
    """What a bf16 parameter's optimizer is here: AdamW on fp32 masters, then rounded."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)
        self.masters = [nn.Parameter(p._local_tensor.detach().float()) for p in self.parameters]
        self.optimizer = torch.optim.AdamW(self.masters, lr=LEARNING_RATE, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = parameter.grad._local_tensor.float()
        self.optimizer.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter._local_tensor.copy_(master)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


# --- which modules run ---------------------------------------------------------------------------


class MixtureOfExperts(nn.Module):
    """`chosen` says which experts run; the others are not touched."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.mix = nn.Linear(DIM, DIM)
        self.experts = nn.ModuleList(Block(hidden=DIM + 3) for _ in range(experts))
        self.chosen = [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mix(x)
        return x + sum(self.experts[index](x) for index in self.chosen)


class ExpertsWithTheirBlock(Program):
    """Another choice in another order each step: the plan is always wrong."""

    def build(self) -> nn.Module:
        return Stack(layers=2, block=MixtureOfExperts)

    def choose(self, model: nn.Module, dice: Dice) -> None:
        for block in model.blocks:
            block.chosen = dice.choice(2, among=4)

    def loss(self, model: nn.Module, dice: Dice) -> torch.Tensor:
        self.choose(model, dice)
        return super().loss(model, dice)


class ExpertsEachInAGroup(ExpertsWithTheirBlock):
    """Only what is used is read."""

    steps = 10

    def group(self, model: nn.Module, mesh: DeviceMesh) -> None:
        for block in model.blocks:
            for module in [*block.experts, block]:
                self.fully_shard(module, mesh)
        self.fully_shard(model, mesh)


class ExpertsChosenByEachRank(ExpertsWithTheirBlock):
    """Ranks differ: FSDP2 serves that within a group, told to reduce what is unused."""

    needs = "set_reduce_scatter_unused_params"

    def group(self, model: nn.Module, mesh: DeviceMesh) -> None:
        super().group(model, mesh)
        for module in [*model.blocks, model]:
            module.set_reduce_scatter_unused_params(True)

    def choose(self, model: nn.Module, dice: Dice) -> None:
        for block in model.blocks:
            block.chosen = torch.randperm(4, generator=dice.own)[:2].tolist()


class Branching(Stack):
    """Some blocks are skipped, and it may end early."""

    def __init__(self) -> None:
        super().__init__(layers=5)
        self.path = list(range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.path:
            x = self.blocks[index](x)
        return self.head(x)


class SkippedBlocksAndEarlyExit(Program):
    steps = 6

    def build(self) -> nn.Module:
        return Branching()

    def loss(self, model: nn.Module, dice: Dice) -> torch.Tensor:
        (length,) = dice.choice(1, among=5)
        model.path = dice.choice(length + 1, among=5)
        return super().loss(model, dice)


class CalledSeveralTimes(Program):
    """The same blocks again, in a loop and after others."""

    def build(self) -> nn.Module:
        return Branching()

    def loss(self, model: nn.Module, dice: Dice) -> torch.Tensor:
        model.path = [0, 0, 0, 1, 2, 1, 0]
        return super().loss(model, dice)


class Recursive(Block):
    """Calls itself, as a tree does."""

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        x = super().forward(x)
        return self(x, depth - 1) if depth else x


class CalledRecursively(Program):
    needs = "reset_iter_state"  # before, FSDP2's backward fails, in RAM, too

    def build(self) -> nn.Module:
        return Stack(layers=2, block=Recursive)


class RootCalledTwice(Program):
    """Two forwards, one backward, as in contrastive training."""

    def loss(self, model: nn.Module, dice: Dice) -> torch.Tensor:
        first, second = model(dice.batch()), model(dice.batch())
        return (first - second).square().mean()


class SmallAdapters(FrozenBase):
    """Adapters are in host memory, bases on NVMe."""

    min_swap_nbytes = 2000

    def build(self) -> nn.Module:
        model = super().build()
        for block in model.blocks:
            block.out.requires_grad_(False)
        return model
