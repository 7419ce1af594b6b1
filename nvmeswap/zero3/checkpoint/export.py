"""`export()`: whole weights in safetensors files, as transformers' `from_pretrained` reads them."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from nvmeswap.errors import SwapPathError, SwapUsageError
from nvmeswap.swap.state_file import StateFileWriter, TensorShape
from nvmeswap.swap.sub_group import MASTER
from nvmeswap.zero3 import fsdp
from nvmeswap.zero3.checkpoint.folder import sync_folder, written_badly
from nvmeswap.zero3.checkpoint.model import Parameter, buffers_of, parameters_of
from nvmeswap.zero3.checkpoint.peers import Peers
from nvmeswap.zero3.optimizer import ShardedOptimizer

Only = Callable[[str], bool] | Collection[str]


@dataclass(frozen=True, slots=True)
class _Weight:
    """A tensor of the export: its name, what it is there, and how all ranks together get it."""

    name: str
    tensor: TensorShape
    source: Parameter | Tensor


def export(
    model: nn.Module,
    optimizer: Optimizer | None,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = torch.bfloat16,
    max_shard_nbytes: int = 5 * 1024**3,
    only: Only | None = None,
) -> Path:
    """Write the whole model, unsharded, to `folder`: model.safetensors, or several files of at most
    `max_shard_nbytes` and an index; the model's `config`, if it has one that can be saved.

        nvmeswap.zero3.export(model, optimizer, "my-model")
        transformers.AutoModelForCausalLM.from_pretrained("my-model")

    One parameter at a time is gathered, and is in memory on each rank; nothing else is. Tied
    weights are written once. The folder appears when it is complete.

    Args: `optimizer`, for fp32 values of a model that was built in less (None: what the parameters
    say); `dtype`, of floating-point tensors (torch.float32: the exact masters; None: each
    parameter's own); `only`, which parameters and buffers, by name: the others are not read.
    Raises, on all ranks: SwapPathError (the folder has something in it), SwapSpaceError,
    SwapWriteError, SwapReadError, SwapUsageError (nothing is left to be written, or a step
    is unfinished) where it happened,
    SwapPeerError on the others. Then nothing is left of it.
    Blocking: until it is on the drive. Threads: the training loop's, on all ranks, between steps.
    """
    fsdp.reshard_all(model)  # an evaluation leaves the root gathered
    peers = Peers(model)
    swapped = optimizer if isinstance(optimizer, ShardedOptimizer) else None
    if swapped is not None:
        peers.together(swapped.refuse_unfinished)
    weights = peers.together(lambda: list(_weights(model, dtype, only)))
    files = _files(weights, max_shard_nbytes)
    target = Path(folder).absolute()
    partial = peers.from_rank_0(lambda: _begin(target))
    try:
        for name, inside in files.items():
            _write_file(partial / name, inside, swapped, peers)
        peers.from_rank_0(lambda: _complete(model, files, partial, target))
    except BaseException:
        if peers.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def _weights(
    model: nn.Module, dtype: torch.dtype | None, only: Only | None
) -> Iterator[_Weight]:
    count = 0
    sources: list[tuple[str, Parameter | Tensor]] = [(p.name, p) for p in parameters_of(model)]
    for name, source in [*sources, *buffers_of(model)]:
        wanted = only is None or (only(name) if callable(only) else name in only)
        if wanted:
            own = source.dtype
            written = own if dtype is None or not own.is_floating_point else dtype
            shape = source.global_shape if isinstance(source, Parameter) else source.shape
            yield _Weight(name, TensorShape(written, tuple(shape)), source)
            count += 1
    if not count:
        raise SwapUsageError("no parameter or buffer is to be exported", fix="see `only`")


def _files(weights: list[_Weight], max_shard_nbytes: int) -> dict[str, list[_Weight]]:
    """By name of the file: filled up one after the other."""
    groups: list[list[_Weight]] = [[]]
    nbytes = 0
    for weight in weights:
        if groups[-1] and nbytes + weight.tensor.nbytes > max_shard_nbytes:
            groups.append([])
            nbytes = 0
        groups[-1].append(weight)
        nbytes += weight.tensor.nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {
        f"model-{number:05}-of-{len(groups):05}.safetensors": group
        for number, group in enumerate(groups, 1)
    }


def _begin(target: Path) -> Path:
    """The folder to write into; what a killed export left is removed."""
    try:
        if target.exists() and any(target.iterdir()):
            raise SwapPathError("there is something in this folder", path=target,
                                fix="name a new one")
        target.parent.mkdir(parents=True, exist_ok=True)
        for left in target.parent.glob(f".{target.name}.*.exporting"):
            shutil.rmtree(left, ignore_errors=True)
        partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.exporting")
        partial.mkdir()
    except OSError as error:
        raise written_badly(error, target) from error
    return partial


def _write_file(
    path: Path, weights: list[_Weight], optimizer: ShardedOptimizer | None, peers: Peers
) -> None:
    writer: StateFileWriter | None = None

    def begin() -> None:
        nonlocal writer
        shapes = {weight.name: weight.tensor for weight in weights}
        writer = StateFileWriter(path, shapes, {"format": "pt"})

    def put(weight: _Weight, values: Tensor) -> None:
        if writer is not None:
            writer.write(weight.name, 0, values.to("cpu", weight.tensor.dtype))

    def end() -> None:
        if writer is not None:
            writer.complete()

    try:
        peers.from_rank_0(begin)
        for weight in weights:
            values = _whole(weight, optimizer, peers)
            peers.together(lambda weight=weight, values=values: put(weight, values))  # type: ignore[misc]
        peers.together(end)
    finally:
        if writer is not None:
            writer.discard()


def _whole(weight: _Weight, optimizer: ShardedOptimizer | None, peers: Peers) -> Tensor:
    """All of a weight, on every rank."""
    source = weight.source
    if isinstance(source, Tensor):
        return source
    local = peers.together(lambda: _local(source, weight.tensor.dtype, optimizer))
    tensor = source.tensor
    return DTensor.from_local(
        local.view(source.shape).to(tensor.device), tensor.device_mesh, tensor.placements,
        run_check=False, shape=tensor.shape, stride=tensor.stride(),
    ).full_tensor()


def _local(
    parameter: Parameter, dtype: torch.dtype, optimizer: ShardedOptimizer | None
) -> Tensor:
    """This rank's part. What is stored in bf16 is the master rounded, so bf16 needs no master."""
    name = parameter.name
    if parameter.tensor.requires_grad:
        if optimizer is None:
            return parameter.exact().to(dtype)
        has_master = MASTER in optimizer.states.names(name)
        if has_master and not (dtype is torch.bfloat16 and parameter.is_stored_in(dtype)):
            return optimizer.states.read(name, MASTER).to(dtype)
    return parameter.read(0, parameter.numel).to(dtype)


def _complete(
    model: nn.Module, files: dict[str, list[_Weight]], partial: Path, target: Path
) -> None:
    try:
        if len(files) > 1:
            index = {
                "metadata": {"total_size": sum(w.tensor.nbytes for f in files.values() for w in f)},
                "weight_map": {w.name: name for name, inside in files.items() for w in inside},
            }
            (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        for name in ("config", "generation_config"):
            save = getattr(getattr(model, name, None), "save_pretrained", None)
            if callable(save):
                save(partial)
        for path in partial.iterdir():
            _sync(path)
        sync_folder(partial)
        os.rename(partial, target)
        sync_folder(target.parent)
    except OSError as error:
        raise written_badly(error, target) from error


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
