"""How busy a worker's device is: the GPU as NVML counts it, else the process's CPU time over its cores."""

import os
import time
from typing import Any


class Utilisation:
    def __init__(self, has_gpu: bool) -> None:
        self._nvml = _nvml() if has_gpu else None
        self._cores = len(os.sched_getaffinity(0))
        self._then, self._cpu_s = time.monotonic(), time.process_time()

    def sample(self) -> float:
        """0..1 since the last call; a GPU's over NVML's own last moment. -1 where nobody can tell."""
        now, cpu_s = time.monotonic(), time.process_time()
        share = (cpu_s - self._cpu_s) / max(1e-6, now - self._then) / self._cores
        self._then, self._cpu_s = now, cpu_s
        return min(1.0, share) if self._nvml is None else self._nvml()


def _nvml() -> Any:
    """A function that asks; it answers -1 without NVML, so that a GPU worker never passes for an idle one."""
    try:
        import pynvml

        pynvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
        devices = [
            pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID(name)
            for name in visible
        ]
    except Exception:  # not installed, no driver, not allowed: all the same to us
        return lambda: -1.0

    def ask() -> float:
        try:
            return float(max(pynvml.nvmlDeviceGetUtilizationRates(device).gpu for device in devices)) / 100
        except pynvml.NVMLError:
            return -1.0

    return ask
