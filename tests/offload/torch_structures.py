"""Models of torch's own modules that do more than call their children."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm

from tests.offload.runs import DIM
from tests.offload.structures import STRUCTURES, structure


@structure()
class Attention(nn.Module):
    """features F12, 3.2"""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, 2, dropout=0.1, batch_first=True)
        self.other = nn.MultiheadAttention(DIM, 2, kdim=4, vdim=4, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        y, weights = self.attention(x, x, x)
        return self.other(y, x[..., :4], x[..., :4], need_weights=False)[0], weights


def layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, dropout=0.1, batch_first=True)


@structure()
def encoder_layer() -> nn.Module:
    return layer()


@structure()
def encoder_in_eval() -> nn.Module:
    """Its fast path reads its children's weights and calls none of them."""
    return nn.TransformerEncoder(layer(), 2).eval()


@structure(lambda model, x, number: model(x, x * 2))
def whole_transformer() -> nn.Module:
    return nn.Transformer(DIM, 2, 1, 1, 2 * DIM, dropout=0.0, batch_first=True)


@structure()
def lstm() -> nn.Module:
    return nn.LSTM(DIM, 8, num_layers=2, batch_first=True, bidirectional=True, proj_size=4)


@structure()
class Cells(nn.Module):
    """field case C05"""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(DIM, DIM, batch_first=True)
        self.cell = nn.LSTMCell(DIM, DIM)

    def forward(self, x: torch.Tensor) -> Any:
        state = (x.new_zeros(3, DIM), x.new_zeros(3, DIM))
        for step in self.gru(x)[0].unbind(1):
            state = self.cell(step, state)
        return state


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).t()


@structure()
def parametrized() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(3)))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    parametrizations.weight_norm(model[1])
    parametrizations.spectral_norm(model[2])
    return model


def with_cache(model: nn.Module, x: torch.Tensor, number: int) -> torch.Tensor:
    with parametrize.cached():
        return model(x) + model(x * 2)


@structure(with_cache)
def parametrized_and_cached() -> nn.Module:
    return STRUCTURES["parametrized"].build()


@structure()
def old_norms() -> nn.Module:
    """They set a plain attribute `weight` in a hook of their own before forward."""
    return nn.Sequential(weight_norm(nn.Linear(DIM, DIM)), spectral_norm(nn.Linear(DIM, DIM)))


@structure()
def batch_norm() -> nn.Module:
    """features F7, A9; field case C07"""
    return nn.Sequential(
        nn.BatchNorm1d(5), nn.Linear(DIM, DIM), nn.BatchNorm1d(5, momentum=None),
        nn.InstanceNorm1d(5, affine=True, track_running_stats=True),
    )


@structure(lambda model, x, number: model(x.reshape(1, 3, 16, 5)))
def channels_last() -> nn.Module:
    """features F16; field case C01"""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3))
    return model.to(memory_format=torch.channels_last)


@structure(lambda model, x, number: model(x.reshape(1, 3, 5, 4, 4)))
def channels_last_3d() -> nn.Module:
    return nn.Conv3d(3, 8, 3, padding=1).to(memory_format=torch.channels_last_3d)
