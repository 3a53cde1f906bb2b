"""Write the student edition of the whole course to a folder: all or nothing, without overwriting edited files."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

from labcore.course.author.notebooks import MalformedNotebook, notebook_text, read_notebook
from labcore.course.author.student_edition import nbgrader_source, student_edition
from labcore.course.curriculum import notebook_files
from labcore.course.project import write_atomically

MANIFEST = ".labcore_student.json"


class EditedWork(RuntimeError):
    """A file that the build would replace has been edited since it was built. Nothing was written."""


def build(folder: Path, out: Path, force: bool = False, for_nbgrader: bool = False) -> list[Path]:
    """Write the student edition of every notebook in `folder` to `out`, all or nothing, and return the files.

    for_nbgrader: write `nbgrader_source` of each instead, for `nbgrader generate_assignment` to take the solutions out.

    Raises MalformedNotebook (all problems, one a line) before anything is written, and EditedWork if `out` holds a file
    that this build didn't write or that was changed since, unless `force`. ValueError if `out` is `folder`.
    """
    masters = notebook_files(folder)
    if out.exists() and out.samefile(folder):
        raise ValueError(f"--out is {out}, where the masters are: their solutions would be lost — name another folder.")
    if not masters:
        raise MalformedNotebook(f"{folder}: there are no notebooks here — name the course's folder with --notebooks.")
    texts, problems, owner = {}, [], {}
    for path in masters:
        try:
            edition = student_edition(read_notebook(path), path.name)
        except MalformedNotebook as error:
            problems += str(error).splitlines()
            continue
        problems += [
            f"{path.name}: exercise {exercise_id} is in {owner[exercise_id]}, too."
            for exercise_id in edition.exercise_ids
            if exercise_id in owner
        ]
        owner.update(dict.fromkeys(edition.exercise_ids, path.name))
        texts[path.name] = notebook_text(nbgrader_source(edition) if for_nbgrader else edition.notebook)
    if problems:
        raise MalformedNotebook("\n".join(problems))
    return _write_all(out, texts, force)


def _write_all(out: Path, texts: dict[str, str], force: bool) -> list[Path]:
    """Write the files, each atomically. Raises EditedWork before the first if an edited file would be overwritten.

    The manifest holds the hash of each file as written. It is saved before and after, so that the next build recognises
    the files of an interrupted one.
    """
    out.mkdir(parents=True, exist_ok=True)
    known = _read_manifest(out / MANIFEST)
    if not force:
        edited = [name for name in texts if (out / name).exists() and _hash(out / name) not in known.get(name, [])]
        if edited:
            raise EditedWork(
                f"{out}: {', '.join(edited)} would be lost: edited here, or not written by this command — "
                "choose another --out, or overwrite with --force."
            )
    new = {name: sha256(text.encode()).hexdigest() for name, text in texts.items()}
    _write_manifest(out, {**known, **{name: [*known.get(name, []), digest] for name, digest in new.items()}})
    for name, text in texts.items():
        write_atomically(out / name, text)
    _write_manifest(out, {**known, **{name: [digest] for name, digest in new.items()}})
    return [out / name for name in texts]


def _hash(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


def _read_manifest(path: Path) -> dict[str, list[str]]:
    """File name → hashes of the versions written; empty without a readable manifest."""
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["files"]
        return {name: list(hashes) for name, hashes in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _write_manifest(out: Path, files: dict[str, list[str]]) -> None:
    write_atomically(out / MANIFEST, json.dumps({"format": 1, "files": files}, indent=1, sort_keys=True) + "\n")
