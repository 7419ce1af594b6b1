"""The configuration: DeepSpeed's JSON, read once at the door and checked there.

`Config.load(dict_or_path)` is the only entry. Everything below it receives plain numbers. Rules, in
the order in which they are applied to each block:

1. `"auto"` and null mean the default (`OffloadParamConfig` and its siblings list them).
2. A key that nobody knows is an error naming the nearest known key; in the outermost block, where
   other tools keep their sections, it is a warning unless it looks like a misspelt key of ours.
3. A key that is known but can't be honoured here is an error naming what to use instead.
4. `device: nvme` needs an `nvme_path`, or several, that exist, are folders and can be written.

All messages start with the key's path in the JSON, such as
`zero_optimization.offload_param.device`.
"""

from __future__ import annotations

import difflib
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, Field, ValidationError

from nvmeswap.config import keys
from nvmeswap.config.block import Block
from nvmeswap.config.blocks import (
    AioConfig,
    OffloadDevice,
    OptimizerBlock,
    SwapBlock,
    ZeroConfig,
)
from nvmeswap.config.precision import Bf16Block, Fp16Block
from nvmeswap.errors import SwapConfigError, SwapPathError


class SameDriveWarning(UserWarning):
    """Two folders that are to be striped over are on one filesystem."""


class Config(Block):
    """The whole JSON. `load` is the way in; the other constructors don't check paths."""

    ignored: ClassVar[Mapping[str, str]] = keys.OUTERMOST_IGNORED
    refused: ClassVar[Mapping[str, str]] = keys.OUTERMOST_REFUSED
    zero_optimization: ZeroConfig
    bf16: Bf16Block = Field(default_factory=Bf16Block)
    fp16: Fp16Block = Field(default_factory=Fp16Block)
    optimizer: OptimizerBlock | None = None
    aio: AioConfig = Field(default_factory=AioConfig)
    nvmeswap: SwapBlock = Field(default_factory=SwapBlock)
    gradient_accumulation_steps: int = Field(
        default=1,
        ge=1,
        description=(
            "Backward passes that make one step. The loop makes them; only overlap_step must know."
        ),
    )
    gradient_clipping: float = Field(
        default=0.0,
        ge=0,
        description=(
            "The norm, over all parameters, that step() clips gradients to, unless "
            "optimizer.clip_grad_norm_ was called since the last step. 0: none."
        ),
    )

    @classmethod
    def load(cls, source: Mapping[str, Any] | str | Path) -> Config:
        """Read and check a configuration given as a dict or as the path of a JSON file.

        Raises SwapConfigError (its `key` is the place in the JSON) and SwapPathError. Reads the
        file and touches `nvme_path`; allocates nothing.
        """
        data = _read(source)
        _check_keys(cls, data, "")
        served = {key: value for key, value in data.items() if key in cls.model_fields}
        try:
            config = cls.model_validate(served)
        except ValidationError as error:
            raise _config_error(error) from None
        config._check_meaning()
        _warn_of_no_effect(data)
        return config

    @property
    def nvme_paths(self) -> tuple[Path, ...]:
        """The folders that all swap files of this run go under, one for each drive; none when
        nothing is on NVMe."""
        zero = self.zero_optimization
        for block in (zero.offload_param, zero.offload_optimizer):
            if block.device is OffloadDevice.NVME:
                return block.nvme_path or ()
        return ()

    def _check_meaning(self) -> None:
        zero = self.zero_optimization
        param, optimizer = zero.offload_param, zero.offload_optimizer
        _check_stage(zero.stage, param.device)
        if self.fp16.enabled and self.bf16.enabled:
            raise SwapConfigError(
                "bf16 and fp16 are both enabled", key="fp16.enabled", fix="enable one of them"
            )
        if self.gradient_clipping and optimizer.device is OffloadDevice.NONE:
            raise SwapConfigError(
                "gradient_clipping is done by the swapped optimizer, and nothing is offloaded",
                key="gradient_clipping",
                fix="call torch.nn.utils.clip_grad_norm_ between backward and step",
            )
        if self.nvmeswap.overlap_step and (self.fp16.enabled or self.gradient_clipping):
            asks = "fp16" if self.fp16.enabled else "gradient_clipping"
            raise SwapConfigError(
                f"{asks} needs all gradients before the first update, overlap_step makes it before",
                key="nvmeswap.overlap_step",
                fix=f"leave out overlap_step or {asks}",
            )
        if self.nvmeswap.keep_resident_bytes and param.device is OffloadDevice.NONE:
            warnings.warn(
                "nvmeswap.keep_resident_bytes is without effect: no parameter is offloaded",
                stacklevel=4,
            )
        for name, block in (("offload_param", param), ("offload_optimizer", optimizer)):
            if block.device is OffloadDevice.NVME:
                check_folders(block.nvme_path, key=f"zero_optimization.{name}.nvme_path")
        if OffloadDevice.NONE is optimizer.device is not param.device:
            raise SwapConfigError(
                "offloaded parameters need an offloaded optimizer: their fp32 masters live there",
                key="zero_optimization.offload_optimizer.device",
                fix='use {"device": "cpu"} or {"device": "nvme", "nvme_path": ...}',
            )
        if (
            param.device is optimizer.device is OffloadDevice.NVME
            and param.nvme_path != optimizer.nvme_path
        ):
            raise SwapConfigError(
                "offload_param and offload_optimizer name different folders",
                key="zero_optimization.offload_optimizer.nvme_path",
                fix="use the same nvme_path for both: a list of all folders spreads them",
            )


