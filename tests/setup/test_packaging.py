"""One set of versions, said once: pyproject's ranges, the lock's pins, conda's environment and the imports agree."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
PINS = [Requirement(line) for line in LOCK.splitlines() if line and not line.startswith("#")]
TARGETS = [
    {"python_version": python, "python_full_version": f"{python}.9", "sys_platform": platform, "os_name": os_name}
    | {"platform_system": system, "platform_machine": machine, "implementation_name": "cpython", "extra": ""}
    for python in ("3.10", "3.11", "3.12", "3.13")
    for platform, os_name, system, machine in (
        ("linux", "posix", "Linux", "x86_64"),
        ("darwin", "posix", "Darwin", "arm64"),
        ("win32", "nt", "Windows", "AMD64"),
    )
]


def name_of(target: dict[str, str]) -> str:
    return f"{target['platform_system']} {target['python_version']}"


def declared() -> list[Requirement]:
    """Every requirement of pyproject.toml, extras included."""
    extras = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    return [Requirement(line) for line in PROJECT["dependencies"] + extras]


def applies(requirement: Requirement, target: dict[str, str]) -> bool:
    return requirement.marker is None or requirement.marker.evaluate(target)


# ----------------------------------------------------------------------------------------------------------- the lock


@pytest.mark.parametrize("target", TARGETS, ids=name_of)
def test_every_dependency_has_one_pin_inside_its_range_on(target):
    pins: dict[str, list[Requirement]] = {}
    for pin in PINS:
        if applies(pin, target):
            pins.setdefault(canonicalize_name(pin.name), []).append(pin)
    assert [name for name, found in pins.items() if len(found) > 1] == []
    for requirement in declared():
        if not applies(requirement, target):
            continue
        (pin,) = pins[canonicalize_name(requirement.name)]
        (version,) = [specifier.version for specifier in pin.specifier]
        assert Version(version) in requirement.specifier, f"{pin} is outside {requirement}"


def test_every_line_of_the_lock_is_one_exact_pin():
    assert len(PINS) > 100
    for pin in PINS:
        assert [specifier.operator for specifier in pin.specifier] == ["=="], str(pin)
        assert not pin.url and not pin.extras, str(pin)


def test_the_lock_leaves_cuda_to_torch():
    names = {canonicalize_name(pin.name) for pin in PINS}
    assert not {name for name in names if name.startswith(("nvidia-", "cuda-"))}


def test_the_lock_names_no_host_no_path_and_no_option():
    for line in LOCK.splitlines():
        assert not re.search(r"://|@|^\s*-", line), line
        assert line.startswith("#") or "/" not in line, line


def test_torch_and_triton_are_pinned_as_the_pair_that_was_released_together():
    pins = {pin.name: str(pin.specifier) for pin in PINS}
    assert (pins["torch"], pins["triton"]) == ("==2.13.0", "==3.7.1")


def test_triton_is_asked_for_on_linux_only():
    for requirement in [*declared(), *PINS]:
        if requirement.name == "triton":
            assert [name_of(t) for t in TARGETS if applies(requirement, t)] == [
                name_of(t) for t in TARGETS if t["sys_platform"] == "linux"
            ]


# --------------------------------------------------------------------------------------------------------------- conda


def test_conda_installs_the_same_pins_on_a_python_that_the_project_supports():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    conda = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    (pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert pip == ["-r requirements.lock", "-e ."]
    python = next(entry for entry in conda if entry.startswith("python="))
    assert python.removeprefix("python=") in {target["python_version"] for target in TARGETS}
    assert f"{python.removeprefix('python=')}.0" in SpecifierSet(PROJECT["requires-python"])
    assert set(conda) == {python, "pip"}, "a package from conda would not be at its pin"


def test_the_set_up_refuses_the_same_pythons_as_the_project():
    from labcore.setup.environment import OLDEST_PYTHON

    assert PROJECT["requires-python"] == ">=" + ".".join(map(str, OLDEST_PYTHON))
    assert f"sys.version_info < {OLDEST_PYTHON}" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_doctor_knows_the_same_ranges_as_the_project():
    from labcore.doctor import report as doctor

    ranges = {requirement.name: requirement.specifier for requirement in declared()}
    assert ranges["torch"] == SpecifierSet(f">={doctor.OLDEST_TORCH}")
    assert ranges["triton"] == SpecifierSet(f">={doctor.OLDEST_TRITON}")
    assert ranges["transformers"] == SpecifierSet(f">={doctor.OLDEST_TRANSFORMERS},<{doctor.TOO_NEW_TRANSFORMERS}")


# --------------------------------------------------------------------------------------------------------- the imports


def imported(folder: str) -> dict[str, str]:
    """Top-level packages that the code of `folder` imports, each with a file that does."""
    found = {}
    for file in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            else:
                continue
            found.update({name.partition(".")[0]: f"{file.relative_to(ROOT)}" for name in names})
    return found


MODULE_OF = {"pyyaml": "yaml", "ipykernel": "ipykernel"}


def modules(requirements: list[str]) -> set[str]:
    names = {canonicalize_name(Requirement(line).name) for line in requirements}
    return {MODULE_OF.get(name, name.replace("-", "_")) for name in names}


def test_what_the_package_imports_is_declared():
    extras = PROJECT["optional-dependencies"]
    known = modules(PROJECT["dependencies"] + extras["lab"]) | {"jupyter_client", "jupyter_core", "nbclient", "labcore"}
    known |= {"flash_attn", "flashinfer"}  # rivals of the kernels, measured on a GPU machine that has them
    foreign = {n: file for n, file in imported("labcore").items() if n not in sys.stdlib_module_names | known}
    assert foreign == {}


def test_what_the_tests_import_is_declared():
    known = modules(PROJECT["dependencies"] + [r for rs in PROJECT["optional-dependencies"].values() for r in rs])
    known |= {"jupyter_client", "tokenizers", "labcore"} | {file.stem for file in (ROOT / "tests").rglob("*.py")}
    known |= {folder.name for folder in (ROOT / "tests" / "support").iterdir() if folder.is_dir()}
    foreign = {n: file for n, file in imported("tests").items() if n not in sys.stdlib_module_names | known}
    assert foreign == {}


def run(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


TORCH_FREE = (
    *("config", "sampling_params", "request", "outputs", "kvcache.blocks", "kvcache.prefix"),
    *("scheduler.scheduler", "scheduler.chunking", "scheduler.budget", "workload.traces", "workload.synthetic"),
    *("recorder", "models.layers", "models.download", "doctor.report", "cli.main"),
)


def test_the_parts_that_promise_to_be_free_of_torch_are():
    loaded = run(f"import labcore, sys\nfor m in {TORCH_FREE!r}: __import__('labcore.' + m)\nprint(*sys.modules)")
    assert not {"torch", "transformers", "triton"} & set(loaded)


WITHOUT_TRITON = """
import sys
class NoTriton:
    # A finder that knows all that another does, but not Triton.
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, *rest):
        return None if name.partition(".")[0] == "triton" else self.finder.find_spec(name, *rest)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = map(NoTriton, sys.meta_path)
