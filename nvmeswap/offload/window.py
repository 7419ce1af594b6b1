"""Which units are on the device: those in use, and as many others as the window has places.

States of a unit:

    AWAY --bring--> ARRIVING --use--> IN_USE --last end--> IDLE --use--> IN_USE
    IDLE --the model's call ends--> ARRIVING          ARRIVING, IDLE --release--> AWAY

The order of use of the last pass is the plan (`nvmeswap.swap.plan`): the next units are brought
while one is used, and one whose turn comes again at once stays. A wrong plan costs time only.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from itertools import islice

import torch

from nvmeswap.errors import SwapError, SwapIOError, SwapUsageError
from nvmeswap.offload.block import Block, ManagedTensor, Mover
from nvmeswap.offload.fingerprint import Fingerprint
from nvmeswap.swap.plan import Plan


class UnitState(enum.Enum):
    """Where a unit's tensors are, and what they show.

    | state    | on the device       | tensors show | who may release it       |
    |----------|---------------------|--------------|--------------------------|
    | AWAY     | no                  | home         | -                        |
    | ARRIVING | perhaps on its way  | home         | the window               |
    | IN_USE   | yes                 | device       | nobody, it is being used |
    | IDLE     | yes                 | device       | the window               |
    """

    AWAY = "away"
    ARRIVING = "arriving"
    IN_USE = "in_use"
    IDLE = "idle"


LEGAL_MOVES: dict[UnitState, frozenset[UnitState]] = {
    UnitState.AWAY: frozenset({UnitState.ARRIVING}),
    UnitState.ARRIVING: frozenset({UnitState.IN_USE, UnitState.AWAY}),
    UnitState.IN_USE: frozenset({UnitState.IDLE}),
    UnitState.IDLE: frozenset({UnitState.IN_USE, UnitState.ARRIVING, UnitState.AWAY}),
}


class Unit:
    """Blocks that are brought and released together. `stays`: it is never released by the window;
    `holds`: how many users it has now."""

    def __init__(self, name: str, blocks: Sequence[Block]) -> None:
        self.name = name
        self.blocks = list(blocks)
        self.state = UnitState.AWAY
        self.stays = False
        self.is_given_away = False  # a result of the model is in its memory
        self.holds = 0
        self.fingerprint: Fingerprint | None = None  # of what is on the device, if it stays there

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    @property
    def tensors(self) -> list[tuple[Block, ManagedTensor]]:
        return [(block, managed) for block in self.blocks for managed in block.tensors]

    @property
    def names(self) -> tuple[str, ...]:
        """Of its tensors, as in the model's state_dict."""
        return tuple(managed.member.name for _, managed in self.tensors)

    @property
    def is_ready(self) -> bool:
        """Whether bringing it would not wait for the drive."""
        return all(block.home.is_ready for block in self.blocks)


