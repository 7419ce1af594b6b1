"""A part of a pipeline whose values come to the device when it is used, and leave when it is not.

The module is made once and stays: only storages come and go. So whatever is done to it between
two uses (weights, flags, added modules, compilation) is still there at the next one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nvmeswap.errors import SwapClosedError, SwapUsageError
from nvmeswap.offload.checkpoint_files import CheckpointFiles, build_skeleton
from nvmeswap.offload.fingerprint import Fingerprint
from nvmeswap.offload.manager import OffloadManager

log = logging.getLogger("nvmeswap.lazy")


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a component is made. `build` returns the module: with values, or, where `checkpoint`
    names safetensors files, a skeleton whose floating-point weights get `dtype`. `options` are
    OffloadManager's."""

    name: str
    build: Callable[[], object]
    device: torch.device
    checkpoint: Path | None
    dtype: torch.dtype | None
    options: dict[str, Any]


class Component:
    """Three stages, each begun by the first who needs it and begun once:

    built     the module exists; of a checkpoint its values do not yet
    stored    its values are at home, in host memory or on NVMe
    loaded    they are on the device as well

    `release` goes back from loaded to stored. A call of the module holds the lock, so that a
    release waits for it. `when_loaded` is called after each load, by whoever loaded.
    Threads: any; but no thread of ours builds, as loaders draw random numbers.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.when_loaded: Callable[[], None] | None = None
        self.is_loaded = False
        self._lock = threading.RLock()
        self._module: nn.Module | None = None
        self._manager: OffloadManager | None = None
        self._fingerprint: Fingerprint | None = None  # of what is on the device
        self._sent_home: list[Tensor] = []  # by us, and not by the manager
        self._ahead: object | None = None  # what the last prefetch was given; None: not wanted now
        self._is_closed = False

    @property
    def name(self) -> str:
        return self.recipe.name

    # --- built ------------------------------------------------------------------------------------

    @property
    def is_built(self) -> bool:
        return self._module is not None

    def module(self) -> nn.Module:
        """The module, with or without values. Raises SwapUsageError if the loader gives none, and
        what the loader raises; it is then asked again the next time."""
        if self._module is None:
            with self._lock:
                self._check_open()
                if self._module is None:
                    module = self._build()
                    if self.recipe.checkpoint is None:
                        self._manager = self._store(module)  # else its values stay where they are
                    self._module = module
        return self._module

    def _build(self) -> nn.Module:
        recipe = self.recipe
        if recipe.checkpoint is None:
            built = recipe.build()
        else:
            built = build_skeleton(recipe.build, recipe.dtype)
        if not isinstance(built, nn.Module):
            got = "None" if built is None else f"a {type(built).__name__}"
            raise SwapUsageError(
                f"the loader of {self.name} returned {got}, not a torch.nn.Module",
                fix="return the module from the loader",
            )
        return built

    def build_skeleton(self) -> None:
        """Build it if that is cheap, so that it can be loaded ahead. A failure is logged, as
        there."""
        if self.recipe.checkpoint is not None:
            try:
                self.module()
            except Exception:
                self._log_failure_ahead()

    @property
    def nbytes(self) -> int:
        """Of parameters and buffers, ties once; 0 before it is built."""
        if self._module is None:
            return 0
        return sum(tensor.nbytes for tensor in self._tensors())

    # --- stored -----------------------------------------------------------------------------------

    def manager(self) -> OffloadManager:
        """Its manager: after this its values are at home, if they were nowhere before. Raises as
        OffloadManager and CheckpointFiles do, with nothing kept."""
        if self._manager is None:
            with self._lock:
                self._check_open()
                module = self.module()
                if self._manager is None:
                    self._manager = self._store(module)
        return self._manager

    def _store(self, module: nn.Module) -> OffloadManager:
        recipe = self.recipe
        if "trainable" not in recipe.options:
            module.requires_grad_(False)
        if recipe.checkpoint is None:
            return OffloadManager(module, recipe.device, **recipe.options)
        with CheckpointFiles(module, recipe.checkpoint) as files:
            return OffloadManager(module, recipe.device, values=files.read, **recipe.options)

    # --- loaded -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def in_use(self) -> Iterator[nn.Module]:
        """The module, with all values on the device while the block lasts, and until `release`. If
        the block fails, what was brought for it leaves again."""
        with self._lock:
            was_loaded = self.is_loaded
            self.load()
            try:
                yield self.module()
            except BaseException:
                if not was_loaded:
                    self.release_quietly()
                raise

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def load(self) -> None:
        """Bring all values to the device; blocks until they are there. What came is given back if
        the rest can't be brought."""
        with self._lock:
            manager = self.manager()
            if self.is_loaded:
                return
            try:
                manager.load()
                for tensor in self._sent_home:
                    tensor.data = tensor.data.to(self.recipe.device)
            except BaseException:
                self.release_quietly()
                raise
            self.is_loaded = True
            self._fingerprint = Fingerprint(self._tensors_on_device())
        if self.when_loaded is not None:
            self.when_loaded()

    def load_ahead(self, *, to_device: bool) -> None:
        """Begin to load in a thread: to the device, or into host memory as far as `max_in_cpu`
        goes. Does nothing before it is built. A failure is logged; who uses the component then
        meets it himself."""
        if self.is_built and not self.is_loaded:
            self._ahead = ticket = object()
            threading.Thread(
                target=self._load_ahead, args=(ticket, to_device),
                name=f"load {self.name}", daemon=True,
            ).start()

    def _load_ahead(self, ticket: object, to_device: bool) -> None:
        try:
            with self._lock:
                if self._ahead is not ticket:
                    return  # released meanwhile
                if to_device:
                    self.load()
                    if self.recipe.device.type == "cuda":  # for the streams of other threads
                        torch.cuda.current_stream(self.recipe.device).synchronize()
                else:
                    self.manager().prefetch()
        except Exception:
            self._log_failure_ahead()

    def _log_failure_ahead(self) -> None:
        log.warning("%s could not be loaded ahead of its use", self.name, exc_info=True)

    def release(self) -> None:
        """Take all values from the device; waits for a call or a load under way. Does nothing if
        there are none. Raises what the manager raises."""
        self._ahead = None
        with self._lock:
            if self._manager is None:
                return
            self.is_loaded = False
            fingerprint, self._fingerprint = self._fingerprint, None
            try:
                if fingerprint is not None:
                    fingerprint.mark_changed()
            finally:
                self._manager.release()
            self._send_home_what_was_added()

    def _send_home_what_was_added(self) -> None:
        """Adapters: the manager keeps on the device what it did not find there at first."""
        if self.recipe.device.type != "cpu":
            self._sent_home = self._tensors_on_device()
            for tensor in self._sent_home:
                tensor.data = tensor.data.to("cpu")

    def _tensors_on_device(self) -> list[Tensor]:
        return [each for each in self._tensors() if each.device == self.recipe.device]

    def _tensors(self) -> list[Tensor]:
        """Parameters and buffers, each once."""
        module = self.module()
        tensors: dict[int, Tensor] = {id(t): t for t in (*module.parameters(), *module.buffers())}
        return list(tensors.values())

    def release_quietly(self) -> None:
        """The same where another failure is on its way out: one in here is logged."""
        try:
            self.release()
        except Exception:
            log.error("%s could not be released", self.name, exc_info=True)

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Give everything back; the module's values are gone. Idempotent."""
        with self._lock:
            self._ahead = None
            self._is_closed = True
            self.is_loaded = False
            manager, self._manager, self._module = self._manager, None, None
            self._fingerprint = None
            self._sent_home = []
            if manager is not None:
                manager.close(restore=False)

    def _check_open(self) -> None:
        if self._is_closed:
            raise SwapClosedError(f"{self.name} is closed")
