"""`tui --web`: the console in a page, and nothing left of it when the page or the server is gone."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.process.box import Box, box

__all__ = ["box"]
pytest.importorskip("textual_serve")
playwright = pytest.importorskip("playwright.sync_api")
SEEN: set[int] = set()  # groups of servers, remembered after their end
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium"),
    pytest.mark.filterwarnings("ignore"),  # of playwright's own making
]


def until(condition: object, within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def consoles(port: int) -> list[int]:
    """What the pages of that server run: everything in textual-serve's group but itself."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "pdctl.tui.web" in process.cmdline() and str(port) in process.cmdline():
                SEEN.add(process.pid)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            is_alive = process.status() != psutil.STATUS_ZOMBIE
            if is_alive and os.getpgid(process.pid) in SEEN and process.pid not in SEEN:
                found.append(process.pid)
    return found


@pytest.fixture
def server(box: Box) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    box.up()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    argv = [sys.executable, "-P", "-m", "pdctl", "tui", "box", "--web", "--web-port", str(port)]
    env = box.env | {"PYTHONPATH": os.pathsep.join([box.env["PYTHONPATH"], os.environ.get("PYTHONPATH", "")])}
    web = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        until(lambda: _answers(port))
        yield web, port
    finally:
        web.terminate()
        web.wait(10)
        box("down")


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def test_a_page_shows_the_console_and_leaves_nothing(
    server: tuple[subprocess.Popen[bytes], int], tmp_path: Path
) -> None:
    web, port = server
    with playwright.sync_playwright() as driver:
        # 1. A page starts a console, read-only: the key to change anything was not given.
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1300, "height": 900})
        page.goto(f"http://127.0.0.1:{port}/")
        until(lambda: consoles(port))
        assert any("--read-only" in psutil.Process(pid).cmdline() for pid in consoles(port))
        page.wait_for_selector(".textual-terminal, .xterm", timeout=20000)
        # 2. The page goes, its console too; the server stays.
        page.close()
        until(lambda: not consoles(port))
        assert web.poll() is None
        # 3. The server goes while a page is open: so does that page's console.
        browser.new_page().goto(f"http://127.0.0.1:{port}/")
        until(lambda: consoles(port))
        web.send_signal(signal.SIGINT)
        assert web.wait(10) == 0
        assert consoles(port) == []
        browser.close()
