"""Keys that change while the router runs, what one may have in flight, keys that only look, origins, long headers."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.datastructures import Headers

from server.config import Router
from server.errors import StartError
from server.messages import Prefill
from server.router.errors import ApiError
from server.router.keys import Keys
from server.viewing import view_twin
from tests.router.conftest import Cluster, Start, read_answer
from tests.router.test_errors import check_error


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def accepts(keys: Keys, key: str) -> bool:
    try:
        return bool(keys.check(Headers(bearer(key))))
    except ApiError:
        return False


def rewrite(file: Path, text: str) -> None:
    file.write_text(text)
    stat = file.stat()
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))  # as if time had passed


def test_keys_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\none\n\ntwo\n")
    keys = Keys.read(str(file))
    assert [accepts(keys, k) for k in ("one", "two", "three", "", "# ours")] == [True, True, False, False, False]
    # 1. A key goes, another comes.
    rewrite(file, "two\nthree\n")
    assert [accepts(keys, k) for k in ("one", "two", "three")] == [False, True, True]
    # 2. Nothing usable there: the last known keys stay, and nobody else is let in.
    rewrite(file, "# none\n")
    assert [accepts(keys, k) for k in ("one", "two", "")] == [False, True, False]
    file.unlink()
    assert [accepts(keys, k) for k in ("one", "two", "")] == [False, True, False]
    # 3. It is back.
    file.write_text("one\n")
    assert [accepts(keys, k) for k in ("one", "two")] == [True, False]


def test_keys_that_cannot_start(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nothing\n")
    for name in ("missing", "empty"):
        with pytest.raises(StartError):
            Keys.read(str(tmp_path / name))


def test_odd_bytes_in_a_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes("schlüssel\n".encode())
    keys = Keys.read(str(file))
    sent = "schlüssel".encode().decode("latin-1")  # as Starlette reads header bytes
    assert accepts(keys, sent)
    assert not accepts(keys, "schlüssel")


async def test_requests_in_flight_by_key(start: Start, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("a\nb\n")
    router = {"api_key_file": str(tmp_path / "keys"), "key_max_requests": 2}
    cluster = await start(colocated=1, router=router)
    cluster.colocated.stepwise = True
    held = [asyncio.create_task(cluster.chat(bearer("a"))) for _ in range(2)]
    await cluster.colocated.saw(Prefill, 2)
    answer = await cluster.chat(bearer("a"))
    assert check_error(answer, 429)["code"] == "key_limit"
    assert answer.headers["retry-after"] == "1"
    assert (await cluster.request("GET", "/v1/models", headers=bearer("a"))).status == 200, "no work, no limit"
    other = asyncio.create_task(cluster.chat(bearer("b"), stream=True))
    await cluster.colocated.saw(Prefill, 3)
    cluster.colocated.step(1000)
    assert [(await task).status for task in (*held, other)] == [200] * 3
    for _ in range(3):
        assert (await cluster.chat(bearer("a"))).status == 200
    # A client that leaves gives its place back too.
    cluster.colocated.stepwise = True
    cluster.colocated._permits = asyncio.Semaphore(0)
    for count in (10, 11, 12):
        _, writer = await cluster.send("POST", "/v1/completions", {"prompt": "x", "stream": True}, bearer("a"))
        await cluster.colocated.saw(Prefill, count - 3)
        writer.close()
        async with asyncio.timeout(5):
            while cluster.stack.dispatcher.in_flight:
                await asyncio.sleep(0.001)


async def test_choices_count_for_their_key(start: Start, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("a\nb\n")
    router = {"api_key_file": str(tmp_path / "keys"), "key_max_requests": 4}
    cluster = await start(colocated=1, router=router)
    cluster.colocated.stepwise = True
    held = asyncio.create_task(cluster.complete(bearer("a"), prompt=["one", "two", "three"]))
    await cluster.colocated.saw(Prefill, 3)
    assert check_error(await cluster.complete(bearer("a"), n=2), 429)["code"] == "key_limit"
    one = asyncio.create_task(cluster.complete(bearer("a")))
    assert check_error(await cluster.complete(bearer("b"), prompt=["x"] * 3, n=2), 400)["param"] == "n", "never"
    cluster.colocated.step(1000)
    assert [(await task).status for task in (held, one)] == [200, 200]
    assert (await cluster.complete(bearer("a"), n=4)).status == 200


async def test_origins(start: Start, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("a\n")
    page = "https://page.example"
    router = {"api_key_file": str(tmp_path / "keys"), "cors_origins": [page]}
    cluster = await start(colocated=1, router=router)
    ask = {"Origin": page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    preflight = await cluster.request("OPTIONS", "/v1/chat/completions", headers=ask)
    assert (preflight.status, preflight.headers["access-control-allow-origin"]) == (200, page)
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    answer = await cluster.chat({"Origin": page, **bearer("a")})
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, page)
    refused = await cluster.chat({"Origin": page})
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, page)
    for other in ("https://page.example.evil", "http://page.example", "https://PAGE.example", "null"):
        answer = await cluster.chat({"Origin": other, **bearer("a")})
        assert "access-control-allow-origin" not in answer.headers
        assert (
            await cluster.request("OPTIONS", "/v1/chat/completions", headers={**ask, "Origin": other})
        ).status == 400


async def test_no_origins_by_default(start: Start) -> None:
    cluster = await start(colocated=1)
    assert "access-control-allow-origin" not in (await cluster.chat({"Origin": "https://page.example"})).headers


@pytest.mark.parametrize("origin", ["*", "page.example", "https://page.example/", "https://*.example"])
def test_origins_are_exact(origin: str) -> None:
    with pytest.raises(ValidationError):
        Router(cors_origins=[origin])


async def test_headers_without_end(start: Start) -> None:
    cluster = await start(colocated=1)
    for headers in ({"X-Long": "x" * 100_000}, {f"X-{i}": "x" for i in range(300)}):
        check_error(await cluster.request("GET", "/health", headers=headers), 431)
    check_error(await cluster.request("GET", "/" + "x" * 100_000), 431)
    assert (await cluster.request("GET", "/health", headers={f"X-{i}": "x" for i in range(100)})).status == 200


async def test_what_is_no_http(start: Start) -> None:
    cluster = await start(colocated=1)
    for raw in (b"hello\r\n\r\n", b"GET \xff\xfe HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00"):
        reader, writer = await asyncio.open_connection("127.0.0.1", cluster.port)
        writer.write(raw)
        async with asyncio.timeout(5):
            check_error(await read_answer(reader), 400)
        writer.close()


def admin_routes(cluster: Cluster) -> list[tuple[str, str]]:
    """(method, path) of every call of the admin API, a worker's name put in."""
    gate = cluster.stack.app
    app: Any = gate._app  # type: ignore[attr-defined]
    found = [
        (method, route.path.replace("{name}", "colocated-0"))
        for route in app.routes
        if route.path.startswith("/admin/")
        for method in route.methods - {"HEAD"}
    ]
    assert len(found) > 10
    return found