class Window:
    """Brings, holds and releases units.

    At most `prefetch` units that nobody holds are on the device beside those that are held, and
    those that stay. Threads: the manager's lock guards it.
    """

    def __init__(self, units: Sequence[Unit], mover: Mover, *, prefetch: int) -> None:
        self.units = list(units)
        self.plan = Plan()
        self._mover = mover
        self._prefetch = prefetch
        self._by_name = {unit.name: unit for unit in units}
        self._here: dict[Unit, None] = {}
        self._spare: dict[Unit, None] = {}  # on the device, held by nobody, and not staying
        self._visitors: dict[Unit, None] = {}  # that stay until all are released
        self._backward_unit: Unit | None = None
        self._by_storage = {
            block.storage._cdata: unit for unit in units for block in unit.blocks
        }
        self.peak_count = self.peak_nbytes = 0
        self.bring_count = self.prefetch_count = self.late_count = 0
        self.stall_s = 0.0

    # --- uses -----------------------------------------------------------------------------------

    def unit(self, name: str) -> Unit:
        return self._by_name[name]

    def unit_of(self, storage: torch.UntypedStorage) -> Unit | None:
        """The unit whose memory on the device this is."""
        return self._by_storage.get(storage._cdata)

    def hold(self, unit: Unit, *, is_planned: bool = True) -> None:
        """Have it on the device, its tensors showing it, until `let_go`. Waits for the drive where
        it must. If it raises, nothing is held."""
        if unit.holds == 0:
            self._leave_backward(unit)
            if is_planned:
                self.plan.use(unit.name)
            self._have(unit)
        if unit.holds == 0 and is_planned:
            self._look_ahead(but=unit)  # before it is waited for: the drive is never idle
        self._show(unit)
        unit.holds += 1
        if unit.state is not UnitState.IN_USE:
            self._move(unit, UnitState.IN_USE)

    def let_go(self, unit: Unit, *, has_run: bool, may_be_shown: bool = False) -> None:
        """The end of a use; releases it unless its turn comes again at once. `has_run`: its forward
        has, which may have changed buffers without saying so. `may_be_shown`: as `release`."""
        if unit.holds == 0:
            return  # an exception has ended the use, and `reset` was called meanwhile
        unit.holds -= 1
        if unit.holds == 0:
            try:
                if has_run:
                    self._write_back(unit, has_run=True)
            finally:
                self._move(unit, UnitState.IDLE)
            if self._stays(unit):
                unit.fingerprint = unit.fingerprint or Fingerprint(
                    managed.tensor for _, managed in unit.tensors
                )
            elif unit is not self._backward_unit and not self._is_needed_soon(unit):
                self.release(unit, may_be_shown=may_be_shown)

    def use_in_backward(self, unit: Unit) -> None:
        """Its backward has come: it stays until that of another one does, or `end_pass`."""
        if unit is self._backward_unit and unit.state in (UnitState.IN_USE, UnitState.IDLE):
            return
        self.hold(unit)
        self._backward_unit = unit
        self.let_go(unit, has_run=False)

    def _leave_backward(self, unit: Unit) -> None:
        last = self._backward_unit
        if last is not None and last is not unit:
            self._backward_unit = None
            if last.state is UnitState.IDLE and not self._is_needed_soon(last):
                self.release(last)

    def end_pass(self) -> None:
        """Forward without gradients, or backward, is over: what was recorded becomes the plan, and
        nobody needs what is here."""
        self.plan.end_step()
        self.release_all()

    def show_homes(self) -> None:
        """The model's call is over, and its backward still to come: what nobody holds shows its
        home, for whoever reads or edits it meanwhile, and its copy stays for backward."""
        for unit in list(self._spare):
            if unit.state is UnitState.IDLE:
                self._write_back(unit, has_run=False)
                for _, managed in unit.tensors:
                    managed.show_home()
                self._move(unit, UnitState.ARRIVING)

    def bring_all(self, units: Sequence[Unit]) -> None:
        """Have these on the device until `release_all(also_staying=True)`."""
        for unit in units:
            self._visitors[unit] = None
            self.hold(unit, is_planned=False)
            self.let_go(unit, has_run=False)

    def release_all(self, *, also_staying: bool = False) -> None:
        """All that nobody holds, but what stays."""
        self._backward_unit = None
        units = self.units if also_staying else list(self._spare)
        if also_staying:
            self._visitors.clear()
        failure: SwapError | None = None
        for unit in units:
            if unit.state in (UnitState.ARRIVING, UnitState.IDLE):
                try:
                    self.release(unit, may_be_shown=True)
                except SwapError as error:
                    failure = failure or error
        if failure is not None:
            raise failure

    @property
    def here(self) -> list[Unit]:
        """The units on the device."""
        return list(self._here)

    @property
    def is_held(self) -> bool:
        """Whether anything is."""
        return any(unit.holds for unit in self.units)

    def reset(self) -> None:
        """Nobody holds anything, whatever an exception left half done."""
        self._backward_unit = None
        self._here, self._spare = {}, {}
        for unit in self.units:
            unit.holds = 0
            if unit.state is UnitState.IN_USE:
                unit.state = UnitState.IDLE
            if unit.state is UnitState.AWAY:
                self._clear(unit)
                continue
            self._here[unit] = None
            if not self._stays(unit):
                self._spare[unit] = None

    def _clear(self, unit: Unit) -> None:
        """An AWAY unit is away, whatever an exception left of it."""
        for _, managed in unit.tensors:
            if managed.is_on_device:
                managed.show_home()
        for block in unit.blocks:
            if block.is_here:
                self._mover.drop(block)

    def take_in_edits(self) -> None:
        """What was written to tensors that are away goes to their homes; one that was converted is
        its own."""
        for unit in self.units:
            if unit.state is UnitState.AWAY:
                for block in unit.blocks:
                    self._take_in(block, [m for m in block.tensors if not m.is_converted])

    def _take_in(self, block: Block, tensors: Sequence[ManagedTensor]) -> None:
        changed = [managed for managed in tensors if managed.was_changed]
        if not changed and tensors and block.home.was_edited():
            changed = list(tensors[:1])
        if changed:
            self._mover.send_back(block, *changed)

    # --- coming and going -------------------------------------------------------------------------

    def _have(self, unit: Unit) -> None:
        if unit.state is UnitState.AWAY:
            self._make_room()
            self.late_count += 1
            began = time.perf_counter()
            self._bring(unit)
            self.stall_s += time.perf_counter() - began

    def _bring(self, unit: Unit) -> None:
        """AWAY -> ARRIVING."""
        self._clear(unit)
        for block in unit.blocks:
            self._take_in(block, block.tensors)
        for _, managed in unit.tensors:
            if managed.is_unset:
                raise SwapUsageError(
                    f"{managed.member.name} has no values: the model was on the meta device",
                    fix="load_state_dict() first",
                )
        try:
            for block in unit.blocks:
                self._mover.bring(block)
        except BaseException:
            for block in unit.blocks:
                if block.is_here:
                    self._mover.drop(block)
            raise
        self._move(unit, UnitState.ARRIVING)
        self.bring_count += 1
        here = self.here
        self.peak_count = max(self.peak_count, len(here))
        self.peak_nbytes = max(self.peak_nbytes, sum(unit.nbytes for unit in here))

    def _show(self, unit: Unit) -> None:
        """Wait for it, and have its tensors show the device. If it can't be had it is AWAY."""
        try:
            if unit.holds == 0:
                self._await(unit)
        except BaseException:
            if unit.state is UnitState.ARRIVING:
                self.release(unit)
            raise
        if unit.state is UnitState.ARRIVING:
            for _, managed in unit.tensors:
                managed.show_device()
        elif self._mover.on_gpu and torch.is_grad_enabled() and not self._stays(unit):
            for _, managed in unit.tensors:
                managed.begin_use()

    def _await(self, unit: Unit) -> None:
        if unit.state is UnitState.ARRIVING:
            for block in unit.blocks:
                changed = [managed for managed in block.tensors if managed.was_changed]
                if changed or block.home.was_edited():  # while it was on its way
                    self._mover.send_back(block, *(changed or block.tensors[:1]))
                    self._mover.refresh(block)
        began = time.perf_counter()
        for block in unit.blocks:
            self._mover.await_arrival(block)
        self.stall_s += time.perf_counter() - began

    def _write_back(self, unit: Unit, *, has_run: bool) -> None:
        """Changes made on the device go to the home."""
        for block in unit.blocks:
            changed = [
                managed
                for managed in block.tensors
                if not managed.is_converted
                and (managed.was_changed or (has_run and managed.may_have_changed_unseen()))
            ]
            if changed:
                self._mover.send_back(block, *changed)

    def release(self, unit: Unit, *, may_be_shown: bool = False) -> None:
        """IDLE or ARRIVING -> AWAY. `may_be_shown`: no graph needs its memory, so that whoever
        still shows it (a result, a state_dict) is to keep it."""
        if unit.fingerprint is not None:
            unit.fingerprint.mark_changed()
            unit.fingerprint = None
        if unit.state is UnitState.IDLE:
            self._write_back(unit, has_run=False)  # whoever changed it since
        for _, managed in unit.tensors:
            if managed.is_on_device:
                managed.show_home()
        self._move(unit, UnitState.AWAY)
        for block in unit.blocks:
            key = block.storage._cdata
            self._mover.drop(block, may_be_shown=may_be_shown or unit.is_given_away)
            if block.storage._cdata != key:
                self._by_storage[block.storage._cdata] = unit
        unit.is_given_away = False

    def _move(self, unit: Unit, to: UnitState) -> None:
        assert to in LEGAL_MOVES[unit.state], f"{unit.name}: {unit.state.name} -> {to.name}"
        assert (to is UnitState.IN_USE) == (unit.holds > 0), f"{unit.name}: {unit.holds} holds"
        unit.state = to
        if to is UnitState.AWAY:
            self._here.pop(unit, None)
        else:
            self._here[unit] = None
        if to in (UnitState.ARRIVING, UnitState.IDLE) and not self._stays(unit):
            self._spare[unit] = None
        else:
            self._spare.pop(unit, None)

    def _stays(self, unit: Unit) -> bool:
        return unit.stays or unit in self._visitors

    # --- by the plan ------------------------------------------------------------------------------

    def _is_needed_soon(self, unit: Unit) -> bool:
        if self._stays(unit):
            return True
        return unit.name in islice(self.plan.rest(), self._prefetch + 1)

    def _make_room(self) -> None:
        """For one that is used now: of those that nobody holds, all but `prefetch` go."""
        while len(self._spare) > self._prefetch:
            self.release(max(self._spare, key=lambda unit: self.plan.next_use(unit.name)))

    def _look_ahead(self, *, but: Unit) -> None:
        """Bring the next ones, as far as there are places beside this one and they can be had."""
        spare = self._spare.keys() - {but}
        for name in islice(self.plan.rest(), 2 * self._prefetch + 1):
            unit = self._by_name[name]
            if unit.state is not UnitState.AWAY:
                continue
            if len(spare) >= self._prefetch or not unit.is_ready:
                return
            try:
                self._bring(unit)
            except SwapIOError:
                return  # it is for whoever uses that unit to hear of it
            spare.add(unit)
            self.prefetch_count += 1
