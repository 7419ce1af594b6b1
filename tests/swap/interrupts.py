"""Ctrl-C at every point of a call at which Python looks for it, one after the other."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

PACKAGE = "/nvmeswap/"


class Interrupt(KeyboardInterrupt):
    pass


def interrupted_everywhere(call: Callable[[], object], *, apart: int = 1) -> Iterator[int]:
    """Makes the call again and again, each time interrupted a point (or so many) later; yields the
    number of the point, after the interruption has come out of the call. Ends when the call ends
    first."""
    number = 0
    while _interrupt_at(number, call):
        yield number
        number += apart


def _interrupt_at(number: int, call: Callable[[], object]) -> bool:
    left = number

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if PACKAGE not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti in _points(frame.f_code):
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise Interrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except Interrupt:
        pass
    finally:
        sys.settrace(None)
    return left < 0


_known: dict[CodeType, set[int]] = {}


def _points(code: CodeType) -> set[int]:
    """Where CPython (3.11, 3.12) looks for signals: as a function begins, after a call, and where a
    loop goes round. Not before the call that leaves a `with`: what looks is after it."""
    if code not in _known:
        instructions = [each for each in dis.get_instructions(code) if each.opname != "PRECALL"]
        _known[code] = {
            each.offset
            for index, each in enumerate(instructions)
            if each.opname in ("RESUME", "CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD")
            and not _leaves_with(instructions[max(index - 3, 0) : index])
        }
    return _known[code]


def _leaves_with(before: list[dis.Instruction]) -> bool:
    return len(before) == 3 and all(
        each.opname == "LOAD_CONST" and each.argval is None for each in before
    )
