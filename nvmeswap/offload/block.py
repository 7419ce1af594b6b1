"""A block of tensors on the device: brought by one copy, released by freeing its storage.

Facts (torch 2.11 and 2.13). The storage stays the same object all the time (`storage.py`), so that
views which autograd saved (`weight.t()`) are right again when the bytes are back. `parameter.data`
is set without counting as a change of the parameter. CUDA's allocator hands freed memory out again
in the order of the stream that it was taken on, so copies on another stream must wait for that one
first, and it for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from nvmeswap.errors import SwapChecksumError, SwapTimeoutError, SwapUsageError
from nvmeswap.offload.homes import BlockHome
from nvmeswap.offload.layout import BlockLayout, Place, Segment, give_data
from nvmeswap.offload.storage import SparePages, coming_storage
from nvmeswap.offload.units import Member
from nvmeswap.store.store import StoreRequest

# Buffers are compared by their version; but torch's own layers change some without counting, in
# training. Smaller ones are copied back after every use.
_ALWAYS_COPIED_BACK_NBYTES = 1 << 20


@dataclass(eq=False, slots=True)
class ManagedTensor:
    """A member of a unit. `on_device` and `at_home` are what its `data` is in turns; `version` is
    that of its tensor when it last was in step with its home; `first_device`, where it was before
    all this."""

    member: Member
    place: Place
    on_device: torch.Tensor
    at_home: torch.Tensor
    first_device: torch.device
    home_address: int = field(init=False)
    version: int = 0
    is_on_device: bool = False
    is_unset: bool = False  # it was on the meta device, and got no values yet

    def __post_init__(self) -> None:
        self.home_address = self.at_home.data_ptr()

    @property
    def tensor(self) -> torch.Tensor:
        return self.member.tensor

    def show_device(self) -> None:
        """Its data is the device's from now on."""
        self.is_on_device = True  # first: what an exception leaves between is shown home again
        self.tensor.data = self.on_device

    def begin_use(self) -> None:
        """It shows the device already, and a further use begins: its gradient is to come by itself.
        (Uses that share a node of autograd's have theirs added up before those of others.)"""
        tensor = self.tensor
        if tensor.requires_grad and tensor.data_ptr() == self.on_device.data_ptr():
            tensor.data = self.at_home
            tensor.data = self.on_device

    def take_home(self) -> None:
        """The first time that it shows its home."""
        give_data(self.tensor, self.at_home)
        self.version = self.tensor._version

    def show_home(self) -> None:
        """Its data is the home's from now on; one that was converted keeps its own."""
        if not self.is_converted:
            self.tensor.data = self.at_home
        self.is_on_device = False

    @property
    def shown(self) -> torch.Tensor:
        """What its data ought to be now."""
        return self.on_device if self.is_on_device else self.at_home

    @property
    def was_changed(self) -> bool:
        """Whether somebody wrote to it, or gave it other data, since it was in step."""
        tensor = self.tensor
        address = self.on_device.data_ptr() if self.is_on_device else self.home_address
        return tensor._version != self.version or tensor.data_ptr() != address

    def may_have_changed_unseen(self) -> bool:
        """True of buffers that layers change without counting."""
        if not self.member.is_buffer:
            return False
        if self.place.span_nbytes <= _ALWAYS_COPIED_BACK_NBYTES:
            return True
        return any(module.training for module, _ in self.member.places)

    def in_step(self) -> None:
        """What it shows and its home have the same values now."""
        self.is_unset = False
        self.version = self.tensor._version

    @property
    def is_converted(self) -> bool:
        """Whether it was given data of another kind."""
        tensor = self.tensor
        return tensor.dtype is not self.place.dtype or tensor.shape != self.place.shape

    def refuse_conversion(self) -> None:
        """Raise SwapUsageError if it was given data of another kind."""
        tensor = self.tensor
        if self.is_converted:
            raise SwapUsageError(
                f"{self.member.name} was {self.place.dtype} {tuple(self.place.shape)} when the "
                f"model was offloaded, and is {tensor.dtype} {tuple(tensor.shape)} now",
                fix="close() the manager, convert the model, and offload it again",
            )


