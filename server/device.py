"""What everyone who shares a CUDA device has to do the same way."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def arriving(values: Tensor) -> Callable[[], Tensor]:
    """Begins to copy `values` to the CPU, behind the work that this thread has given the device so far. The result
    waits for that copy alone.

    A copy from a device goes by way of pinned memory. One to ordinary memory waits for the work before it inside the
    driver, and keeps every other thread's launches out meanwhile: with a decode step's tokens read so, each chunk that
    arrived waited for the step (two H200s, eight prompts of 1024 tokens at once: KV 32 ms after prefill, now 3.5 ms).
    """
    if not values.is_cuda:
        return lambda: values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()

    def complete() -> Tensor:
        done.synchronize()
        return host

    return complete


def on_host(values: Tensor) -> Tensor:
    """`values` on the CPU, complete."""
    return arriving(values)()


def on_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """[len(values)] on `device`, without waiting for the work before it."""
    tensor = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)


def wait_for(device: torch.device) -> None:
    """Until what this thread has given `device` to do is done. What others gave it, on streams of theirs, is not waited
    for."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
