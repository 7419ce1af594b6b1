"""Weights that a module uses without calling the module they are in.

A head may multiply by the embedding's weight, for instance. No hook tells of it. So in the first
forward of a module every torch function is looked at (`TorchFunctionMode`, some microseconds each):
what is used and not there is brought, for the module that is running, which needs it from then on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_DISABLE_FILE = "torch/_dynamo/eval_frame.py"  # `prior`: what compiles frames around us, if any
_OWN_FOLDER = str(Path(__file__).parent)
# Of the attributes of a tensor those that are, or tell where, its values are.
_VALUES = {
    getattr(torch.Tensor, name).__get__
    for name in ("data", "T", "mT", "H", "mH", "real", "imag", "device", "is_cuda")
}


class BorrowedWeights(TorchFunctionMode):
    """Calls `lend(tensor)` for each tensor that a torch function is given, before it runs."""

    def __init__(self, lend: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._lend = lend

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        is_ours = sys._getframe(1).f_code.co_filename.startswith(_OWN_FOLDER)
        if not is_ours and (func.__name__ != "__get__" or func in _VALUES):
            for given in (*args, *kwargs.values()):
                for tensor in given if isinstance(given, (list, tuple)) else (given,):
                    if isinstance(tensor, torch.Tensor):
                        self._lend(tensor)
        return func(*args, **kwargs)


def enter(mode: TorchFunctionMode) -> None:
    """Look at each torch function from now on."""
    mode.__enter__()


def leave(mode: BorrowedWeights) -> None:
    """Look at nothing any more, if it is the innermost mode."""
    depth: int = torch._C._len_torch_function_stack()
    if depth and torch._C._get_function_stack_at(depth - 1) is mode:
        mode.__exit__(None, None, None)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has to do with a call of it, seen from a function that is disabled for
    the compiler: it traces modes, and would trace ours."""
    for each in module.modules():
        if getattr(each, "_compiled_call_impl", None) is not None or hasattr(each, "_orig_mod"):
            return True
    frame = sys._getframe(1).f_back
    while frame is not None and not frame.f_code.co_filename.endswith(_DISABLE_FILE):
        frame = frame.f_back
    return frame is not None and frame.f_locals.get("prior") not in (None, False)
