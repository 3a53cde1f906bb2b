"""A real JupyterLab and a real Chromium for the browser tests. From neither can anything outside be reached."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
import pytest

CHROMIUM_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
    "notebook-extension/tracker": {"windowingMode": "none"},  # every cell is in the page, also off screen
}
STDERR = '.jp-RenderedText[data-mime-type="application/vnd.jupyter.stderr"]'  # errors and warnings alike
HOW_TO_GET_IT = "install chromium, or, as root on Debian, make test BROWSER_TESTS=install"
LOCAL = re.compile(r"^(https?|ws)://(127\.0\.0\.1|localhost)[:/]|^(data|blob|file|about):")


def find_chromium() -> str:
    """Path of a Chromium. Without one: skips the test; with BROWSER_TESTS=install, installs Debian's or fails the test."""
    if found := next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None):
        return found
    if os.environ.get("BROWSER_TESTS") != "install":
        pytest.skip(f"no Chromium on this machine; to get one: {HOW_TO_GET_IT}")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update"], ["install", "-y", "--no-install-recommends", "chromium"]):
        try:
            done = subprocess.run(["apt-get", *arguments], env=environment, capture_output=True, text=True, timeout=600)
        except OSError as error:
            pytest.fail(f"BROWSER_TESTS=install takes apt-get ({error}); instead: {HOW_TO_GET_IT}", pytrace=False)
        if done.returncode:
            pytest.fail(f"apt-get {arguments[0]} failed: {done.stderr.strip().splitlines()[-1:]}", pytrace=False)
    return shutil.which("chromium") or pytest.fail("apt-get installed no program named chromium", pytrace=False)


class Page:
    """A Playwright page that takes down everything that goes wrong on it."""

    def __init__(self, page) -> None:
        self.page = page
        self.errors: list[str] = []
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.errors.append(f"page: {error}"))
        page.on("requestfailed", self._failed)
        page.on("response", self._answered)
        page.route(lambda url: not LOCAL.match(url), self._outside)

    def _said(self, message) -> None:
        # JupyterLab shows a picture that is attached to a cell after it has tried its address as it stands.
        if message.type == "error" and "ERR_UNKNOWN_URL_SCHEME" not in message.text:
            self.errors.append(f"console: {message.text}")

    def _failed(self, request) -> None:
        attached = request.url.startswith("attachment:")
        if request.failure != "net::ERR_ABORTED" and not attached:  # aborted: the page gave up, as when it moves on
            self.errors.append(f"request failed: {request.url} {request.failure}")

    def _answered(self, response) -> None:
        if response.status >= 400:
            self.errors.append(f"request failed: {response.url} {response.status}")

    def _outside(self, route) -> None:
        self.errors.append(f"reached outside: {route.request.url}")
        route.abort()


@contextmanager
def chromium(**settings) -> Iterator[Page]:
    """A page in a fresh browser, closed whatever happens."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=find_chromium(), args=CHROMIUM_FLAGS)
        try:
            context = browser.new_context(viewport={"width": 1280, "height": 1000}, **settings)
            context.set_default_timeout(60_000)
            yield Page(context.new_page())
        finally:
            browser.close()


@contextmanager
def jupyterlab(folder: Path) -> Iterator[str]:
    """JupyterLab on `folder`, with settings of its own; yields its address. Ends it and its kernels, come what may."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    home = folder / ".home"
    for name, values in SETTINGS.items():
        path = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    environment = os.environ | {
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_DATA_DIR": str(home / "data"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "IPYTHONDIR": str(home / "ipython"),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
    }
    options = {
        "ServerApp.port": port, "ServerApp.port_retries": 0, "ServerApp.ip": "127.0.0.1", "ServerApp.root_dir": folder,
        "IdentityProvider.token": "", "ServerApp.open_browser": False, "ServerApp.allow_root": True,
        "ServerApp.disable_check_xsrf": True, "LabApp.news_url": "",
        "LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
    }  # fmt: skip
    command = [sys.executable, "-m", "jupyterlab", *(f"--{name}={value}" for name, value in options.items())]
    with open(folder / "jupyterlab.log", "w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=folder)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(f"{address}/api", server, folder / "jupyterlab.log")
        yield address
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def wait_for(address: str, server: subprocess.Popen, log: Path, seconds: float = 90) -> None:
    """Return when the server answers; fail with the end of its log if it doesn't."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    pytest.fail(f"JupyterLab did not start: {log.read_text()[-2000:]}")


def write_notebook(path: Path, *cells: str) -> Path:
    """A notebook of code cells that has not been run."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, path)
    return path


def run_all(page, address: str, name: str, num_cells: int, seconds: float = 180) -> None:
    """Open a notebook without outputs, run all of it, and wait until its last cell is done; fail if one has failed."""
    page.goto(f"{address}/lab/tree/{name}")
    page.wait_for_selector(".jp-NotebookPanel .jp-Cell")
    page.get_by_text(re.compile(r"\| Idle")).wait_for()
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    deadline = time.monotonic() + seconds
    while len(counts := page.locator(".jp-CodeCell .jp-InputArea-prompt").all_inner_texts()) < num_cells or any(
        re.fullmatch(r"\[( |\*)?\]:", count.strip()) for count in counts
    ):
        assert not (errors := page.locator(STDERR).all_inner_texts()), "\n".join(errors)
        assert time.monotonic() < deadline, f"not done after {seconds} s: {counts}"
        page.wait_for_timeout(250)
    assert not (errors := page.locator(STDERR).all_inner_texts()), "\n".join(errors)
