"""How FSDP2 groups and frees modules, and what is wrapped around them; each a `Program` known by
its name."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from tests.zero3.programs import DIM, Block, Dice, Program, Stack
from tests.zero3.structures import VOCABULARY, LanguageModel, TiedOnTheRoot

# --- how FSDP2 groups and frees them -------------------------------------------------------------


class HeadOutside(LanguageModel):
    """Its loss calls norm and head, chunk by chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(torch.randn(VOCABULARY, DIM))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.features(tokens)


class ChunkedLoss(TiedOnTheRoot):
    """A group of two modules, the second called once for each chunk: gradients fire each time."""

    needs = "reset_iter_state"  # a group of which a part runs, since the same version

    def build(self) -> nn.Module:
        return HeadOutside()

    def group(self, model: nn.Module, mesh: DeviceMesh) -> None:
        for module in [*model.blocks, [model.norm, model.head], model]:
            self.fully_shard(module, mesh)

    def loss(self, model: nn.Module, dice: Dice) -> torch.Tensor:
        tokens = dice.tokens(VOCABULARY, 4, 6)
        features = model.norm(model(tokens))
        losses = []
        for chunk, expected in zip(features.chunk(2), tokens.chunk(2), strict=True):
            losses.append(cross_entropy(model.head(chunk).flatten(0, 1), expected.flatten()))
        return torch.stack(losses).mean()


class PenaltyOnTheShards(Program):
    """Gradients come from autograd and from the reduction."""

    def loss(self, model: nn.Module, dice: Dice) -> torch.Tensor:
        loss = super().loss(model, dice)
        penalty = sum(p.square().sum() for p in model.blocks[1].parameters())
        return loss + 1e-3 * penalty.to_local()


class GatheredUntilBackward(Program):
    def group(self, model: nn.Module, mesh: DeviceMesh) -> None:
        for module in [*model.blocks, model]:
            self.fully_shard(module, mesh, reshard_after_forward=False)


class FreedAfterForward(Program):
    """The root, too."""

    def group(self, model: nn.Module, mesh: DeviceMesh) -> None:
        for module in [*model.blocks, model]:
            self.fully_shard(module, mesh, reshard_after_forward=True)


class PrefetchedByFsdp(Program):
    """FSDP2 gathers two groups ahead, in both directions."""

    def group(self, model: nn.Module, mesh: DeviceMesh) -> None:
        super().group(model, mesh)
        blocks = list(model.blocks)
        for index, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])
            block.set_modules_to_backward_prefetch(blocks[max(0, index - 2) : index][::-1])


# --- what is wrapped around them -----------------------------------------------------------------


class Checkpointed(Stack):
    """Activation checkpointing around each block."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class CheckpointedReentrantly(Checkpointed):
    reentrant = True


class CheckpointAroundBlocks(Program):
    def build(self) -> nn.Module:
        return Checkpointed()


class ReentrantCheckpointAroundBlocks(Program):
    def build(self) -> nn.Module:
        return CheckpointedReentrantly()

    def loss(self, model: nn.Module, dice: Dice) -> torch.Tensor:
        return model(dice.batch().requires_grad_()).square().mean()


class CheckpointInsideBlocks(Program):
    def build(self) -> nn.Module:
        return Stack(block=lambda: checkpoint_wrapper(Block()))


class CompiledBlocks(Program):
    """Compiled in place, after they were sharded."""

    def group(self, model: nn.Module, mesh: DeviceMesh) -> None:
        super().group(model, mesh)
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)


class CompiledModules(Program):
    """torch.compile(block): names have _orig_mod in them."""

    def build(self) -> nn.Module:
        return Stack(block=lambda: torch.compile(Block(), backend="aot_eager"))


class CompiledModel(Program):
    def group(self, model: nn.Module, mesh: DeviceMesh) -> None:
        super().group(model, mesh)
        model.compile(backend="aot_eager")