async def test_a_view_key_looks_and_changes_nothing(start: Start, tmp_path: Path) -> None:
    (tmp_path / "admin").write_text("# ours\nboss\n")
    (tmp_path / "view").write_text("guest\n")
    router = {"admin_key_file": str(tmp_path / "admin"), "view_key_file": str(tmp_path / "view")}
    cluster = await start(colocated=1, router=router)
    twins = [view_twin(key).decode() for key in (b"boss", b"guest")]
    for key in ("guest", *twins):
        # 1. Every call that changes something is refused before its body is looked at; a new one is too.
        for method, path in admin_routes(cluster):
            if method != "GET":
                answer = await cluster.request(method, path, headers=bearer(key))
                assert check_error(answer, 403)["code"] == "READ_ONLY", (method, path)
        # 2. What there is to see can be seen, and the knobs say that they cannot be turned.
        assert (await cluster.request("GET", "/admin/state", headers=bearer(key))).status == 200
        assert (await cluster.request("GET", "/admin/knobs", headers=bearer(key))).json["read_only"] is True
    assert (await cluster.request("GET", "/admin/audit", headers=bearer("boss"))).json["rev"] == 1
    # 3. The admin key still may; nobody else may even look.
    body = {"values": {"router.queue_high": 51}}
    assert (await cluster.request("PATCH", "/admin/knobs", body, bearer("boss"))).status == 200
    assert (await cluster.request("GET", "/admin/knobs", headers=bearer("boss"))).json["read_only"] is False
    for key in ("", "# ours", view_twin(b"stranger").decode(), view_twin(view_twin(b"boss")).decode()):
        for method, path in admin_routes(cluster):
            check_error(await cluster.request(method, path, headers=bearer(key)), 401)


async def test_view_keys_are_read_again(start: Start, tmp_path: Path) -> None:
    (tmp_path / "view").write_text("guest\n")
    cluster = await start(colocated=1, router={"view_key_file": str(tmp_path / "view")})
    rewrite(tmp_path / "view", "visitor\n")
    assert (await cluster.request("GET", "/admin/state", headers=bearer("visitor"))).status == 200
    for gone in (b"guest", view_twin(b"guest")):
        check_error(await cluster.request("GET", "/admin/state", headers=bearer(gone.decode())), 401)
