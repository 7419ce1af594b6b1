"""A script as it stands in DeepSpeed's tutorials: `script.py --deepspeed --deepspeed_config JSON`.
It writes its losses to the file named last."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

from tests.deepspeed.programs import Layers, train


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("losses", type=Path)
    arguments = deepspeed.add_config_arguments(parser).parse_args()
    # Else DeepSpeed compiles its collectives in shared memory, for a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=arguments.deepspeed_config):
        model = Layers()
    engine = deepspeed.initialize(
        args=arguments, model=model, model_parameters=model.parameters())[0]
    losses = train(engine, range(4))
    arguments.losses.with_suffix(f".{dist.get_rank()}").write_text(repr(losses))
    dist.barrier()
    os._exit(0)  # gloo's threads sometimes abort at a normal exit


if __name__ == "__main__":
    main()
