"""A pipeline of three components, each on the device only while its stages run.

    python -m nvmeswap.examples.lazy_pipeline --nvme-path /mnt/nvme --device cuda

Prints what was on the device at the most, and whether images equal those of plain modules.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import nvmeswap

DIM = 256
STEPS = 4


def transformer(layers: int) -> nn.Module:
    torch.manual_seed(layers)
    layer = nn.TransformerEncoderLayer(DIM, 4, 4 * DIM, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).requires_grad_(False)


def text_encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(1000, DIM).requires_grad_(False), transformer(2))


def denoiser() -> nn.Module:
    return transformer(4)


def decoder() -> nn.Module:
    torch.manual_seed(0)
    up = nn.ConvTranspose2d(DIM, 64, 4, stride=4)
    return nn.Sequential(up, nn.GELU(), nn.Conv2d(64, 3, 3, padding=1)).requires_grad_(False)


def stages(text: Any, denoise: Any, decode: Any) -> list[Callable[[Tensor], Tensor]]:
    """From 64 tokens to an image of 32 x 32; the same for lazy components and plain modules."""

    def encode(tokens: Tensor) -> Tensor:
        encoded: Tensor = text(tokens)
        return encoded

    def refine(x: Tensor) -> Tensor:
        for _ in range(STEPS):
            x = x + denoise(x) / STEPS
        return x

    def paint(x: Tensor) -> Tensor:
        image: Tensor = decode(x.transpose(1, 2).unflatten(2, (8, 8)))
        return image

    return [encode, refine, paint]


LOADERS = {"text": text_encoder, "denoise": denoiser, "decode": decoder}


@torch.no_grad()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nvme-path", help="an existing folder (default: weights in host memory)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)

    components = {
        name: nvmeswap.lazy(load, options.device, path=options.nvme_path)
        for name, load in LOADERS.items()
    }
    pipeline = nvmeswap.LazyPipeline(stages(**components), components)
    tokens = torch.arange(64, device=options.device).view(1, 64)
    images = [pipeline(tokens) for _ in range(2)]

    peaks = {name: each.stats().peak_resident_nbytes for name, each in components.items()}
    pipeline.close()
    x = tokens
    for stage in stages(**{name: load().to(options.device) for name, load in LOADERS.items()}):
        x = stage(x)
    equal = all(torch.equal(image, x) for image in images)
    print(f"components {sum(peaks.values()) / 1e6:.1f} MB, at most {max(peaks.values()) / 1e6:.1f} "
          f"MB on {options.device} at a time; images {'equal' if equal else 'DIFFER'}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