class Block:
    """Tensors that are brought and released together, and their home."""

    def __init__(
        self, name: str, layout: BlockLayout, members: list[Member], home: BlockHome,
        device: torch.device, spare: SparePages,
    ) -> None:
        self.name = name
        self.nbytes = layout.nbytes
        self.home = home
        self.tensors: list[ManagedTensor] = []
        self.stand_ins: dict[Segment, torch.UntypedStorage] = {}
        self._device, self._spare = device, spare
        self._take_storage()
        for member, place in zip(members, layout.places, strict=True):
            segment = place.segment
            if segment not in self.stand_ins:
                self.stand_ins[segment] = home.stand_in(segment)
            at_home = place.in_segment(self.stand_ins[segment])
            on_device = place.in_block(self.storage, device)
            first_device = torch.device("cpu") if member.tensor.is_meta else member.tensor.device
            self.tensors.append(ManagedTensor(member, place, on_device, at_home, first_device))
        self._own_count = self._user_count()
        self.memory.free()
        self.is_here = False
        self.taken_on: torch.cuda.Stream | None = None  # while on a GPU: where its memory is from
        self.arrived: torch.cuda.Event | None = None
        self.reads: list[StoreRequest] = []  # into its memory, from NVMe
        self.sent: torch.cuda.Event | None = None  # the last copy back to its home

    def _take_storage(self) -> None:
        self.memory = coming_storage(self.nbytes, self._device, self._spare)
        self.storage = self.memory.storage
        self.bytes = _all_of(self.storage)

    def _user_count(self) -> int:
        count: int = torch._C._storage_Use_Count(self.storage._cdata)
        return count

    def is_shown(self) -> bool:
        """Whether somebody else has tensors in its memory: results, a state_dict, autograd. For
        when its own tensors show their homes."""
        return self._user_count() > self._own_count

    def leave_memory(self) -> None:
        """Its memory is theirs who show it, for as long as they do; the block goes on with
        other."""
        self._take_storage()
        for managed in self.tensors:
            managed.on_device = managed.place.in_block(self.storage, self._device)
        self.memory.free()

    def renew_stand_in(self, segment: Segment) -> None:
        """The memory of a stand-in was exchanged (`share_memory_` does): show the home again, with
        the values that it had."""
        old = self.stand_ins[segment]
        new = self.stand_ins[segment] = self.home.stand_in(segment)
        _all_of(new).copy_(_all_of(old))
        for managed in self.tensors:
            if managed.place.segment == segment:
                managed.at_home = managed.place.in_segment(new)
                if not managed.is_on_device and not managed.is_converted:
                    managed.tensor.data = managed.at_home


def _all_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Its bytes, as a tensor with a version of its own: what is copied is no change."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
        storage, 0, (storage.nbytes(),), (1,)
    )


