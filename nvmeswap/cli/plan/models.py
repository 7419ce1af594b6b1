"""A model without memory, from whatever describes one."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from nvmeswap.cli.plan.rates import read_json
from nvmeswap.errors import SwapConfigError

_SHORT_NAMES = {
    "bf16": "bfloat16", "fp16": "float16", "f16": "float16", "fp32": "float32", "f32": "float32",
    "f64": "float64", "f8_e4m3": "float8_e4m3fn", "f8_e5m2": "float8_e5m2", "i64": "int64",
    "i32": "int32", "i16": "int16", "i8": "int8", "u8": "uint8",
}


def from_transformers(path: Path) -> nn.Module:
    """The causal language model of a transformers config, a folder or its config.json. Raises
    SwapConfigError where transformers is missing or the config is none of its."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise SwapConfigError(
            "--transformers needs the package transformers", key="--transformers",
            cause=str(error), fix="pip install transformers, or use --shapes or --safetensors",
        ) from None
    if not path.exists():
        raise SwapConfigError(
            f"{path} does not exist", key="--transformers", path=path,
            fix="name a folder with a config.json, or that file",
        )
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all is here: nothing is to be looked for
    try:
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            build: Callable[..., nn.Module] = AutoModelForCausalLM.from_config
            return build(config)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SwapConfigError(
            "transformers can't build a causal language model from this config",
            key="--transformers", path=path, cause=str(error).split("\n")[0],
            fix="use --factory for another kind of model, or --shapes",
        ) from None


def from_shapes(path: Path) -> nn.Module:
    """From `{name: {"shape": [...], "dtype": "bf16", "trained": true}}`; dtype fp32 and trained
    unless it says otherwise. Modules are made as the dots in the names say."""
    content = read_json(path, key="--shapes")
    root = _Container()
    try:
        for name, facts in content.items():
            dtype = _dtype(facts.get("dtype", "fp32"), name)
            shape, is_trained = facts["shape"], bool(facts.get("trained", True))
            _place(root, name, torch.empty(shape, dtype=dtype, device="meta"), trained=is_trained)
    except (AttributeError, KeyError, TypeError, RuntimeError) as error:
        raise SwapConfigError(
            "the file does not describe parameters", key="--shapes", path=path, cause=repr(error),
            fix='write {"layers.0.weight": {"shape": [8, 4], "dtype": "bf16"}, ...}',
        ) from None
    return _finished(root, path, "--shapes")


def from_safetensors(path: Path) -> nn.Module:
    """From the headers of a file, or of all in a folder; nothing else is read."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    root = _Container()
    try:
        for file in files:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (it is no mapping)
                    part = opened.get_slice(name)
                    dtype = _dtype(part.get_dtype(), name)
                    value = torch.empty(part.get_shape(), dtype=dtype, device="meta")
                    _place(root, name, value, trained=dtype.is_floating_point)
    except (OSError, SafetensorError) as error:
        raise SwapConfigError(
            "the file is not safetensors", key="--safetensors", path=path, cause=str(error),
            fix="name a .safetensors file, or a folder of them",
        ) from None
    return _finished(root, path, "--safetensors")


def from_factory(name: str) -> nn.Module:
    """What a user's function returns, called without arguments on the meta device."""
    with torch.device("meta"):
        made = function(name, key="--factory")()
    if not isinstance(made, nn.Module):
        raise SwapConfigError(
            f"{name} returned a {type(made).__name__}", key="--factory",
            fix="return the model, a torch.nn.Module",
        )
    return made


def function(name: str, *, key: str) -> Callable[..., Any]:
    """ "package.module:function", from the current folder too. Raises SwapConfigError."""
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise SwapConfigError(
            f"{name} can't be imported", key=key, cause=str(error),
            fix="write package.module:function; the current folder is searched, too",
        ) from None
    return found


class _Container(nn.Module):
    """Holds parameters and other modules. It is called, as far as FSDP2 can tell."""

    def forward(self) -> None:
        """Never called: only its parameters count."""


def _dtype(name: str, key: str) -> torch.dtype:
    """One table for all that a plan reads: torch's own."""
    dtype = getattr(torch, _SHORT_NAMES.get(name.lower(), name.lower()), None)
    if not isinstance(dtype, torch.dtype):
        raise SwapConfigError(
            f"{key} is {name}, which is no dtype of torch's", key=key,
            fix="write bf16, fp16, fp32, or torch's name",
        )
    return dtype


def _place(root: nn.Module, name: str, value: torch.Tensor, *, trained: bool) -> None:
    *path, last = name.split(".")
    module = root
    for part in path:
        child = module._modules.get(part)
        if child is None:
            child = _Container()
            module.add_module(part, child)
        module = child
    module.register_parameter(last, nn.Parameter(value, requires_grad=trained))


def _finished(root: nn.Module, path: Path, key: str) -> nn.Module:
    if not any(True for _ in root.parameters()):
        raise SwapConfigError("there is no parameter in it", key=key, path=path,
                              fix="name a file that has some")
    _number_lists(root)
    return root


def _number_lists(module: nn.Module) -> None:
    """Where all children are called by numbers, they were the elements of a ModuleList; the
    outermost are what FSDP2's groups are made of."""
    for name, child in list(module.named_children()):
        inner: Mapping[str, nn.Module] = dict(child.named_children())
        only_children = not list(child.parameters(recurse=False))
        if inner and only_children and all(number.isdigit() for number in inner):
            setattr(module, name, nn.ModuleList(inner[each] for each in sorted(inner, key=int)))
        else:
            _number_lists(child)
