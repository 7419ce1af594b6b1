"""`OptimizerSwapper`: what DeepSpeed's ZeRO-3 asks of its optimizer swappers, on our store."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from nvmeswap.deepspeed.buffers import HostBuffers
from nvmeswap.deepspeed.checkpoint import CheckpointFolder
from nvmeswap.deepspeed.raw_files import read_raw
from nvmeswap.deepspeed.space import open_store
from nvmeswap.deepspeed.sub_group import Place, SubGroup
from nvmeswap.deepspeed.traffic import Traffic
from nvmeswap.errors import SwapUsageError
from nvmeswap.io.alignment import padded_nbytes
from nvmeswap.stats import StoreStats

_PAGE_NBYTES = 4096

# What `initialize_from_swapped_fp16_params` is given of each partition: the tensor, whose data is
# elsewhere if there is a path, its elements, and the file that has them.
Partition = tuple[torch.Tensor, int, str | None]


class SwapConfig(Protocol):
    """DeepSpeed's block offload_optimizer, as far as it matters here."""

    @property
    def nvme_path(self) -> str | os.PathLike[str]: ...
    @property
    def buffer_count(self) -> int: ...
    @property
    def pipeline_read(self) -> bool: ...
    @property
    def pipeline_write(self) -> bool: ...


class OptimizerSwapper:
    """Masters, states and gradients of DeepSpeed's sub-groups; stands in for both its
    PartitionedOptimizerSwapper and its PipelinedOptimizerSwapper.

    A sub-group is a `torch.empty(0)` with a `ds_id`, given to `initialize_parameters`. Between
    `swap_in_optimizer_state` and `swap_out_optimizer_state` its data, and those of its states in
    `optimizer.state`, are in memory, and its `grad` is what `swap_out_gradients` brought: zeros
    where it brought nothing.

    Args: as DeepSpeed names them. `base_folder`, `device` and `dtype` but for its size are not
    needed here: the files are in a folder of this swapper's own below `swap_config.nvme_path`.
    `buffer_count` times `largest_numel` elements is the budget of host memory; what remains of it
    beyond what a step needs keeps sub-groups in memory between steps.
    Raises: SwapSpaceError where space is taken (the first write of each tensor); SwapChecksumError
    and SwapReadError in `swap_in_optimizer_state`; SwapWriteError in the call that waits for the
    write, or in the next one: the sub-group is then in memory, whole, and can be swapped out again.
    Blocking: for the drive, where nothing else is said.
    Threads: one at a time.
    Ownership: files go with `close`, or with the swapper.
    """

    def __init__(
        self,
        swap_config: SwapConfig,
        aio_config: Mapping[str, Any],
        base_folder: str,
        optimizer: torch.optim.Optimizer,
        largest_numel: int,
        device: Any,
        dtype: torch.dtype,
        timers: Any,
    ) -> None:
        engine, self._store = open_store(swap_config.nvme_path, aio_config)
        largest_nbytes = padded_nbytes(largest_numel * dtype.itemsize, _PAGE_NBYTES)
        self.buffers = HostBuffers(
            swap_config.buffer_count * largest_nbytes,
            engine=engine,
            name="the optimizer's sub-groups",
            setting="offload_optimizer.buffer_count",
        )
        self._reads_ahead = bool(swap_config.pipeline_read)
        self._writes_behind = bool(swap_config.pipeline_write)
        group_count = 1 + self._reads_ahead + self._writes_behind
        self._traffic = Traffic(
            self._store, self.buffers, largest_nbytes=largest_nbytes, group_count=group_count
        )
        self._folder = CheckpointFolder(self._store.folder)
        self._optimizer = optimizer
        self._groups: dict[str, SubGroup] = {}
        self._timers = timers
        self._timer_names: set[str] = set()
        self._close = weakref.finalize(self, self._store.close)
        self._updated: set[str] = set()  # sub-groups, since they were swapped in
        self._hook = optimizer.register_step_post_hook(_note_updated(self._updated))

    def close(self) -> None:
        """Removes the files; calling again does nothing. What is in memory stays there. Raises
        SwapTimeoutError with nothing removed: call it again."""
        self._store.close()
        self._close.detach()
        self._hook.remove()
        self.buffers.close()

    def stats(self) -> StoreStats:
        """What was read and written since the start."""
        return self._store.stats()

    # --- what DeepSpeed asks ---------------------------------------------------------------------

    @staticmethod
    def parameter_id(param: torch.Tensor) -> str:
        """The name of a sub-group."""
        return param.ds_id  # type: ignore[attr-defined, no-any-return]

    def is_swappable_tensor(
        self, tensor: torch.Tensor | None = None, numel: int | None = None
    ) -> bool:
        """Whether it goes to NVMe: all but scalars does, however small. DeepSpeed leaves out what
        is below 1 MiB, and its checkpoints then restore none of that. `tensor.swappable = False`
        says no."""
        if tensor is not None:
            return bool(getattr(tensor, "swappable", True)) and tensor.dim() > 0
        if numel is None:
            raise SwapUsageError("neither a tensor nor its number of elements was given")
        return numel > 0

    @property
    def swap_folder(self) -> str:
        """The folder, with all that is needed to copy it into a checkpoint. Or to copy a checkpoint
        into it: what was copied counts from the next call on. Waits for all writes."""
        self._begin()
        self._traffic.wait_for_writes()
        for group in self._groups.values():
            self._find_states(group)
            if group.place is Place.BOUND:
                group.collect()
            self._traffic.write(group)
        self._folder.publish(self._groups.values(), self._optimizer)
        return str(self._store.folder)

    def initialize_parameters(
        self, parameters: Sequence[torch.Tensor], src_tensors: Sequence[torch.Tensor]
    ) -> None:
        """New sub-groups, whose masters are `src_tensors`, of any device and dtype. Raises
        SwapSpaceError, SwapWriteError."""
        for parameter, source in zip(parameters, src_tensors, strict=True):
            group = self._new_group(parameter, source.numel())
            assert group.master.memory is not None
            group.master.memory.copy_(source.detach().reshape(-1))
            self._add(group)
        self._traffic.wait_for_writes()

    def initialize_from_swapped_fp16_params(
        self,
        fp16_partitions_info: Sequence[Sequence[Partition]],
        fp16_num_elems: Sequence[int],
        fp16_pinned_buffers: Sequence[torch.Tensor],
        fp32_parameters: Sequence[torch.Tensor],
    ) -> None:
        """New sub-groups, whose masters are partitions one behind the other, in memory or in files
        of their own dtype. Raises SwapReadError for a file that is too short, and as above."""
        for parameter, numel, partitions in zip(
            fp32_parameters, fp16_num_elems, fp16_partitions_info, strict=True
        ):
            group = self._new_group(parameter, numel)
            assert group.master.memory is not None
            group.master.memory.zero_()
            offset = 0
            for tensor, part_numel, path in partitions:
                target = group.master.memory.narrow(0, offset, part_numel)
                if path is None:
                    target.copy_(tensor.detach().reshape(-1)[:part_numel])
                else:
                    read_raw(path, tensor.dtype, target)
                offset += part_numel
            self._add(group)
        self._traffic.wait_for_writes()

    def swap_in_optimizer_state(
        self, parameter: torch.Tensor, async_parameter: torch.Tensor | None = None
    ) -> None:
        """Binds a sub-group's master, states and gradient. With pipeline_read, starts to read
        `async_parameter`, if there is memory for it. A sub-group that is bound stays as it is."""
        group = self._begin(parameter)
        if group is None:
            return
        with self._timed("swap_in_state"):
            self._find_states(group)
            if group.place is not Place.BOUND:
                self._traffic.load(group)
            gradient = self._traffic.bring_gradient(group)
            gradient.zero_gaps()
            group.bind()
            parameter.grad = gradient.memory
            following = None if async_parameter is None else self._group(async_parameter)
            if self._reads_ahead and following is not None:
                self._find_states(following)
                self._traffic.load_ahead(following)

    def swap_out_optimizer_state(
        self, parameter: torch.Tensor, async_swap: bool = False
    ) -> None:
        """Takes a sub-group back. Its gradient goes if the optimizer has used it, and stays if
        DeepSpeed's user has only changed a state. Does not wait for the drive with `async_swap` and
        pipeline_write. Raises SwapUsageError if it is not bound."""
        group = self._begin(parameter)
        if group is None:
            return
        with self._timed("swap_out_state"):
            self._take_back(group, wait=not (async_swap and self._writes_behind))
            is_used_up = group.gradient is None or not group.gradient.has_pieces
            if is_used_up or group.id in self._updated:
                self._traffic.drop_gradient(group)
            self._updated.discard(group.id)

    def swap_out_gradients(
        self,
        parameter: torch.Tensor,
        gradient_offsets: Sequence[int],
        gradient_tensors: Sequence[torch.Tensor],
    ) -> None:
        """Copies pieces of a sub-group's gradient, which begin at these elements of it. What no
        piece comes for is zero."""
        group = self._begin(parameter)
        if group is None or not gradient_tensors:
            return
        with self._timed("swap_out_gradient"):
            gradient = self._traffic.bring_gradient(group)
            for offset, piece in zip(gradient_offsets, gradient_tensors, strict=True):
                gradient.put(offset, piece)

    def drop_gradients(self) -> None:
        """All of them; for a step that is not taken."""
        self._begin()
        for group in self._groups.values():
            if group.place is not Place.BOUND:
                self._traffic.drop_gradient(group)

    def flush_gradients(self) -> None:
        """Nothing is pending: gradients are copied at once."""

    def release_swap_buffers(self, parameter: torch.Tensor) -> None:
        """Takes a bound sub-group back; its gradient stays. What was changed in it does not count,
        unless the sub-group is one of those that stay in memory."""
        group = self._begin(parameter)
        if group is not None and group.place is Place.BOUND:
            self._release(group)

    def writeback_optimizer_state_and_gradients(
        self, parameter: torch.Tensor, write_opt_state: bool, write_gradients: bool
    ) -> None:
        """Takes a bound sub-group back, with what was changed in its states, or in its gradient,
        which stays. Raises SwapUsageError if it is not bound."""
        group = self._begin(parameter)
        if group is None:
            return
        self._check_bound(group)
        if write_gradients and group.gradient is not None and parameter.grad is not None:
            group.gradient.put(0, parameter.grad)
        if not write_opt_state:
            self._release(group)
            return
        with self._timed("swap_out_state"):
            self._take_back(group, wait=True)

    def purge_state(self) -> None:
        """Forgets states and gradients; masters stay. For states that are loaded instead."""
        self._begin()
        for group in self._groups.values():
            self._traffic.drop_gradient(group)
            self._forget_states(group)

    def pre_backward(self) -> None:
        """Before a backward pass."""
        self.init_timers()

    def post_backward(self) -> None:
        """After it."""

    def init_timers(self) -> None:
        """What `log_timers` logs begins anew."""
        self._timer_names = set()

    def log_timers(self) -> None:
        """Logs what was timed."""
        if self._timers and self._timer_names:
            self._timers.log(sorted(self._timer_names))

    # --- inside ----------------------------------------------------------------------------------

    def _begin(self, parameter: torch.Tensor | None = None) -> SubGroup | None:
        """Every call: what has ended meanwhile, and what was copied into the folder. Returns the
        sub-group of `parameter`, None if it is not swapped."""
        self._traffic.settle()
        if self._folder.is_published:
            self._folder.take_in(self._groups, self._optimizer, self._traffic)
        return None if parameter is None else self._group(parameter)

    def _group(self, parameter: torch.Tensor) -> SubGroup | None:
        return self._groups.get(getattr(parameter, "ds_id", ""))

    def _new_group(self, parameter: torch.Tensor, numel: int) -> SubGroup:
        self._begin()
        if self._group(parameter) is not None:
            raise SwapUsageError(f'"{self.parameter_id(parameter)}" is a sub-group already')
        group = SubGroup(parameter, numel)
        self._traffic.fill(group, group.master)
        return group

    def _add(self, group: SubGroup) -> None:
        """Writes it for the first time; it is known if there was space for it."""
        try:
            self._traffic.depart(group, wait=False)
        except BaseException:
            self._traffic.forget(group.master)
            raise
        self._groups[group.id] = group

    def _release(self, group: SubGroup) -> None:
        self._traffic.release(group)
        if group.gradient is not None and not group.gradient.has_pieces:
            self._traffic.drop_gradient(group)

    def _take_back(self, group: SubGroup, *, wait: bool) -> None:
        self._check_bound(group)
        self._find_states(group)
        group.collect()
        is_settled = bool(self._optimizer.state.get(group.parameter))
        if is_settled and self._traffic.keep(group):
            return
        self._traffic.depart(group, wait=wait)

    def _check_bound(self, group: SubGroup) -> None:
        if group.place is not Place.BOUND:
            raise SwapUsageError(
                f'sub-group "{group.id}" is not in memory',
                fix="swap_in_optimizer_state comes first",
            )

    def _find_states(self, group: SubGroup) -> None:
        values = self._optimizer.state.get(group.parameter, {})
        for replaced in group.find_states(values, self.is_swappable_tensor):
            self._traffic.forget(replaced)

    def _forget_states(self, group: SubGroup) -> None:
        values = self._optimizer.state.get(group.parameter, {})
        if any(_is_hollow(name, value, group) for name, value in values.items()):
            self._optimizer.state.pop(group.parameter)  # without these the rest is worth nothing
        for content in group.states.values():
            self._traffic.forget(content)
            content.unbind()
        group.states.clear()

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        if not self._timers:
            yield
            return
        self._timers(name).start()
        try:
            yield
        finally:
            self._timers(name).stop()
            self._timer_names.add(name)


def _note_updated(
    updated: set[str],
) -> Callable[[torch.optim.Optimizer, tuple[Any, ...], dict[str, Any]], None]:
    """A hook that holds no swapper. DeepSpeed puts a sub-group into `param_groups` for the step."""

    def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for settings in optimizer.param_groups:
            updated.update(getattr(each, "ds_id", "") for each in settings["params"])

    return note


def _is_hollow(name: str, value: object, group: SubGroup) -> bool:
    """A state that is ours to forget, or a copy of an empty one."""
    if not isinstance(value, torch.Tensor):
        return False
    return value.numel() == 0 or (name in group.states and group.states[name].tensor is value)
