"""What autograd saves of a unit, and how backward asks for it.

Facts (torch 2.11 and 2.13). Inside `saved_tensors_hooks` autograd hands each tensor that it saves
to `pack`, and calls `unpack` just before the node that saved it computes: so whatever the shape of
the graph, a weight is asked for at the moment of its use. Of nested hooks the innermost pair alone
is called, and torch.utils.checkpoint works by such hooks: so ours call the pair below. With hooks
torch does not compare versions of saved tensors any more: so ours do. Of a leaf `pack` gets the
object itself, of others an alias.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_autograd: Any = torch._C._autograd
Pair = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class _Saved:
    """A tensor as it was saved, or what the hooks below made of it."""

    __slots__ = ("packed", "unpack_below", "version")

    def __init__(self, packed: Any, version: int, unpack_below: Callable[[Any], torch.Tensor] | None
                 ) -> None:
        self.packed = packed
        self.version = version
        self.unpack_below = unpack_below


class SavedTensorHooks:
    """A pair of hooks on top of those that are active. `need(tensor)` is called with every tensor
    that backward takes out, before it is used."""

    __slots__ = ("_need", "_pack_below", "_unpack_below")

    def __init__(self, need: Callable[[torch.Tensor], None], below: Pair | None) -> None:
        self._need = need
        self._pack_below = None if below is None else below[0]
        self._unpack_below = None if below is None else below[1]

    def pack(self, tensor: torch.Tensor) -> _Saved:
        if tensor.is_leaf:  # the very parameter, whose data will be another's
            tensor = tensor.detach()
        if self._pack_below is None:
            return _Saved(tensor, tensor._version, None)
        return _Saved(self._pack_below(tensor), 0, self._unpack_below)

    def unpack(self, saved: _Saved) -> torch.Tensor:
        if saved.unpack_below is not None:
            tensor = saved.unpack_below(saved.packed)
        else:
            tensor = saved.packed
            if tensor._version != saved.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: [{tensor.type()} {list(tensor.shape)}] is at version "
                    f"{tensor._version}; expected version {saved.version} instead."
                )
        self._need(tensor)
        return tensor


def push(need: Callable[[torch.Tensor], None]) -> bool:
    """Make hooks with this `need` the innermost ones; False if they are already. Raises
    RuntimeError where torch forbids such hooks (torch.func's transforms)."""
    below = _autograd._top_saved_tensors_default_hooks(True)
    if _is_ours(below, need):
        return False
    hooks = SavedTensorHooks(need, below)
    _autograd._push_saved_tensors_default_hooks(hooks.pack, hooks.unpack)
    return True


def pop(need: Callable[[torch.Tensor], None]) -> bool:
    """Undo the last `push` that was True. False, and nothing is done, where the innermost hooks are
    not those: an exception has mixed up whose are whose."""
    is_ours = _is_ours(_autograd._top_saved_tensors_default_hooks(True), need)
    if is_ours:
        _autograd._pop_saved_tensors_default_hooks()
    return is_ours


def _is_ours(pair: Pair | None, need: Callable[[torch.Tensor], None]) -> bool:
    owner = None if pair is None else getattr(pair[0], "__self__", None)
    return isinstance(owner, SavedTensorHooks) and owner._need == need


def are_allowed() -> bool:
    """Whether torch takes such hooks here."""
    allowed: bool = _autograd._saved_tensors_hooks_is_enabled()
    return allowed


def current_task() -> int | None:
    """The number of the backward pass that this thread is in, None outside of one."""
    number: int = torch._C._current_graph_task_id()
    return None if number == -1 else number


def current_node() -> Any:
    """The autograd node that computes now, or None."""
    return torch._C._current_autograd_node()


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call it when the backward pass that this thread is in has ended well."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
