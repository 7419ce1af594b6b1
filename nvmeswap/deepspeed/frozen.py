"""Frozen parameters in DeepSpeed's checkpoints.

DeepSpeed saves what the optimizer does not own as `param.ds_tensor`, and loads it by copying into
that. Of a partition on NVMe that is a placeholder of one element: what is saved is worthless, and
what is loaded goes nowhere, both without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nvmeswap.deepspeed.param_swapper import ParameterSwapper
from nvmeswap.errors import SwapManifestError


def is_on_nvme(param: Any) -> bool:
    """Whether its partition is ours, and lives there."""
    return (
        isinstance(getattr(param, "nvme_swapper", None), ParameterSwapper)
        and param.ds_tensor.final_location == "nvme"
    )


def saved_fragment(
    former: Callable[[Any, Any], torch.Tensor],
) -> Callable[[Any, Any], torch.Tensor]:
    """For `DeepSpeedEngine._get_param_fragment_func`."""

    def fragment(self: Any, param: Any) -> torch.Tensor:
        return param.nvme_swapper.copy_of(param) if is_on_nvme(param) else former(self, param)

    return fragment


def loaded_fragments(former: Callable[..., None], key: str) -> Callable[..., None]:
    """For `DeepSpeedEngine.load_module_state_dict`; `key`, of the frozen ones in the checkpoint."""

    def load(self: Any, checkpoint: dict[str, Any], *args: Any, **keywords: Any) -> None:
        saved = checkpoint.get(key) or {}
        ours = {
            name: param
            for param, name in self.param_names.items()
            if name in saved and is_on_nvme(param)
        }
        for name, param in ours.items():
            if saved[name].numel() != param.ds_tensor.ds_numel:
                raise SwapManifestError(
                    f'the checkpoint has {saved[name].numel():_} elements of the frozen parameter '
                    f'"{name}", whose partition has {param.ds_tensor.ds_numel:_}',
                    field=key,
                    fix="load the frozen weights from where they came first, and the checkpoint "
                    "without them: DeepSpeed itself saves placeholders for those on NVMe",
                )
        if ours:
            nothing = {name: param.ds_tensor.detach().clone() for name, param in ours.items()}
            checkpoint = {**checkpoint, key: {**saved, **nothing}}
        former(self, checkpoint, *args, **keywords)
        for name, param in ours.items():
            param.nvme_swapper.swap_out_partitioned_params([param], [saved[name]])

    return load
