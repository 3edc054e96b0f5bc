"""What a CUDA worker is refused for, and that a CPU worker loads nothing of CUDA's."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from server.engine.forward import require_cuda
from server.errors import StartError

CUDA = torch.device("cuda")


def finding(missing: str) -> Callable[[str], Any]:
    return lambda name: None if name == missing else object()


def test_no_device_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(StartError, match="sees no CUDA device"):
        require_cuda(CUDA, torch.bfloat16)


@pytest.mark.parametrize("missing", ["flashinfer", "triton"])
def test_what_is_missing_is_named_with_the_command_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", finding(missing))
    with pytest.raises(StartError, match=missing) as caught:
        require_cuda(CUDA, torch.bfloat16)
    assert caught.value.help == "pip install 'pdctl[cuda]'"


def test_float32_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", finding(""))
    require_cuda(CUDA, torch.bfloat16)
    with pytest.raises(StartError, match="float32"):
        require_cuda(CUDA, torch.float32)


def test_the_cpu_path_imports_neither_flashinfer_nor_triton() -> None:
    """Nor anything that does: those modules are ours to import, whatever torch does by itself."""
    code = (
        "import sys, server.engine.model_runner, server.engine.engine\n"
        "ours = {'kernels', 'attention_decode', 'attention_flashinfer', 'graphs'}\n"
        "print([m for m in sys.modules if m == 'flashinfer' or m.startswith('server.engine.') and m[14:] in ours])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
