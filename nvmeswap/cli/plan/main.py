"""`nvmeswap plan`: from the command line to a prediction."""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from nvmeswap.cli.plan import models
from nvmeswap.cli.plan.compute import ComputeTrial
from nvmeswap.cli.plan.passes import Compute
from nvmeswap.cli.plan.predict import Machine, changes, predict
from nvmeswap.cli.plan.rates import (
    DriveRates,
    HostRates,
    drives_from_bench,
    given_drives,
    host_from_bench,
    measure_drives,
    measure_host,
    read_json,
)
from nvmeswap.cli.plan.report import content, show
from nvmeswap.cli.plan.wear import Rating, wear
from nvmeswap.cli.report_json import write
from nvmeswap.config import Config, OffloadDevice, SameDriveWarning
from nvmeswap.errors import SwapConfigError
from nvmeswap.zero3.foresight import Foresight

_MOST_RANKS_PER_NODE = 8  # as GPUs in most machines


def run(options: argparse.Namespace) -> int:
    """Exit status: 0, or 1 if the budget is too small. Raises SwapError."""
    settings = load_settings(options)
    foresight = Foresight(
        model_of(options), settings, ranks=options.ranks, device=options.device
    )
    ranks_here = options.ranks_per_node or min(options.ranks, _MOST_RANKS_PER_NODE)
    node = drives_of(options, settings)
    machine = Machine(
        drives=node.times(1 / ranks_here),
        host=host_of(options, settings, foresight),
        compute=compute_of(options, settings),
    )
    batches = options.micro_batches
    found = predict(foresight, settings, machine, micro_batches=batches)
    other = changes(foresight, settings, machine, found, micro_batches=batches)
    rating = rating_of(options, settings)
    worn = wear(found.stepping.write_nbytes, found.step_s, ranks=ranks_here, rating=rating)
    told = content(options, found, machine, node, other, worn, ranks_here=ranks_here)
    write(options.json, told)
    if options.json != "-":
        show(Console(), told)
    return 0 if found.fits else 1


def load_settings(options: argparse.Namespace) -> Config:
    """The JSON, with the command line's budget and folders; where the drives are told and not
    measured, its folders need not be here."""
    data = read_json(options.config, key="--config")
    if not isinstance(data, dict):
        raise SwapConfigError("the configuration must be a JSON object", key="--config",
                              path=options.config, fix="write what shard() gets")
    measured_here = options.bench is None and options.read_gbps is None
    if options.path is not None or not measured_here:
        folders = [str(path) for path in options.path or [tempfile.gettempdir()]]
        zero = data.get("zero_optimization")
        for name in ("offload_param", "offload_optimizer"):
            block = zero.get(name) if isinstance(zero, dict) else None
            if isinstance(block, dict) and block.get("device") == "nvme":
                block["nvme_path"] = folders
    if options.host_memory is not None:
        data["nvmeswap"] = {**(data.get("nvmeswap") or {}),
                            "host_memory_nbytes": options.host_memory}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SameDriveWarning)
        settings = Config.load(data)
    if settings.zero_optimization.offload_optimizer.device is OffloadDevice.NONE:
        raise SwapConfigError(
            "nothing is offloaded: FSDP2 keeps all of it on the device",
            key="zero_optimization.offload_optimizer.device", fix='set it to "nvme" or "cpu"',
        )
    return settings


def model_of(options: argparse.Namespace) -> nn.Module:
    """Without memory."""
    if options.transformers is not None:
        return models.from_transformers(options.transformers)
    if options.shapes is not None:
        return models.from_shapes(options.shapes)
    if options.safetensors is not None:
        return models.from_safetensors(options.safetensors)
    return models.from_factory(options.factory)


def drives_of(options: argparse.Namespace, settings: Config) -> DriveRates:
    """Of a whole node."""
    if options.bench is not None:
        return drives_from_bench(options.bench)
    if options.read_gbps is not None:
        return given_drives(options.read_gbps, options.write_gbps)
    folders: Sequence[Path] = options.path or settings.nvme_paths
    if not folders:  # nothing is on NVMe: any rate will do
        return given_drives(1.0, 1.0)
    return measure_drives(folders, settings, options.size)


def host_of(
    options: argparse.Namespace, settings: Config, foresight: Foresight
) -> HostRates:
    """This machine's, unless an earlier plan of another one is given."""
    before = host_from_bench(options.bench or [])
    if before is not None:
        return before
    footprint = foresight.footprint(settings)
    itemsize = footprint.gradient_nbytes // max(1, footprint.trained_numel)
    return measure_host(footprint.layouts, settings, itemsize)


def compute_of(options: argparse.Namespace, settings: Config) -> Compute | None:
    """Of one micro-batch."""
    if options.compute_forward_s is not None:
        return Compute(options.compute_forward_s, options.compute_backward_s)
    if options.batch is None:
        return None
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SwapConfigError(
            "--batch times the model on a GPU, and there is none", key="--device",
            fix="--device cpu, or give --compute-forward-s and --compute-backward-s",
        )
    trial = ComputeTrial(options.factory, options.batch, settings, device=options.device)
    try:
        return trial.measure()
    finally:
        trial.close()


def rating_of(options: argparse.Namespace, settings: Config) -> Rating | None:
    """Of a node's drives."""
    count = max(1, len(options.path or settings.nvme_paths))
    if options.rated_tbw is not None:
        return Rating.of_tbw(options.rated_tbw, count)
    if options.dwpd is not None:
        return Rating.of_dwpd(options.dwpd, options.capacity, options.warranty_years, count)
    return None


