"""The map, labcore/README.md: every file that it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import labcore

PACKAGE = Path(labcore.__file__).parent
NAMED = re.compile(r"`((?:[a-z_]+/)*[a-z_]+\.py)`|`([a-z_]+(?:/[a-z_]+)*)/`")


def test_every_file_and_folder_on_the_map_exists():
    text, missing = (PACKAGE / "README.md").read_text(encoding="utf-8"), []
    for line in text.splitlines():
        folder = PACKAGE
        for file, named_folder in NAMED.findall(line):
            path = PACKAGE / (file or named_folder)
            if not path.exists() and "/" not in file:
                path = folder / file  # `attention/torch_backend.py` or `triton_backend.py`: beside the one before
            if not path.exists() and not (PACKAGE.parent / (file or named_folder)).exists():
                missing.append(file or named_folder)
            folder = path.parent
    assert not missing and len(NAMED.findall(text)) > 60