_MOST_FOLDERS = 16  # NVS_MEMBER_LIMIT in native/interface.h; below that floor here


def check_folders(
    given: str | Path | Sequence[str | Path] | None, *, key: str
) -> tuple[Path, ...]:
    """One folder, or one for each of several drives, as paths.

    Raises SwapPathError, naming the folder, unless each exists and can be written by this process,
    and unless they differ. Warns (`SameDriveWarning`) of two on one filesystem.
    """
    listed = [given] if given is None or isinstance(given, (str, Path)) else list(given)
    paths = tuple(Path(each) for each in listed if each is not None)
    if not paths or any(str(path) == "." for path in paths):  # Path("") is "."
        raise SwapPathError(
            f'{key} is missing: device "nvme" needs a folder',
            key=key,
            fix=f'set "{key}" to a folder on the NVMe drive',
        )
    if len(paths) > _MOST_FOLDERS:
        raise SwapPathError(
            f"{key} names {len(paths)} folders", key=key, fix=f"use {_MOST_FOLDERS} at most"
        )
    for path in paths:
        _check_folder(path, key)
    _compare_folders(paths, key)
    return paths


def _compare_folders(paths: Sequence[Path], key: str) -> None:
    for second, path in enumerate(paths):
        for other in paths[:second]:
            if path.samefile(other):
                raise SwapPathError(
                    f"{key} names one folder twice", key=key, path=path,
                    cause=f"it is the same as {other}", fix="name each folder once",
                )
            if path.stat().st_dev == other.stat().st_dev:
                warnings.warn(
                    f"{key}: {other} and {path} are on one filesystem, so striping over both makes "
                    "nothing faster",
                    SameDriveWarning, stacklevel=4,
                )


def _check_folder(path: Path, key: str) -> None:
    if not path.exists():
        raise SwapPathError(f"{key} does not exist", key=key, path=path, fix=f"mkdir -p {path}")
    if not path.is_dir():
        raise SwapPathError(
            f"{key} is a file, not a folder",
            key=key,
            path=path,
            fix="name the folder that is to hold the swap files",
        )
    if not os.access(path, os.W_OK | os.X_OK):
        mode = oct(path.stat().st_mode & 0o7777)
        raise SwapPathError(
            f"{key} can't be written by uid {os.getuid()} (mode {mode})",
            key=key,
            path=path,
            fix=f"chown or chmod u+rwx {path}",
        )


