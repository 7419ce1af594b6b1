"""DeepSpeed on nvmeswap; its users keep their script and their JSON.

    import nvmeswap.deepspeed

    nvmeswap.deepspeed.install()                    # before deepspeed.zero.Init and initialize

or unchanged: `deepspeed --module nvmeswap.deepspeed train.py ...` (or hook.py, by an environment
variable). `uninstall()` gives DeepSpeed its own back. For the I/O engine alone:

    from nvmeswap.deepspeed import aio_handle       # in place of AsyncIOBuilder().load().aio_handle

    nvmeswap.deepspeed.inject_engine()              # or for all of DeepSpeed

DeepSpeed itself is imported by `install` and `inject_engine` alone.
"""

from nvmeswap.deepspeed.handle import aio_handle
from nvmeswap.deepspeed.inject import inject_engine, withdraw_engine
from nvmeswap.deepspeed.install import install, is_installed, uninstall
from nvmeswap.deepspeed.pinned import pin_handle

__all__ = [
    "aio_handle",
    "inject_engine",
    "install",
    "is_installed",
    "pin_handle",
    "uninstall",
    "withdraw_engine",
]
