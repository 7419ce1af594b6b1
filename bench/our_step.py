"""A swapped AdamW over bf16 parameters with bf16 gradients. Runs in a process of its own.

    {"blocks": 8}                                       makes parameters and gradients
    {"folder": "...", "host_memory_nbytes": null}       builds the optimizer
    {}                                                  a measured step
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from answers import Taken, answer_requests, forget_peak, memory_nbytes
from mlp import shapes


def make_parameters(torch: Any, blocks: int) -> list[Any]:
    """Random, with random gradients."""
    torch.manual_seed(0)
    parameters = []
    for shape in shapes(blocks):
        # Drawn in place: a float32 copy would count as memory that a step takes.
        parameter = torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.02, 0.02)
        parameters.append(torch.nn.Parameter(parameter))
        parameters[-1].grad = torch.empty(shape, dtype=torch.bfloat16).uniform_(-1e-3, 1e-3)
    return parameters


def begin() -> Callable[..., dict[str, Any]]:
    import torch

    from nvmeswap.config import SwapBlock
    from nvmeswap.swap.swapped import SwappedOptimizer

    parameters: list[Any] = []
    optimizer: Any = None
    build_peak_nbytes = 0

    def answer(**request: Any) -> dict[str, Any]:
        nonlocal optimizer, parameters, build_peak_nbytes
        if "blocks" in request:
            parameters = make_parameters(torch, request["blocks"])
            return {**memory_nbytes(), "parameters": sum(each.numel() for each in parameters)}
        if "folder" in request:
            swap = SwapBlock(host_memory_nbytes=request["host_memory_nbytes"])
            optimizer = SwappedOptimizer(
                torch.optim.AdamW, parameters, lr=1e-4, nvme_path=request["folder"], swap=swap
            )
            build_peak_nbytes = memory_nbytes()["peak_nbytes"]
            forget_peak()
            return {}
        before = optimizer.stats()
        taken = Taken()
        optimizer.step()
        found = taken.so_far()
        after = optimizer.stats()
        counted = ("stall_s", "update_s", "hit_count", "read_nbytes", "write_nbytes")
        steps = {name: getattr(after, name) - getattr(before, name) for name in counted}
        return {**found, **memory_nbytes(), **steps, "build_peak_nbytes": build_peak_nbytes,
                "sub_group_count": after.sub_group_count}

    return answer


if __name__ == "__main__":
    answer_requests(begin)
