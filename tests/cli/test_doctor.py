"""Findings: each that is not ok has a fix; a failure is exit 5."""

import json
from pathlib import Path
from typing import Any

import pytest

from pdctl import doctor
from pdctl.cli import main
from pdctl.doctor import Finding
from pdctl.exits import Exit
from server.errors import PdctlError

FAST = {size: {"ms": 1.0, "MBps": 6000.0} for size in ("64KiB", "1MiB", "64MiB")}
SLOW = {size: {"ms": 1.0, "MBps": 60.0} for size in ("64KiB", "1MiB", "64MiB")}
CODECS = {"zstd": {"ratio": 0.7, "encode_MBps": 200.0, "decode_MBps": 600.0}}


def measured(**transports: Any) -> dict[str, Any]:
    return {"copy_MBps": 10_000.0, "transports": transports, "codecs": CODECS}


def test_this_machine_without_measuring(tmp_path: Path) -> None:
    findings, found = doctor.examine(tmp_path, measures=False)
    assert not found
    assert {"python", "torch", "cores", "gpus", "memory", "memlock", "/dev/shm", "ptrace", "pid namespace"} <= {
        finding.check for finding in findings
    }
    assert all(finding.fix for finding in findings if finding.level != "ok")
    assert len(doctor.show(findings).splitlines()) == 1 + len(findings) + sum(bool(f.fix) for f in findings)
    value = doctor.to_json(findings, found)
    assert value["version"] == 1
    assert value["ok"] == (doctor.exit_of(findings) is Exit.OK)


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """For people and for programs; exit 0, and 5 once something fails."""
    command = ("--state-dir", str(tmp_path), "doctor", "--no-measure")
    assert main(command) == Exit.OK
    assert "CHECK" in capsys.readouterr().out
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert main((*command, "--json")) == Exit.PREFLIGHT
    value = json.loads(capsys.readouterr().out)
    assert (value["version"], value["ok"]) == (1, False)
    (failed,) = [finding for finding in value["findings"] if finding["level"] == "fail"]
    assert failed["fix"] == "unset PYTORCH_CUDA_ALLOC_CONF: it breaks NIXL"


@pytest.mark.parametrize("key", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_allocator_that_breaks_registration_fails(key: str) -> None:
    findings = doctor.limits({key: "max_split_size_mb:64, expandable_segments:True"}, has_gpus=False)
    failed = [finding for finding in findings if finding.level == "fail"]
    assert [(finding.check, finding.fix) for finding in failed] == [("allocator", f"unset {key}: it breaks NIXL")]
    assert doctor.exit_of(findings) is Exit.PREFLIGHT


def test_transports_against_what_the_link_should_give() -> None:
    levels = [f.level for f in doctor.transports(measured(nixl=FAST, tcp=FAST))]
    assert levels == ["ok", "ok"]
    slow, missing = doctor.transports(measured(nixl=SLOW, tcp={"missing": "cannot listen"}))
    assert (slow.level, bool(slow.fix)) == ("warn", True)
    assert (missing.level, missing.found) == ("fail", "cannot listen")
    absent = doctor.transports(measured(nixl={"missing": "nixl_cu13 is not installed"}))[0]
    assert (absent.level, "pdctl[nixl]" in absent.fix) == ("warn", True)


@pytest.mark.parametrize(("size", "rate"), [("64KiB", 20.0), ("1MiB", 100.0), ("64MiB", 900.0)])
def test_each_size_has_its_own_measure(size: str, rate: float) -> None:
    """A slow start shows at 64 KiB, a slow link at 64 MiB; each is named."""
    (found,) = doctor.transports(measured(tcp={**FAST, size: {"ms": 1.0, "MBps": rate}}))
    assert found.level == "warn"
    assert found.fix.startswith(f"{size} should be quicker")


def test_processes_that_see_no_common_pids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.readlink", lambda path: f"pid:[{len(path)}]")
    assert doctor._namespaces("demo", [10, 20]) == []
    (found,) = doctor._namespaces("demo", [10, 200])
    assert (found.level, found.found) == ("warn", "processes in 2 pid namespaces: pid:[15], pid:[16]")
    assert "--pid=host" in found.fix


def test_a_pool_s_environment_is_looked_at_too() -> None:
    profile = {"decode": {"env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}, "prefill": {"env": {}}}
    (found,) = doctor._environments("demo", profile)
    assert (found.check, found.level) == ("demo decode.env", "fail")
    assert doctor._environments("demo", {}) == []


def test_compression_pays_on_a_slow_link_only() -> None:
    """30 % fewer bytes for 1/200 + 1/600 s a MB: below 45 MB/s."""
    assert "does not pay here" in doctor.compression(measured(tcp=FAST))[0].found
    slow = {size: {"ms": 1.0, "MBps": 40.0} for size in FAST}
    assert doctor.compression(measured(tcp=slow))[0].found == "pays here: 70% of the bytes; pays on links below 45 MB/s"


def test_pair_that_refuses_each_other_is_a_failure_that_names_the_field() -> None:
    link = {"transport": "", "why": "refused: dtype: p has bf16, d has f32", "codec": "none", "bytes": 0, "seconds": 0}
    process = {"name": "prefill-0", "numbers": {"load": {"links": {"decode-0": link}}}}
    assert doctor._process("demo", process) == [
        Finding("demo prefill-0 > decode-0", "fail", link["why"], "start both from one profile and one version")  # type: ignore[arg-type]
    ]
    refused = {"name": "decode-0", "numbers": {"state": "refused", "reason": "vocab_size: 1, 2"}}
    assert doctor._process("demo", refused)[0].level == "fail"


def test_probe_that_crashes_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def crash() -> dict[str, Any]:
        raise PdctlError("the transports' probe failed: Killed", help="python -m server.transfer.probe")

    monkeypatch.setattr(doctor, "probe", crash)
    findings, _ = doctor.examine(tmp_path)
    assert doctor.exit_of(findings) is Exit.PREFLIGHT


@pytest.mark.timeout(120)
def test_the_probe_itself() -> None:
    found = doctor.probe()
    assert set(found["transports"]) == {"nixl", "tcp"}
    assert found["transports"]["tcp"]["64MiB"]["MBps"] > 10
    assert 0.4 < found["codecs"]["fp8"]["ratio"] < 0.51
