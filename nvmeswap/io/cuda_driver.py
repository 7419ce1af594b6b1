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

_LIBRARY = "libcuda.so.1"
_SUCCESS = 0


@functools.cache
def _driver() -> ctypes.CDLL:
    """Raises SwapUsageError when there is no driver, or it finds no device."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise SwapUsageError("there is no CUDA driver here", cause=str(error),
                             fix="install NVIDIA's driver; in a container, start it with --gpus") \
            from error
    _check(library.cuInit(ctypes.c_uint(0)), "cuInit")
    return library


def _check(code: int, call: str) -> None:
    if code != _SUCCESS:
        raise SwapUsageError(f"the CUDA driver refused {call}", cause=f"CUresult {code}",
                             fix="see `nvidia-smi` for the GPU's state and its free memory")


class DeviceMemory:
    """Bytes of one GPU, given back with the last reference to this object.

    Args: `nbytes`, above 0; `device`, the GPU's number. The address is a multiple of 4096.
    Raises: SwapUsageError when there is no driver, or it refuses.
    Blocking: giving back waits for the GPU. Threads: any. In a forked child nothing is given back.
    """

    def __init__(self, nbytes: int, device: int) -> None:
        driver = _driver()
        self.nbytes = nbytes
        self.device = device
        address = ctypes.c_uint64()
        with _context_of(device):
            _check(driver.cuMemAlloc_v2(ctypes.byref(address),
                                        ctypes.c_size_t(nbytes + _ALIGNMENT_NBYTES)),
                   f"{nbytes:_} bytes of device memory")
        self.address = (address.value + _ALIGNMENT_NBYTES - 1) & -_ALIGNMENT_NBYTES
        finalizer = weakref.finalize(self, _free, address.value, device, os.getpid())
        finalizer.atexit = False  # tensors may outlive it there; the driver frees what is left

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False),
                "strides": None, "version": 3}

    def fill(self, content: bytes) -> None:
        """Copy `nbytes` bytes in. Blocks."""
        assert len(content) == self.nbytes
        with _context_of(self.device):
            _check(_driver().cuMemcpyHtoD_v2(ctypes.c_uint64(self.address), content,
                                             ctypes.c_size_t(self.nbytes)), "a copy to the device")

    def content(self) -> bytes:
        """A copy of all bytes. Blocks."""
        copy = ctypes.create_string_buffer(self.nbytes)
        with _context_of(self.device):
            code = _driver().cuMemcpyDtoH_v2(copy, ctypes.c_uint64(self.address),
                                             ctypes.c_size_t(self.nbytes))
            _check(code, "a copy from the device")
        return copy.raw


# Of transfers; the driver promises 256 bytes.
_ALIGNMENT_NBYTES = 4096


@contextlib.contextmanager
def _context_of(device: int) -> Iterator[None]:
    """With the GPU's primary context, which is torch's too, as the thread's current one."""
    driver = _driver()
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    _check(driver.cuDeviceGet(ctypes.byref(handle), ctypes.c_int(device)), f"device {device}")
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle), f"device {device}")
    try:
        _check(driver.cuCtxPushCurrent_v2(context), "its own context")
        try:
            yield
        finally:
            driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(handle)


def _free(address: int, device: int, owner_pid: int) -> None:
    if os.getpid() != owner_pid:
        return
    with contextlib.suppress(SwapUsageError), _context_of(device):
        _driver().cuMemFree_v2(ctypes.c_uint64(address))
