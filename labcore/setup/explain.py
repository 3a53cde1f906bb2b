"""One-line explanations of setup failures, each with a remedy.

Pure functions from a program's output to a sentence, so each failure is tested without reproducing it.
"""

from __future__ import annotations

import errno
import platform
import re
import sys

PYTHON = f"Python {sys.version_info[0]}.{sys.version_info[1]}"
NEEDED_GB = 3.0  # on a CPU; torch's GPU build, which pip chooses on Linux, takes about 5 more
AGAIN = "then run the same command again; what was already downloaded is kept."

NO_SPACE = r"No space left on device|Errno 28|not enough space on the disk|Disk quota exceeded"
NO_NETWORK = (
    r"NewConnectionError|NameResolutionError|Name or service not known|name resolution|getaddrinfo failed"
    r"|ConnectTimeout|Connection refused|Network is unreachable|ProxyError|Max retries exceeded"
)
NOT_TRUSTED = r"CERTIFICATE_VERIFY_FAILED|SSLError"
BROKEN_DOWNLOAD = (
    r"DO NOT MATCH THE HASHES|IncompleteRead|incomplete-download|Read timed out|BadZipFile|is not a zip"
    r"|has an invalid wheel|located at .* is invalid|Connection aborted|Connection reset|connection broken"
)


class SetupError(Exception):
    """A setup failure. The message is one line: what happened — what to do."""


def explain_venv(output: str) -> str:
    """The line for a failed `python -m venv`, from what it printed."""
    if re.search(r"ensurepip is not\s+available|No module named '?(venv|ensurepip)", output):
        package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
        return (
            f"this {PYTHON} came without its venv module — install it (on Debian and Ubuntu the package {package}), "
            "or use another Python: PYTHON=/path/to/python3."
        )
    if re.search(NO_SPACE, output):
        return f"no space left on the disk — free {NEEDED_GB:g} GB, or put the environment elsewhere (VENV=/path)."
    if "Permission denied" in output:
        return "no permission to write here — make this folder yours, or put the environment elsewhere (VENV=/path)."
    return f"the Python environment could not be made ({last_line(output)}) — fix that, then run it again."


def explain_pip(status: int, output: str, log: str) -> str:
    """The line for a failed `pip install`, from its exit status and stderr; `log` is the complete log.

    The order matters: a full disk can look like a broken download, an untrusted certificate like a network failure, and
    without a network pip reports that a package does not exist.
    """
    if status < 0 or status == 137:
        return f"the installation was killed; too little memory is the usual reason — close other programs, {AGAIN}"
    if re.search(NO_SPACE, output):
        return (
            f"no space left while installing; {NEEDED_GB:g} GB are needed, 5 GB more if torch brings CUDA — free some "
            f"here and in the temp folder (TMPDIR), {AGAIN}"
        )
    if re.search(NOT_TRUSTED, output):
        return f"the package index shows a certificate that is not trusted — set PIP_CERT to the right one, {AGAIN}"
    if re.search(NO_NETWORK, output):
        return f"the package index can't be reached — check the network and the proxy settings, {AGAIN}"
    if re.search(BROKEN_DOWNLOAD, output, re.IGNORECASE):
        return f"a download arrived broken — empty pip's cache (python -m pip cache purge), {AGAIN}"
    missing = re.search(r"No matching distribution found for (\S+)", output)
    if missing:
        return (
            f"there is no {missing[1]} for {PYTHON} on this machine ({sys.platform}, {platform.machine()}) — use a "
            "64-bit Python from 3.10 to 3.13: PYTHON=/path/to/python3."
        )
    if "Permission denied" in output:
        return f"no permission to write the environment — make it yours, or put it elsewhere (VENV=/path), {AGAIN}"
    return f"installing the packages failed ({last_line(output)}) — see {log}; fix the cause, {AGAIN}"


def explain_import(output: str, clean_command: str) -> str:
    """The line for installed packages that don't import, from the traceback."""
    return (
        f"the packages are installed, but don't import ({last_line(output)}) — run `{clean_command}`, then the same "
        "command again; if it stays, see Troubleshooting in README.md."
    )


def explain_os(error: OSError) -> str:
    """The line for an OSError: file, reason, and a remedy where one is known."""
    what = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{what} — free {NEEDED_GB:g} GB, or put the environment elsewhere: VENV=/path."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{what} — make that folder yours, or put the environment elsewhere: VENV=/path."
    return what


def last_line(output: str) -> str:
    """The last line that is neither empty nor a warning, at most 160 characters."""
    lines = [line.strip() for line in output.splitlines() if line.strip() and not line.startswith("WARNING:")]
    return lines[-1].removeprefix("ERROR: ")[:160] if lines else "it did not say why"
