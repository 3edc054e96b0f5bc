"""Loading a model into transformers with our attention, and what can be known of it before and after.

Foreign errors become ModelError here: this is the one door to transformers. Nothing here knows of batches.
"""

import contextlib
import ctypes
import hashlib
import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from server.engine.attention import IMPLEMENTATION
from server.errors import ModelError, PdctlError

DUMMY = "dummy:"
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_SAMPLES = 64  # pieces of each weight file that go into the fingerprint
_SAMPLE_BYTES = 4096


def model_folder(path: str | Path) -> tuple[Path, bool]:
    """(folder, whether its weights are to be random). The folder exists: `model_store` has resolved it before."""
    text = str(path)
    folder = Path(text.removeprefix(DUMMY)).expanduser()
    if folder.name == "config.json":
        folder = folder.parent
    if not (folder / "config.json").is_file():
        raise ModelError(f"there is no config.json in {folder}")
    return folder, text.startswith(DUMMY)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the device multiplies it fast: GPUs, and CPUs with AVX512_BF16 or AMX."""
    if name != "auto":
        return _DTYPES[name]
    if device.type != "cpu":
        return torch.bfloat16
    return torch.bfloat16 if _cpu_flags() & {"avx512_bf16", "amx_bf16"} else torch.float32


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return set(line.split())


def load_config(folder: Path) -> Any:
    with model_errors(f"the config in {folder} cannot be read"):
        return AutoConfig.from_pretrained(folder)


def load_model(folder: Path, config: Any, dtype: torch.dtype, device: torch.device, random: bool) -> torch.nn.Module:
    """The model in eval mode on `device`, using our attention."""
    transformers_logging.disable_progress_bar()
    with model_errors(f"transformers cannot load the model in {folder}"):
        if random:
            # Every process makes the same weights, so that dummy models may hand KV to each other.
            with torch.random.fork_rng(devices=[]), torch.device(device):
                torch.manual_seed(0)
                model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=IMPLEMENTATION)
        else:
            model = AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=dtype, attn_implementation=IMPLEMENTATION
            )
        model = model.to(device).eval()
        assert isinstance(model, torch.nn.Module)
        return model


@contextlib.contextmanager
def model_errors(what: str) -> Iterator[None]:
    """Anything foreign that is raised within becomes a ModelError that begins with `what`."""
    try:
        yield
    except PdctlError:
        raise
    except Exception as error:
        raise ModelError(f"{what}: {type(error).__name__}: {error}") from error


def fingerprint(folder: Path, random: bool) -> str:
    """Equal for equal config and weights: a hash over config.json, and of each weight file its header and samples
    spread over its bytes. Reads a few hundred KiB of a model of any size."""
    digest = hashlib.sha256()
    config = json.loads((folder / "config.json").read_text())
    digest.update(json.dumps(config, sort_keys=True).encode())
    if random:
        digest.update(b"dummy")
    for file in [] if random else sorted(folder.glob("*.safetensors")):
        _digest_file(digest, file)
    return digest.hexdigest()[:32]


def _digest_file(digest: Any, file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > size:
            raise ModelError(f"{file} is not a safetensors file")
        digest.update(stream.read(length))
        for i in range(_SAMPLES):
            stream.seek(8 + length + (size - 8 - length) * i // _SAMPLES)
            digest.update(stream.read(_SAMPLE_BYTES))


def keep_freed_memory() -> None:
    """Tells glibc to keep freed memory: temporaries of a forward are otherwise mapped, zeroed and unmapped each time
    (measured at 5x the time of small attention steps). 32 MiB is the most glibc takes for the first."""
    if platform.system() == "Linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            m_trim_threshold, m_mmap_threshold = -1, -3
            libc.mallopt(m_mmap_threshold, 32 * 2**20)
            libc.mallopt(m_trim_threshold, 2**31 - 1)
