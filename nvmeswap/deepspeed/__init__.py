"""DeepSpeed on nvmeswap's engine; its users keep their script and their JSON.

    from nvmeswap.deepspeed import aio_handle       # in place of AsyncIOBuilder().load().aio_handle

    nvmeswap.deepspeed.inject_engine()              # or for all of DeepSpeed, before `initialize`

DeepSpeed itself is imported by `inject_engine` alone.
"""

from nvmeswap.deepspeed.handle import aio_handle
from nvmeswap.deepspeed.inject import inject_engine
from nvmeswap.deepspeed.pinned import pin_handle

__all__ = ["aio_handle", "inject_engine", "pin_handle"]
