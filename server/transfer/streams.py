"""What a transfer owes a CUDA device. On a CPU none of it is needed, and none is done.

1. Its work has a stream of its own, before the engine's in priority: a checksum or a copy out of the ring waits neither
   for the forward pass that runs nor for those that are queued behind it.
2. It reads and writes what no queued kernel of the engine uses: blocks are handed over after the step that wrote them
   was waited for, and granted after the last step that read them was. So the streams need no events between them.
3. What came over the network is flushed before a kernel reads it: a NIC's notice can pass its bytes on the way.
"""

import contextlib
import ctypes
import logging
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")

_HIGH = -1  # as torch counts priorities
_FLUSH_OPTIONS, _FLUSH_HOST = (
    117,
    1,
)  # CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS, and its bit for "by the host"
_TO_CURRENT_CONTEXT, _FOR_OWNER = 0, 100  # CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX, ..._TO_OWNER


def own_stream(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Inside it, work of this thread on `device` goes to a stream of its own."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    torch.zeros(1, device=device)  # gives a fresh thread the device's context, which the driver's own calls need
    return torch.cuda.stream(torch.cuda.Stream(device, priority=_HIGH))  # type: ignore[no-untyped-call]


def remote_write_flush(device: torch.device) -> Callable[[], None]:
    """Orders what the network has written into `device` before the kernels that follow. A no-op where the platform
    orders it by itself or has no GPUDirect RDMA."""
    if device.type != "cuda":
        return lambda: None
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # there is a context from here on
        driver = ctypes.CDLL("libcuda.so.1")
        options, handle = ctypes.c_int(), ctypes.c_int()
        driver.cuCtxGetDevice(ctypes.byref(handle))
        driver.cuDeviceGetAttribute(ctypes.byref(options), _FLUSH_OPTIONS, handle)
    if not options.value & _FLUSH_HOST:
        logger.info("GPUDirect RDMA: this device needs or offers no flush by the host")
        return lambda: None

    def flush() -> None:
        error = driver.cuFlushGPUDirectRDMAWrites(_TO_CURRENT_CONTEXT, _FOR_OWNER)
        if error:
            raise RuntimeError(f"cuFlushGPUDirectRDMAWrites: CUDA error {error}")

    return flush
