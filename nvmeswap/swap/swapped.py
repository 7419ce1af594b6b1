"""`SwappedOptimizer`: any elementwise torch optimizer with its state on NVMe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from nvmeswap.config import AioConfig, SwapBlock
from nvmeswap.errors import SwapConfigError, SwapUsageError
from nvmeswap.stats import OptimizerStats
from nvmeswap.swap.elementwise import ElementwiseOptimizer
from nvmeswap.swap.home import ParameterHome, ResidentHome
from nvmeswap.swap.optimizer import DEFAULT_BUFFER_COUNT, PipelinedOptimizerSwapper
from nvmeswap.swap.overlap import BackwardOverlap, OverlapSettings
from nvmeswap.swap.sizing import Sizing, open_space
from nvmeswap.swap.space import SwapSpace
from nvmeswap.swap.stateful import StatefulOptimizer
from nvmeswap.swap.states import OptimizerStates, halves_to_read
from nvmeswap.swap.sub_group import STATE_DTYPE, StateItem, SubGroupLayout
from nvmeswap.swap.update_place import UpdatePlace
from nvmeswap.timeline import Timeline

_Optimizer = TypeVar("_Optimizer", bound="SwappedOptimizer")
Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


class SwappedOptimizer(StatefulOptimizer):
    """`optimizer_class`, whose state lives on NVMe and is in memory only while it is updated.

        optimizer = SwappedOptimizer(
            torch.optim.AdamW, model.parameters(), lr=1e-3, nvme_path="/mnt/nvme"
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.close()

    It is for optimizers that treat each element alone and keep states of the parameter's shape
    (AdamW, Adam, SGD, Adagrad, RMSprop, Lion, ...); others are refused by name. fp32 parameters get
    the values, bit for bit, of `optimizer_class(params, fused=True, ...)` (without `fused` where
    the class has none, and as you say where you say it); bf16 and fp16 ones those of fp32 masters
    that are updated so, rounded. It can be used wherever torch takes an optimizer.

    Args: `options` as the class takes them; `nvme_path`, an existing folder, or one on each of
    several drives; `sub_group_size`, the most elements read, updated and written together (None:
    from the budget); `buffer_count`, how many of those the pipeline has in memory (3 overlap
    reading, updating and writing); `ratio`, the share of sub-groups that is swapped, the rest stays
    in memory, as does what `swap.host_memory_nbytes` leaves room for; `state_dtype`, bfloat16
    halves the states and is NOT exact; `update_thread_count`, of torch's threads for the update
    (pieces that fit a cache gain nothing from more); `update_device`: "cuda" computes updates on
    the current GPU, and fp32 and bf16 parameters that are there are updated in their own memory
    (None: as `swap` says, "cpu" by default);
    `overlap`, updates during backward; `pin_memory`, page-lock the memory; `swap` and `aio`, as in
    the JSON; `home`, for plugs: where the parameters are, if not in memory.
    Raises: SwapPathError, SwapBudgetError, SwapSpaceError on construction, SwapUsageError for an
    optimizer that can't be served, or for "cuda" where there is none; SwapReadError or
    SwapWriteError in `step`, which can be called
    again and goes on where it stopped.
    Blocking: `step` waits for the disk.
    Threads: the training loop's only.
    Not for parameters that are swapped themselves: that is `nvmeswap.zero3.shard`.
    """

    _space: SwapSpace | None
    _timeline: Timeline | None = None

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        params: Params,
        *,
        nvme_path: str | Path | Sequence[str | Path],
        sub_group_size: int | None = None,
        buffer_count: int = DEFAULT_BUFFER_COUNT,
        ratio: float = 1.0,
        state_dtype: torch.dtype = STATE_DTYPE,
        update_thread_count: int = 1,
        update_device: str | torch.device | UpdatePlace | None = None,
        overlap: OverlapSettings | None = None,
        pin_memory: bool = True,
        swap: SwapBlock | None = None,
        aio: AioConfig | None = None,
        home: ParameterHome | None = None,
        **options: Any,
    ) -> None:
        sizing = Sizing(
            nvme_path, sub_group_size, buffer_count, ratio, pin_memory, update_thread_count
        )
        swap = swap or SwapBlock()
        place = UpdatePlace.of(swap.update_device if update_device is None else update_device)
        self._begin(optimizer_class, params, home or ResidentHome(), options, state_dtype, place)
        items = self.items()
        numel = sizing.sub_group_numel(items, swap.host_memory_nbytes)
        layouts = self.lay_out(numel)
        self._space = open_space(sizing, layouts, swap, aio or AioConfig())
        try:
            self.attach(
                PipelinedOptimizerSwapper(
                    layouts,
                    store=self._space.store,
                    pool=self._space.pools["optimizer"],
                    timeout_s=self._space.timeout_s,
                    buffer_count=buffer_count,
                    ratio=ratio,
                    thread_count=update_thread_count,
                )
            )
            if overlap is not None:
                self.overlap_backward(overlap)
        except BaseException:
            self.close()
            raise

    @classmethod
    def over(
        cls: type[_Optimizer],
        optimizer_class: type[Optimizer],
        params: Params,
        home: ParameterHome,
        *,
        state_dtype: torch.dtype = STATE_DTYPE,
        update_device: str | torch.device | UpdatePlace = "cpu",
        **options: Any,
    ) -> _Optimizer:
        """For plugs: an optimizer over a home of theirs. `attach` must follow, with a swapper over
        what `lay_out` gave."""
        optimizer = cls.__new__(cls)
        place = UpdatePlace.of(update_device)
        optimizer._begin(optimizer_class, params, home, options, state_dtype, place)
        return optimizer

    def _begin(
        self,
        optimizer_class: type[Optimizer],
        params: Params,
        home: ParameterHome,
        options: Mapping[str, Any],
        state_dtype: torch.dtype,
        place: UpdatePlace,
    ) -> None:
        if state_dtype not in (torch.float32, torch.bfloat16):
            raise SwapConfigError(
                f"states can't be kept as {state_dtype}",
                key="state_dtype",
                fix="use torch.float32, or torch.bfloat16, which is not exact",
            )
        self._rule = ElementwiseOptimizer(optimizer_class, options, place.device)
        self._home = home
        home.update_on(place.device)
        self._updater = place.updater(self._rule)
        self._state_dtype = state_dtype
        self._space = None
        self._swapper = None
        self._overlap = None
        self._step = None
        self._started, self._given = set(), set()
        self._scales = {}
        super().__init__(params, dict(self._rule.defaults))
        self._by_key = {}
        self._owned = {}
        self._own(self._trained())

    def items(self, first_group: int = 0) -> list[StateItem]:
        """What is to be laid out: all parameters that require gradients, in the order of the
        groups (from `first_group` on)."""
        return [
            self._home.item(parameter, self._rule.states_of(group), self._state_dtype)
            for group in self.param_groups[first_group:]
            for parameter in group["params"]
            if parameter.requires_grad
        ]

    def lay_out(self, sub_group_numel: int) -> list[SubGroupLayout]:
        """The sub-groups of all of them; those of groups added later will be no larger."""
        self._sub_group_numel = sub_group_numel
        return PipelinedOptimizerSwapper.lay_out(self.items(), sub_group_numel)

    def attach(self, swapper: PipelinedOptimizerSwapper) -> None:
        """Use `swapper`, laid out by `lay_out`, and write the first masters, as the parameters are
        (states come with the first step)."""
        self._swapper = swapper
        self._states = OptimizerStates(swapper, self._home, self._by_key)
        self._updater.reserve(self._states.layouts(self._by_key))
        swapper.read_with(partial(halves_to_read, self._home, self._by_key))
        swapper.initialise(self._states.fill_in_masters)
        self._home.forget_edits(self._by_key.values())

    def overlap_backward(self, settings: OverlapSettings) -> None:
        """From now on update during backward."""
        if self._home.gradient_comes_once and _has_peers():
            raise SwapUsageError(
                "with several ranks a gradient is reduced after its hook, too late for its update",
                fix="leave out `overlap`, or shard the model by nvmeswap.zero3",
            )
        self._overlap = BackwardOverlap(self, settings, self._trained())
        # GradScaler then leaves the gradients alone and shows itself in step(), which refuses it.
        self._step_supports_amp_scaling = True

    # --- torch.optim.Optimizer ----------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; gradients that are kept on the host are forgotten (or zeroed), too."""
        if self._step is not None:
            raise SwapUsageError(
                "the last step failed half-way and still needs its gradients",
                fix="call step() again until it succeeds, or go back to a checkpoint",
            )
        super().zero_grad(set_to_none)
        self._home.zero_gradients(set_to_none=set_to_none)
        self._forget_step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, at any time between steps. Raises SwapBudgetError where the memory taken at
        the start is too small for it, SwapSpaceError; then nothing has changed."""
        swapper = self._swapper
        if swapper is None:
            super().add_param_group(param_group)  # the constructor's
            return
        self._refuse_in_a_step()
        first_group = len(self.param_groups)
        super().add_param_group(param_group)
        items = self.items(first_group)
        try:
            swapper.add(items, self._sub_group_numel)
        except BaseException:  # Ctrl-C can come when they have been added
            if not all(item.numel == 0 or swapper.item(item.key) for item in items):
                del self.param_groups[first_group:]
                raise
            self._take_over_group()
            raise
        self._take_over_group()

    def _take_over_group(self) -> None:
        # Their masters are filled in by their first step: until then they count as edited.
        trained = [p for p in self.param_groups[-1]["params"] if p.requires_grad]
        self._own(trained)
        if self._overlap is not None:
            self._overlap.watch(trained)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """As torch.nn.utils.clip_grad_norm_ over all parameters of this optimizer."""
        self._refuse_to_clip_in_overlap()
        return torch.nn.utils.clip_grad_norm_(
            self._by_key.values(), max_norm, norm_type, error_if_nonfinite
        )

    def _refuse_to_clip_in_overlap(self) -> None:
        if self._overlap is not None:
            raise SwapUsageError(
                "the total norm is known only when backward is over, and by then parameters have "
                "been updated",
                fix="give OverlapSettings(clip_norm=...), which clips each parameter's gradient on "
                "its own, or don't overlap",
            )

    # --- beyond torch -------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until all state is on NVMe; raises what went wrong."""
        self._attached().flush()

    @property
    def timeline(self) -> Timeline | None:
        """Where steps note when they read, update, write and wait; None, as it is at first:
        nowhere."""
        return self._timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        self._attached().record(timeline)
        self._timeline = timeline

    def stats(self) -> OptimizerStats:
        """Counters since the start."""
        return self._attached().stats()

    def close(self) -> None:
        """Remove the swap files and give the memory back; the optimizer can't be used after it."""
        swapper, self._swapper = self._swapper, None
        if self._overlap is not None:
            self._overlap.close()
        if swapper is not None:
            swapper.close()
        self._updater.close()
        self._step = None
        space, self._space = self._space, None
        if space is not None:
            space.close()

    def _trained(self) -> list[torch.Tensor]:
        return [
            parameter
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]


def _has_peers() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
