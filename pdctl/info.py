"""`pdctl info`: what a stack is, rather than how it does: versions, model, layout, capacity, routes."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pdctl.client import admin
from pdctl.render import table
from pdctl.rundir import Stack, StackDir
from server.errors import PdctlError

PACKAGES = ("pdctl", "torch", "transformers", "nixl-cu13", "flashinfer-python", "textual")


def versions() -> dict[str, str]:
    """Of what is installed, without importing any of it."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "source tree" if package == "pdctl" else "not installed"
    return found


def gather(stack_dir: StackDir, stack: Stack) -> dict[str, Any]:
    """The `--json` value. A router that does not answer leaves its part empty."""
    try:
        state = admin(stack_dir, stack, timeout_s=2.0).get("/admin/state")
    except PdctlError:
        state = {}
    loads = {worker["name"]: worker.get("load") or {} for worker in state.get("workers") or []}
    block_size = int(stack.profile.get("model", {}).get("block_size") or 16)
    workers = [
        {
            "name": process.name,
            "role": process.role,
            "cpus": process.cpus,
            "gpus": process.gpus,
            "memory": process.detail.get("memory") or {},
            "kv_tokens": int(loads.get(process.name, {}).get("blocks_total") or 0) * block_size or None,
        }
        for process in stack.processes
    ]
    details = next((process.detail for process in stack.processes if "fingerprint" in process.detail), {})
    names = ("dtype", "layers", "kv_heads", "head_dim", "vocab_size", "window", "fingerprint")
    return {
        "version": 1,
        "name": stack.name,
        "url": stack.url,
        "model": {
            "path": stack.profile.get("model", {}).get("path"),
            "folder": stack.model_dir,
            "served_as": (state.get("router") or {}).get("models") or [],
            **{name: details[name] for name in names if name in details},
        },
        "block_size": block_size,
        "transfer": stack.profile.get("transfer", {}),
        "workers": workers,
        "routes": state.get("routes") or {},
        "versions": versions(),
        "profile_file": stack.profile_file,
        "state_dir": str(stack_dir.path),
    }


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f}"


def show(value: dict[str, Any]) -> str:
    """For people."""
    model = value["model"]
    shape = ", ".join(f"{key} {model[key]}" for key in ("dtype", "layers", "kv_heads", "head_dim") if key in model)
    rows = [
        ["address", f"{value['url']}/v1  as {', '.join(model['served_as']) or '-'}"],
        ["model", f"{model['path']}  ({shape})"],
        ["folder", model["folder"]],
        [
            "transfer",
            f"backend {value['transfer'].get('backend', '-')}, checksum {value['transfer'].get('checksum', '-')}",
        ],
        ["profile", value["profile_file"]],
        ["state", value["state_dir"]],
        [
            "versions",
            "  ".join(f"{name} {text}" for name, text in value["versions"].items() if text != "not installed"),
        ],
    ]
    workers = [
        [
            worker["name"],
            ",".join(map(str, worker["gpus"] or worker["cpus"])) or "-",
            "-" if worker["kv_tokens"] is None else f"{worker['kv_tokens']} tokens",
        ]
        for worker in value["workers"]
    ]
    memories = [[worker["name"], *map(_mib, worker["memory"].values())] for worker in value["workers"]]
    memories = [row for row in memories if len(row) > 1]
    routes = [
        [name, "yes" if r.get("proven") else "no", f"{r.get('first_token_ms', '-')}"]
        for name, r in value["routes"].items()
    ]
    parts = [table(rows, (value["name"], "")), table(workers, ("WORKER", "ON", "KV"))]
    if memories:
        names = next(worker["memory"] for worker in value["workers"] if worker["memory"])
        parts.append(table(memories, ("MEMORY, MIB", *(name.replace("_", " ").upper() for name in names))))
    if routes:
        parts.append(table(routes, ("ROUTE", "PROVEN", "FIRST TOKEN MS")))
    return "\n\n".join(parts)