def _read(source: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    try:
        data = json.loads(Path(source).read_text())
    except OSError as error:
        raise SwapPathError(
            "the configuration file can't be read",
            key="config",
            path=source,
            errno=error.errno,
            fix="give a dict or the path of a JSON file",
        ) from None
    except ValueError as error:
        raise SwapConfigError(
            "the configuration file is not JSON",
            key="config",
            path=source,
            cause=str(error),
            fix="mend the file",
        ) from None
    if not isinstance(data, Mapping):
        raise SwapConfigError(
            "the configuration must be a JSON object",
            key="config",
            path=source,
            fix='start with {"zero_optimization": {"stage": 3, ...}}',
        )
    return data


def _check_keys(block: type[Block], data: Mapping[str, Any], prefix: str) -> None:
    """Unknown and refused keys, here and in the blocks inside. Says nothing about values."""
    spelled_otherwise = {"thread_count", "num_threads"} if block is AioConfig else set()
    known = set(block.model_fields) | set(block.ignored) | spelled_otherwise
    for key, value in data.items():
        place = f"{prefix}{key}"
        if key in block.refused:
            if not _is_inert(key, value):
                raise SwapConfigError(
                    f"{place} is known, but not served here", key=place, fix=block.refused[key]
                )
        elif key not in known:
            _unknown_key(key, place, known, outermost=prefix == "")
        else:
            field = block.model_fields.get(key)
            inner = None if field is None else _block_of(field.annotation)
            if inner is not None and isinstance(value, Mapping):
                _check_keys(inner, value, f"{place}.")


def _is_inert(key: str, value: Any) -> bool:
    """True for what means "not in use": DeepSpeed's defaults of the refused keys."""
    if isinstance(value, Mapping):
        return not value or value.get("enabled", True) in (False, None, "auto", "false")
    return value in (None, "false", False, "auto", 0) or keys.INERT.get(key) == value


def _warn_of_no_effect(data: Mapping[str, Any]) -> None:
    """One warning for all settings that DeepSpeed obeys and we don't. (The outermost block's are
    for the user's loop, which reads them itself.)"""
    by_reason: dict[str, list[str]] = {}
    for place, reason in _without_effect(Config, data, ""):
        by_reason.setdefault(reason, []).append(place)
    if by_reason:
        told = [f"{', '.join(places)} ({reason})" for reason, places in by_reason.items()]
        warnings.warn("without effect in nvmeswap: " + "; ".join(told), stacklevel=4)


def _without_effect(
    block: type[Block], data: Mapping[str, Any], prefix: str
) -> Iterator[tuple[str, str]]:
    """Place and reason of each key that asks for something and gets nothing."""
    for key, value in data.items():
        field = block.model_fields.get(key)
        inner = None if field is None else _block_of(field.annotation)
        if inner is not None and isinstance(value, Mapping):
            yield from _without_effect(inner, value, f"{prefix}{key}.")
        elif prefix and key in block.ignored and not _is_as_it_is(key, value):
            yield f"{prefix}{key}", block.ignored[key]


def _is_as_it_is(key: str, value: Any) -> bool:
    """True for what is done anyway. DeepSpeed's own tuner writes booleans as text."""
    told = {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value
    return told in (None, "auto") or keys.AS_IT_IS.get(key) is told


def _block_of(annotation: Any) -> type[Block] | None:
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, Block)), None)


def _unknown_key(key: str, place: str, known: set[str], *, outermost: bool) -> None:
    near = difflib.get_close_matches(key, sorted(known), n=1)
    fix = f'did you mean "{near[0]}"?' if near else "known here: " + ", ".join(sorted(known))
    if outermost and not near:
        warnings.warn(f"{place} is not a key of nvmeswap and has no effect", stacklevel=4)
        return
    raise SwapConfigError(f"{place} is not a known key", key=place, fix=fix)


def _check_stage(stage: int, param_device: OffloadDevice) -> None:
    if stage < 3 and param_device is not OffloadDevice.NONE:
        raise SwapConfigError(
            f"offload_param has no effect at stage {stage}: parameters are not sharded there",
            key="zero_optimization.offload_param",
            fix='set "zero_optimization.stage" to 3, or leave offload_param out',
        )
    if stage == 0:
        raise SwapConfigError(
            "stage 0 shards nothing: every rank would have all optimizer state on its drive",
            key="zero_optimization.stage",
            fix='set "zero_optimization.stage" to 1, 2 or 3; one rank alone can also use '
            "nvmeswap.SwappedOptimizer",
        )
    if stage not in (1, 2, 3):
        raise SwapConfigError(
            f"there is no stage {stage}", key="zero_optimization.stage", fix="use 1, 2 or 3"
        )


def _config_error(error: ValidationError) -> SwapConfigError:
    first = error.errors()[0]
    key = ".".join(map(str, first["loc"])) or "config"
    given = first.get("input")
    shown = "" if isinstance(given, (Mapping, BaseModel)) else f", got {given!r}"
    return SwapConfigError(
        f"{key}: {first['msg']}{shown}", key=key, fix="see docs/settings.md for what the key takes"
    )