sys.path.insert(0, "tests/support")
from labcore import LLM, EngineConfig, SamplingParams
from labcore.models import from_model
from tiny_models import tiny
llm = LLM(from_model(tiny("llama")), num_blocks=32)
out = llm.generate([[1, 2, 3], [4, 5]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
print(*(len(o.outputs[0].token_ids) for o in out), "triton" in sys.modules)
"""


@pytest.mark.slow
def test_the_engine_serves_on_a_machine_without_triton():
    assert run(WITHOUT_TRITON) == ["4", "4", "False"]


# ----------------------------------------------------------------------------------------------------------- the tree


def committed() -> list[Path]:
    """Every file that git knows; the files on disk where there is no git."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git clone")
    return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_committed_file_names_a_place_on_somebodys_machine():
    places = re.compile(r"(?<![\w.~/-])/(?:root|home/\w+|Users/\w+|work|private/tmp)/|[A-Z]:\\+Users")
    examples = {"test_packaging.py", "test_course_rules.py"}  # which test that such places are found
    named = {}
    for path in committed():
        found = places.search(path.read_text(encoding="utf-8", errors="ignore"))
        if found and path.name not in examples:
            named[str(path.relative_to(ROOT))] = found[0]
    assert named == {}


def test_what_the_package_reads_is_packed_with_it():
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["labcore"]
    packed = {path for pattern in patterns for path in (ROOT / "labcore").glob(pattern)}
    read = {path for path in committed() if "labcore" in path.relative_to(ROOT).parts[:1] and path.suffix != ".py"}
    assert read <= packed


def test_ruff_has_no_complaint():
    found = subprocess.run([sys.executable, "-m", "ruff", "check"], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_top_folder_holds_what_a_reader_expects_and_nothing_else():
    expected = {"notebooks", "labcore", "tests", "data", "environment.yml", "README.md", "pyproject.toml", "Makefile"}
    expected |= {"requirements.lock", "LICENSE", ".gitignore", ".ci"}
    assert {path.relative_to(ROOT).parts[0] for path in committed()} == expected


def test_the_readme_names_every_notebook_that_exists_and_no_other_as_there():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\(notebooks/(\w+)\.ipynb\)", readme))
    there = {path.stem for path in committed() if path.suffix == ".ipynb" and path.parent.name == "notebooks"}
    assert linked == there, "in README.md's table, link each notebook that is committed, and no other"


def test_every_file_that_the_readme_links_to_is_there():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    local = [target for target in re.findall(r"\]\(([^)#]+)\)", readme) if "://" not in target]
    assert local
    assert [target for target in local if not (ROOT / target).exists()] == []


def test_every_error_that_the_readme_explains_is_one_that_the_code_says():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \|", readme.partition("## Troubleshooting")[2], re.MULTILINE)
    said = (ROOT / "Makefile").read_text(encoding="utf-8")
    said += "".join(file.read_text(encoding="utf-8") for file in (ROOT / "labcore").rglob("*.py"))
    assert len(rows) > 10
    assert [row for row in rows if row not in said] == []


def test_notebooks_ask_for_the_kernel_that_the_environment_brings():
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        assert json.loads(path.read_text(encoding="utf-8"))["metadata"]["kernelspec"]["name"] == "python3", path.name


def test_the_ci_script_runs_every_test():
    script = ROOT / ".ci/run"
    assert "make test BROWSER_TESTS=install" in script.read_text().splitlines()
    assert os.name == "nt" or os.access(script, os.X_OK)


@pytest.mark.slow
def test_a_readers_own_python3_kernel_does_not_shadow_ours(tmp_path, monkeypatch):
    """A user-level kernel of the same name, and one on JUPYTER_PATH, as readers have them."""
    from labcore.setup.environment import environment

    for place in (tmp_path / "home/.local/share/jupyter", tmp_path / "shared"):
        folder = place / "kernels/python3"
        folder.mkdir(parents=True)
        spec = {"argv": ["/usr/bin/false", "-f", "{connection_file}"], "display_name": "other", "language": "python"}
        (folder / "kernel.json").write_text(json.dumps(spec))
    variables = {**os.environ, "HOME": str(tmp_path / "home"), "JUPYTER_PATH": str(tmp_path / "shared")}
    code = (
        "from jupyter_client.kernelspec import KernelSpecManager as K; from labcore.doctor.facts import kernel\n"
        "print(K().get_kernel_spec('python3').resource_dir, kernel())"
    )

    def kernel_under(variables) -> tuple[str, str]:
        done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)
        return tuple(done.stdout.split())

    folder, whose = kernel_under(variables)
    assert folder.startswith(str(tmp_path)) and whose == "other"
    for name in ("HOME", "JUPYTER_PATH"):
        monkeypatch.setenv(name, variables[name])
    folder, whose = kernel_under(environment(Path(sys.prefix)))
    assert folder.startswith(sys.prefix) and whose == "ours"
