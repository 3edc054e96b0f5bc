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
from typing import Any

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


# The first start of a browser, or of a console in a fresh checkout, is slow: minutes on a cold, busy box. Nothing that
# is right takes as long, so a limit far off costs nothing.
COLD_S = 180.0


def until(condition: object, within_s: float = COLD_S) -> None:
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


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, warm: it has drawn a page, so that what a test waits for is the console."""
    with playwright.sync_playwright() as driver:
        args = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=args, timeout=COLD_S * 1000)
        page = browser.new_page()
        page.set_default_timeout(COLD_S * 1000)
        page.goto("data:text/html,<p id=warm>warm</p>")
        page.wait_for_selector("#warm")
        page.close()
        yield browser
        browser.close()


@pytest.mark.timeout(6 * COLD_S)
def test_a_page_shows_the_console_and_leaves_nothing(browser: Any, server: tuple[subprocess.Popen[bytes], int]) -> None:
    web, port = server
    # 1. A page starts a console, read-only: the key to change anything was not given.
    page = browser.new_page(viewport={"width": 1300, "height": 900})
    page.set_default_timeout(COLD_S * 1000)
    page.goto(f"http://127.0.0.1:{port}/")
    until(lambda: consoles(port))
    assert any("--read-only" in psutil.Process(pid).cmdline() for pid in consoles(port))
    page.wait_for_selector(".textual-terminal, .xterm")
    # 2. The page goes, its console too; the server stays.
    page.close()
    until(lambda: not consoles(port))
    assert web.poll() is None
    # 3. The server goes while a page is open: so does that page's console.
    last = browser.new_page()
    last.set_default_timeout(COLD_S * 1000)
    last.goto(f"http://127.0.0.1:{port}/")
    until(lambda: consoles(port))
    web.send_signal(signal.SIGINT)
    assert web.wait(60) == 0
    assert consoles(port) == []