class Mover:
    """Copies blocks between their homes and one device. On a GPU copies run on streams of their own
    and nothing waits on the host but `settle`; on the CPU they are done on return.

    Counters are bytes since the start. Threads: the manager's lock guards it.
    """

    def __init__(self, device: torch.device, spare: SparePages) -> None:
        self.device = device
        self._spare = spare
        self.in_nbytes = self.out_nbytes = 0
        self.on_gpu = device.type == "cuda"
        self._in_stream = torch.cuda.Stream(device) if self.on_gpu else None
        self._out_stream = torch.cuda.Stream(device) if self.on_gpu else None

    def bring(self, block: Block) -> None:
        """Take memory for the block and start to copy it; waits for the drive where it must."""
        for read in block.reads:  # one that could not be waited for
            read.settle()
        block.reads = []
        with torch.no_grad(), _normal_mode():
            block.memory.take()
            block.is_here = True
            if self.on_gpu:
                block.taken_on = torch.cuda.current_stream(self.device)
            try:
                self._copy_in(block)
            except BaseException:
                self.drop(block)
                raise
        self.in_nbytes += block.nbytes

    def _copy_in(self, block: Block) -> None:
        if self._in_stream is None:
            block.reads = block.home.copy_to(block.bytes)
            return
        # Work that still uses this memory, if it was freed before, is on the stream already.
        self._in_stream.wait_stream(torch.cuda.current_stream(self.device))
        if block.sent is not None:
            self._in_stream.wait_event(block.sent)
        with torch.cuda.stream(self._in_stream):
            try:
                block.home.copy_to(block.bytes)
            except SwapChecksumError as error:
                raise altered(block, error) from error
            block.arrived = self._in_stream.record_event()

    def await_arrival(self, block: Block) -> None:
        """The current stream goes on when the block is there; reads are waited for. Raises
        SwapReadError and its kin."""
        for read in block.reads:
            try:
                read.wait()
            except SwapChecksumError as error:
                raise altered(block, error) from error
        block.reads = []
        if block.arrived is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(block.arrived)
            if stream != block.taken_on:
                block.bytes.record_stream(stream)

    def drop(self, block: Block, *, may_be_shown: bool = False) -> None:
        """Free the block's memory, as soon as what is queued has used it. What is being read is
        waited for; if that takes too long the memory stays. `may_be_shown`: if somebody else shows
        it, it is left to them."""
        for read in block.reads:
            read.drop()
        try:
            for read in block.reads:
                read.settle()
        except SwapTimeoutError:
            block.is_here = False
            return
        block.reads = []
        if block.taken_on is not None:
            for event in (block.arrived, block.sent):
                if event is not None:
                    block.taken_on.wait_event(event)
        block.is_here = False
        block.taken_on = block.arrived = None
        if may_be_shown and block.is_shown():
            block.leave_memory()
        else:
            block.memory.free()

    def refresh(self, block: Block) -> None:
        """Copy a block that is here once more: its home has changed."""
        for read in block.reads:
            read.settle()
        with torch.no_grad(), _normal_mode():
            self._copy_in(block)
        self.in_nbytes += block.nbytes

    def send_back(self, block: Block, *tensors: ManagedTensor) -> None:
        """Make what these tensors show the values of their home; on a GPU the home has them after
        `settle`, except for NVMe, where the whole block is written, and waited for. Raises
        SwapWriteError and its kin."""
        with torch.no_grad(), _normal_mode():
            for managed in tensors:
                managed.refuse_conversion()
                self._take_other_data(block, managed)
            if block.home.is_in_memory:
                for managed in tensors:
                    self._to_memory(block, managed)
                    managed.in_step()
                return
            self.out_nbytes += block.nbytes
            for request in block.home.write(0, self._values(block, tensors[0])):
                request.wait()
            block.home.forget_edits()
            for each in block.tensors:
                if each.is_on_device == tensors[0].is_on_device:
                    each.in_step()

    def _take_other_data(self, block: Block, managed: ManagedTensor) -> None:
        """If it was given other data, put that where its own is."""
        place = managed.place
        if managed.at_home.data_ptr() != managed.home_address:
            block.renew_stand_in(place.segment)
        shown, own = managed.tensor.data, managed.shown
        if shown.data_ptr() == own.data_ptr():
            return
        if shown.stride() != place.stride:
            shown = torch.empty_strided(
                place.shape, place.stride, dtype=place.dtype, device=shown.device
            ).copy_(shown)
        span_of(own, place).copy_(span_of(shown, place))
        managed.tensor.data = own

    def _to_memory(self, block: Block, managed: ManagedTensor) -> None:
        if not managed.is_on_device:
            return  # the home itself
        place = managed.place
        self.out_nbytes += place.span_nbytes
        source, target = span_of(managed.on_device, place), span_of(managed.at_home, place)
        if self._out_stream is None:
            target.copy_(source)
            return
        with self.behind_current_stream() as stream:
            target.copy_(source, non_blocking=True)
            block.sent = stream.record_event()

    def _values(self, block: Block, managed: ManagedTensor) -> torch.Tensor:
        """All bytes of a block, from where this tensor is, in memory of their own: pages of a
        mapped file can't be the source of a direct write to it."""
        if managed.is_on_device:
            return block.bytes.to("cpu", copy=True)
        values = torch.zeros(block.nbytes, dtype=torch.uint8, device="cpu")
        for segment, storage in block.stand_ins.items():
            begin = segment.offset_bytes
            values[begin : begin + segment.nbytes].copy_(_all_of(storage))
        return values

    @contextlib.contextmanager
    def behind_current_stream(self) -> Iterator[torch.cuda.Stream]:
        """On a GPU: the stream for copies to the host, behind what the current one has queued."""
        assert self._out_stream is not None
        self._out_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out_stream):
            yield self._out_stream

    def give_up_spare(self) -> None:
        """Memory that is kept for the next units goes back to the system."""
        self._spare.discard()

    def settle(self) -> None:
        """Wait until no copy reads or writes host memory: it is the user's again."""
        if self._in_stream is not None and self._out_stream is not None:
            self._in_stream.synchronize()
            self._out_stream.synchronize()


@contextlib.contextmanager
def _normal_mode() -> Iterator[None]:
    with torch.inference_mode(False):
        yield


def altered(block: Block, error: SwapChecksumError) -> SwapChecksumError:
    """The same, in words about weights."""
    return SwapChecksumError(
        f"the weights of {block.name} are not those that were written", path=error.path,
        offset_bytes=error.offset_bytes, cause=str(error),
        fix="the drive is failing (see `dmesg`); close(restore=False) keeps what it gives",
    )


def span_of(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    """Its bytes from the first element to the last, flat; gaps between elements are in it."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        tensor.untyped_storage(), tensor.storage_offset() * place.dtype.itemsize,
        (place.span_nbytes,), (1,),
    )
