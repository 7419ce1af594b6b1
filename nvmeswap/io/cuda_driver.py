"""Device memory straight from the CUDA driver, beside torch's allocator.

cuFile registers such memory, but not what torch maps piece by piece (`expandable_segments`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import weakref
from collections.abc import Iterator

from nvmeswap.errors import SwapUsageError
from nvmeswap.io.alignment import padded_nbytes
from nvmeswap.io.transfer import DEVICE_ALIGNMENT_NBYTES

_LIBRARY = "libcuda.so.1"


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise SwapUsageError("there is no CUDA driver here", cause=str(error),
                             fix="install NVIDIA's driver; in a container, start it with --gpus") \
            from error
    _check(library.cuInit(ctypes.c_uint(0)), "to start")
    return library


def _check(code: int, what: str) -> None:
    if code != 0:
        raise SwapUsageError(f"the CUDA driver refuses {what}", cause=f"CUresult {code}",
                             fix="see `nvidia-smi` for the GPU's state and its free memory")


class DeviceMemory:
    """Bytes of one GPU, given back with the last reference to this object.

    Args: `nbytes`, above 0; `device`, the GPU's number. The address is a multiple of 4096.
    Raises: SwapUsageError when there is no driver, or it refuses.
    Blocking: giving back waits for the GPU. Threads: any. In a forked child nothing is given back.
    """

    def __init__(self, nbytes: int, device: int) -> None:
        driver = _driver()
        handle, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
        _check(driver.cuDeviceGet(ctypes.byref(handle), ctypes.c_int(device)), f"device {device}")
        # The one that torch uses, too.
        _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), f"device {device}")
        # The driver itself promises 256 bytes.
        taken_nbytes = ctypes.c_size_t(nbytes + DEVICE_ALIGNMENT_NBYTES)
        try:
            with _current(context):
                code = driver.cuMemAlloc_v2(ctypes.byref(address), taken_nbytes)
            _check(code, f"{nbytes:_} bytes of device {device}")
        except BaseException:
            driver.cuDevicePrimaryCtxRelease_v2(handle)
            raise
        self.nbytes = nbytes
        self.address = padded_nbytes(address.value, DEVICE_ALIGNMENT_NBYTES)
        self._context = context
        finalizer = weakref.finalize(self, _give_back, address, context, handle, os.getpid())
        finalizer.atexit = False  # tensors may outlive it there; the driver frees what is left

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False),
                "strides": None, "version": 3}

    def fill(self, content: bytes) -> None:
        """Copy `nbytes` bytes in. Blocks."""
        assert len(content) == self.nbytes
        with _current(self._context):
            code = _driver().cuMemcpyHtoD_v2(ctypes.c_uint64(self.address), content,
                                             ctypes.c_size_t(self.nbytes))
        _check(code, "a copy to the device")

    def content(self) -> bytes:
        """A copy of all bytes. Blocks."""
        copy = ctypes.create_string_buffer(self.nbytes)
        with _current(self._context):
            code = _driver().cuMemcpyDtoH_v2(copy, ctypes.c_uint64(self.address),
                                             ctypes.c_size_t(self.nbytes))
        _check(code, "a copy from the device")
        return copy.raw


@contextlib.contextmanager
def _current(context: ctypes.c_void_p) -> Iterator[None]:
    """With the context as the thread's current one."""
    _check(_driver().cuCtxPushCurrent_v2(context), "its own context")
    try:
        yield
    finally:
        _driver().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def _give_back(
    address: ctypes.c_uint64, context: ctypes.c_void_p, handle: ctypes.c_int, owner_pid: int
) -> None:
    if os.getpid() != owner_pid:
        return
    with contextlib.suppress(SwapUsageError), _current(context):
        _driver().cuMemFree_v2(address)
    _driver().cuDevicePrimaryCtxRelease_v2(handle)
