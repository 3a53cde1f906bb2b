"""`make clean`: delete only what labcore and its tools created.

    the environment        only with labcore's marker in it; the default one, or the one given by VENV=
    .pytest_cache, …       cache folders of tools at the top of the project
    __pycache__            in the project's folders: the compiled files, then the folder if it is empty
    .ipynb_checkpoints     in the project's folders: copies of notebooks that still exist

Symbolic links are not followed. Folders of other projects and environments are not entered.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from labcore.files.folder_lock import folder_lock
from labcore.setup.environment import ROOT, say, short
from labcore.setup.explain import SetupError
from labcore.setup.ownership import empty, why_not_ours

TOOL_CACHES = (".pytest_cache", ".ruff_cache", ".hypothesis", "labcore.egg-info")
FOLDERS = ("labcore", "tests", "notebooks", "data")


def clean(venv: Path) -> None:
    """Delete the caches, then the environment `venv`. Raises SetupError if `venv` exists and is not labcore's."""
    for name in TOOL_CACHES:
        if is_real_folder(ROOT / name):
            shutil.rmtree(ROOT / name)
            say(f"deleted {name}")
    emptied = sum(map(remove_cache, caches()))
    if emptied:
        say(f"deleted {emptied} folders __pycache__ and .ipynb_checkpoints")
    if os.path.lexists(venv):
        remove_environment(venv)
    elif not emptied:
        say(f"there is no {short(venv)}")


def remove_environment(venv: Path) -> None:
    """Delete an environment created by labcore. Raises SetupError for any other folder."""
    if reason := why_not_ours(venv, ROOT):
        raise SetupError(f"{short(venv)} {reason}, so it stays — delete it yourself if you no longer need it.")
    with folder_lock(venv, lambda: say(f"{short(venv)} is being installed by another process; waiting for that")):
        empty(venv)
        try:
            venv.rmdir()
        except OSError:
            pass  # a mount point, for example; an empty folder may stay
    say(f"deleted {short(venv)}")


def caches() -> Iterator[Path]:
    """Every `__pycache__` and `.ipynb_checkpoints` in the project's own folders."""
    for top in filter(is_real_folder, (ROOT / name for name in FOLDERS)):
        for place, folders, files in os.walk(top):  # does not follow links
            if "pyvenv.cfg" in files or ".git" in (*folders, *files):
                folders.clear()
            elif os.path.basename(place) in ("__pycache__", ".ipynb_checkpoints"):
                yield Path(place)


def remove_cache(folder: Path) -> bool:
    """Delete the files of one cache that can be regenerated. Returns whether the folder is gone."""
    for file in list(folder.iterdir()):
        original = folder.parent / file.name.replace("-checkpoint", "", 1)
        compiled = folder.name == "__pycache__" and ".pyc" in file.name
        copy = folder.name == ".ipynb_checkpoints" and original.name != file.name and original.is_file()
        if (compiled or copy) and not file.is_dir():
            file.unlink()
    if any(folder.iterdir()):
        return False
    folder.rmdir()
    return True


def is_real_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
