"""`OffloadManager`: any `nn.Module` on one device, its layers there only while they are used."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from nvmeswap.config import AioConfig, SwapBlock
from nvmeswap.errors import SwapClosedError, SwapUsageError
from nvmeswap.offload.block import Block, ManagedTensor, Mover
from nvmeswap.offload.build import (
    Settings,
    Values,
    build,
    can_restore,
    refuse_to_restore_too_much,
    restore_all,
    undo,
)
from nvmeswap.offload.changes import StructureChanges
from nvmeswap.offload.gradients import GradientTraffic
from nvmeswap.offload.optimizer_home import OffloadedHome, check_options
from nvmeswap.offload.passes import Passes, PassEvents
from nvmeswap.offload.refusals import (
    as_device,
    refuse_modules,
    refuse_processes,
    shares_memory,
)
from nvmeswap.offload.selection import choose_staying, tensors_named
from nvmeswap.offload.units import Granularity
from nvmeswap.offload.window import Unit, Window
from nvmeswap.stats import OffloadStats
from nvmeswap.swap.plan import Plan
from nvmeswap.swap.swapped import Params, SwappedOptimizer

_log = logging.getLogger(__name__)
# Weakly both: a model and its manager, who refer to each other, go together when nobody has them.
_managers: weakref.WeakKeyDictionary[nn.Module, weakref.ref[OffloadManager]] = (
    weakref.WeakKeyDictionary()
)


class OffloadManager(PassEvents):
    """Keeps a model's weights in host memory or on NVMe, and each on the device while it is used.

        manager = OffloadManager(model, "cuda", path="/mnt/nvme", granularity="block")
        optimizer = torch.optim.AdamW(adapters.parameters())
        model(inputs).sum().backward()
        optimizer.step()
        manager.close()                      # the model is as it was before

    Outputs, gradients and trained weights are bit for bit those of the model on the device. While a
    parameter is away, its `data` is an ordinary tensor in host memory with its real values: it can
    be read, saved and edited. The parameter itself is always the same object.

    Args: `tier`, where frozen weights are ("nvme" if a `path`, a folder, is given); `trainable`,
    where trained ones are: always on the device ("resident"; also None, if there are frozen ones
    beside them: then they are adapters), in host memory, or on NVMe (None: in `tier`), in both of
    which their gradients are tensors in host memory after backward, for any optimizer on the CPU
    (or `optimizer()`); `granularity`, what comes at a time: "leaf" modules, a
    "block" of a list of modules, subtrees of so many bytes ("64MB"), or modules by name;
    `prefetch`, units that come ahead; `keep_resident_bytes`, of units that never leave;
    `max_in_cpu`, bytes of NVMe's that stay in host memory between uses; `buffer_count`, units that
    are read ahead in host memory (None: prefetch and two); `pin_memory`, page-lock host memory;
    `buffers`, "swap" or "resident"; `unified_memory`, whether host and device share their memory
    ("auto" asks the device): then tier "cpu" moves the model to the device once and for all;
    `values(name, start, out)`, for tensors on the meta device: fills `out` (flat, on the host) with
    the elements of a tensor from `start` on.
    Raises: SwapConfigError, SwapPathError, SwapBudgetError, SwapSpaceError on construction, with
    the model as it was; SwapUsageError for a model that can't be served; SwapReadError and its kin
    from the model's forward or backward, after which both can be called again.
    Blocking: construction copies the model; forward and backward wait for the drive where it is
    late. Threads: one at a time uses the model.
    Ownership: the model's weights are the manager's until `close`.
    Not for several processes that train together: that is `nvmeswap.zero3`.
    """

    def __init__(
        self,
        model: nn.Module,
        device: str | torch.device = "cuda",
        *,
        tier: Literal["cpu", "nvme"] | None = None,
        path: str | Path | None = None,
        trainable: Literal["resident", "cpu", "nvme"] | None = None,
        granularity: Granularity = "leaf",
        prefetch: int = 1,
        keep_resident_bytes: int = 0,
        max_in_cpu: int = 0,
        buffer_count: int | None = None,
        pin_memory: bool = True,
        buffers: Literal["swap", "resident"] = "swap",
        unified_memory: bool | Literal["auto"] = "auto",
        swap: SwapBlock | None = None,
        aio: AioConfig | None = None,
        values: Values | None = None,
    ) -> None:
        self.device = as_device(device)
        tier = tier or ("nvme" if path is not None else "cpu")
        self._settings = Settings(
            self.device, tier, path, trainable, granularity, prefetch, keep_resident_bytes,
            max_in_cpu, buffer_count, pin_memory, buffers, swap or SwapBlock(), aio or AioConfig(),
            is_pass_through=shares_memory(self.device, unified_memory) and tier == "cpu",
        )
        if self._settings.is_pass_through:
            _log.info("%s shares its memory with the host: the model stays on it", self.device)
        refuse_modules(model, manager_of)
        refuse_processes(model)
        self._lock = threading.RLock()
        self.model = model
        self._outermost = model
        self._materialized = 0
        self._plans: dict[tuple[nn.Module, bool], Plan] = {}
        with contextlib.ExitStack() as on_error:
            with torch.inference_mode(False), torch.no_grad():
                self._built = build(model, self._settings, values)
            on_error.callback(self._built.homes.close)
            on_error.callback(undo, self._built)
            self._mover = Mover(self.device, self._built.spare)
            self._window = Window(self._built.units, self._mover, prefetch=prefetch)
            if self.device.type == "cpu":
                keep_resident_bytes += max_in_cpu
            for unit in choose_staying(self._built.units, keep_resident_bytes):
                unit.stays = True
            self._trained = {managed for _, managed in self._built.trained}
            self._gradients = GradientTraffic(
                self._mover, self._window, pin_memory=pin_memory, lock=self._lock
            )
            on_error.callback(self._gradients.close)
            self._gradients.watch(self._built.trained)
            self._passes = Passes(
                model, self._built.needs, self._window, self._mover, self, self._lock
            )
            self._followed = StructureChanges(
                model, self._built.units, [each.member for each in self._built.residents],
                self._passes, self.device,
            )
            on_error.callback(self._passes.unfollow)
            self._passes.follow_all()
            self._finalizer = weakref.finalize(self, self._built.homes.close)
            on_error.callback(_forget, self)
            _managers.update(dict.fromkeys(model.modules(), weakref.ref(self)))
            on_error.pop_all()

    # --- passes -----------------------------------------------------------------------------------

    def begin_forward(self, module: nn.Module) -> None:
        """For `Passes`."""
        if torch.is_grad_enabled():
            refuse_processes(module)
        if module is self.model or next(module.children(), None) is not None:
            self._followed.catch_up(self.model)
        if self._window.is_held and not self._materialized:
            self._window.reset()  # what Ctrl-C left
        if not self._materialized:
            self._window.release_all()  # what stayed for a backward that may come or not
        self._outermost = module
        self._use_plan(is_training=torch.is_grad_enabled())
        self._window.plan.rewind()
        self._expect()

    def end_forward(self, *, has_graph: bool) -> None:
        """For `Passes`."""
        if has_graph:
            self._window.show_homes()
        else:
            self._window.end_pass()
        self._mover.settle()

    def begin_backward(self) -> None:
        """For `Passes`."""
        self._use_plan(is_training=True)

    def end_backward(self) -> None:
        """For `Passes`."""
        self._window.end_pass()
        self._gradients.finish()
        self._mover.settle()

    def fail(self) -> None:
        """For `Passes`."""
        self._window.release_all()
        self._gradients.forget_pass()
        self._mover.settle()

    def _use_plan(self, *, is_training: bool) -> None:
        """That of the module which was called last; the first time it is a guess."""
        key = (self._outermost, is_training)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = Plan()
            order = [unit.name for unit in self._passes.units_below(self._outermost)]
            plan.expect([*order, *reversed(order)] if is_training else order)
        self._window.plan = plan

    def _expect(self) -> None:
        """Reads from NVMe run ahead by the plan."""
        names = self._window.plan.order
        self._built.homes.expect(
            [block.name for name in names for block in self._window.unit(name).blocks]
        )

    def after_backward(self) -> None:
        """Gradients are in host memory and nothing is on the device but what stays. It is so after
        backward anyway; this is for loops that call it, and after a backward that failed."""
        self._check_idle()
        self._passes.abandon()
        self._window.release_all()
        self._gradients.finish()
        self._mover.settle()

    # --- a component of a pipeline ----------------------------------------------------------------

    def load(self) -> None:
        """Bring all that is not trained to the device, until `release`; the copies go on behind
        what is queued."""
        self._check_open()
        with self._lock:
            self._expect()
            self._window.bring_all(
                [u for u in self._built.units if not any(m in self._trained for _, m in u.tensors)]
            )

    def prefetch(self) -> None:
        """Start to read from NVMe what is used first; does not wait."""
        self._check_open()
        with self._lock:
            self._expect()

    def release(self) -> None:
        """Everything that is not in use leaves the device, also what `keep_resident_bytes` or
        `load` keeps there."""
        with self._lock:
            self._passes.forget_stale_calls()
            self._window.release_all(also_staying=True)
            self._mover.settle()
            self._mover.give_up_spare()

    def optimizer(
        self, optimizer_class: type[Optimizer], params: Params | None = None, **options: Any
    ) -> SwappedOptimizer:
        """A `SwappedOptimizer` whose states are under `path` (or `nvme_path`, if told), for
        parameters in any tier; those of NVMe are updated by direct reads and writes. None: all that
        are trained. Its options are those of `SwappedOptimizer`, but `overlap`. Close it before the
        manager: over parameters on NVMe it can't step afterwards. Raises SwapUsageError for such a
        one that was frozen when the model was offloaded, and what `SwappedOptimizer` raises."""
        self._check_open()
        options.setdefault("nvme_path", self._settings.path)
        check_options(options)
        if params is None:
            params = [each for each in self.model.parameters() if each.requires_grad]
        pairs = [pair for unit in self._built.units for pair in unit.tensors]
        home = OffloadedHome(pairs, self._trained, self._finalizer)
        return SwappedOptimizer(optimizer_class, params, home=home, **options)

    # --- weights ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def materialize(self, *names: str, write: bool = True) -> Iterator[None]:
        """Have these on the device, to be read or edited; edits are kept.

            with manager.materialize("layers.3"):
                model.layers[3].weight.add_(delta)

        Names of modules or tensors, or patterns; none: all. `write=False`, to read them: nothing is
        written to their homes at the end, whatever was done through `.data`. Raises SwapUsageError
        for an unknown one, SwapWriteError at the end.
        """
        self._check_open()
        chosen = tensors_named(self._built, names)
        held: list[Unit] = []
        with self._lock:
            self._materialized += 1
            try:
                for unit in chosen:
                    self._window.hold(unit, is_planned=False)
                    held.append(unit)
            except BaseException:
                self._end_materialize(held, {})
                raise
        try:
            with torch.no_grad():
                yield
        finally:
            with self._lock:
                self._end_materialize(held, chosen if write else {})

    def _end_materialize(
        self, held: list[Unit], chosen: Mapping[Unit, Mapping[Block, Sequence[ManagedTensor]]]
    ) -> None:
        self._materialized -= 1
        try:
            for unit in held:
                for block, tensors in chosen.get(unit, {}).items():
                    self._mover.send_back(block, *tensors)
        finally:
            for unit in held:
                self._window.let_go(unit, has_run=False)
            self._window.release_all()
            self._mover.settle()

    def state_dict(self) -> dict[str, Any]:
        """The model's, with real tensors: of NVMe's, mapped from their file, so that they take
        memory only while they are read. As torch's, they are the model's own: copy what is to
        stay."""
        with self._lock:
            self._to_home()
            return dict(self.model.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """As the model's; what goes to NVMe is there on return. Raises SwapWriteError."""
        self._to_home()
        result = self.model.load_state_dict(state_dict, strict=strict)
        self._to_home()
        return result

    def _to_home(self) -> None:
        """Nothing is on the device, and homes have what was written to tensors that are away."""
        with self._lock:
            self._check_idle()
            self._window.release_all(also_staying=True)
            self._window.take_in_edits()
            self._mover.settle()

    # --- the rest ---------------------------------------------------------------------------------

    @property
    def units(self) -> tuple[Unit, ...]:
        """What comes and goes together, in the order of the model."""
        return tuple(self._built.units)

    def stats(self) -> OffloadStats:
        """Counters since the start."""
        window, mover = self._window, self._mover
        return OffloadStats(
            unit_count=len(window.units),
            resident_nbytes=sum(unit.nbytes for unit in window.here),
            peak_resident_nbytes=window.peak_nbytes,
            resident_unit_count=len(window.here),
            peak_resident_unit_count=window.peak_count,
            in_nbytes=mover.in_nbytes,
            out_nbytes=mover.out_nbytes,
            bring_count=window.bring_count,
            prefetch_count=window.prefetch_count,
            late_count=window.late_count,
            stall_s=window.stall_s,
            host_nbytes=self._built.homes.host_nbytes + self._gradients.host_nbytes,
        )

    def close(self, *, restore: bool = True) -> None:
        """Take the hooks away and the weights back into memory, on the device that each was on;
        idempotent. `restore=False` leaves them as they are: of NVMe's, mapped from a file that has
        no name any more. Raises SwapUsageError while the model is running, or if memory for them is
        missing; SwapReadError if they can't be read: then the manager is still open, and
        `restore=False` is left."""
        if not self._finalizer.alive:
            return
        self._check_idle()
        if restore:
            refuse_to_restore_too_much(self._built)
        self._passes.abandon()
        self._to_home()
        if restore:
            restore_all(self._built)
        self._passes.unfollow()
        self._gradients.close()
        _forget(self)
        self._mover.give_up_spare()
        self._finalizer()

    def __enter__(self) -> OffloadManager:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """As `close`; a model that does not fit into memory is left mapped from its file, with a
        warning. An error of the block is not replaced by one in here, which is logged."""
        try:
            self.close(restore=not self._finalizer.alive or can_restore(self._built))
        except Exception:
            if error is None:
                raise
            _log.exception("the manager could not be closed")

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise SwapClosedError("the manager is closed", fix="offload the model again")

    def _check_idle(self) -> None:
        self._check_open()
        if not self._passes.is_idle:
            raise SwapUsageError(
                "the model is running", fix="call this outside of its forward and backward"
            )


def _forget(manager: OffloadManager) -> None:
    """Its modules, wherever they are now, can be offloaded again."""
    for module in [each for each, found in _managers.items() if found() is manager]:
        _managers.pop(module, None)


def manager_of(model: nn.Module) -> OffloadManager | None:
    """Who manages a model, or the one that it is a part of, if anybody does."""
    found = _managers.get(model)
    manager = None if found is None else found()
    return manager if manager is not None and manager._finalizer.alive else None
