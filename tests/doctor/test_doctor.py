"""The doctor: each situation it knows, without the hardware; and that looking at a broken machine never breaks it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from labcore.doctor import facts as facts
from labcore.doctor.facts import Gpu, Machine
from labcore.doctor.report import diagnose, doctor, passed, table

VERSIONS = {"torch": "2.13.0", "triton": "3.7.1", "transformers": "5.24.0", "jupyterlab": "4.6.6", "ipykernel": "7.4.0"}
LAPTOP = Machine(
    system="Linux",
    python=(3, 11, 7),
    bits=64,
    versions=VERSIONS,
    broken={},
    torch_cuda=None,
    torch_sees_gpu=False,
    torch_needs_triton=None,
    gpus=(),
    driver=None,
    driver_cuda=None,
    hidden_by=None,
    c_compiler=True,
    memory_gib=16.0,
    memory_free_gib=12.0,
    disk_free_gib=100.0,
    model_cached=True,
    kernel="ours",
)
T4 = Gpu("Tesla T4", 15.0, (7, 5))
LAB = replace(
    LAPTOP,
    torch_cuda="13.0",
    torch_sees_gpu=True,
    torch_needs_triton="3.7.1",
    gpus=(T4,),
    driver="580.65.06",
    driver_cuda=(13, 0),
)
NO_TRITON = {name: version for name, version in VERSIONS.items() if name != "triton"}


def row(machine: Machine, name: str):
    return next(row for row in diagnose(machine) if row.name == name)


@pytest.mark.parametrize("machine", [LAPTOP, LAB], ids=["laptop", "GPU lab"])
def test_a_good_machine_gets_nothing_but_ok(machine):
    assert [row.status for row in diagnose(machine)] == ["ok"] * 9


def test_the_rows_are_those_that_the_course_promises():
    names = [row.name for row in diagnose(LAPTOP)]
    assert names == ["Python", "torch", "triton", "transformers", "GPU", "memory", "disk", "model cache", "Jupyter"]


SITUATIONS = {
    "Python 3.9": (replace(LAPTOP, python=(3, 9, 18)), "Python", "fail", "Python 3.10"),
    "32-bit Python": (replace(LAPTOP, bits=32), "Python", "fail", "64-bit"),
    "torch below the range": (replace(LAPTOP, versions={**VERSIONS, "torch": "2.9.1"}), "torch", "fail", "2.11"),
    "torch not installed": (replace(LAPTOP, versions={}), "torch", "fail", "make lab"),
    "torch that does not import": (
        replace(LAPTOP, broken={"torch": "OSError: libgomp.so.1: cannot open"}),
        "torch",
        "fail",
        "make clean",
    ),
    "transformers 6": (
        replace(LAPTOP, versions={**VERSIONS, "transformers": "6.0.1"}),
        "transformers",
        "fail",
        "below 6",
    ),
    "no triton on macOS": (
        replace(LAPTOP, system="Darwin", versions=NO_TRITON),
        "triton",
        "warn",
        "all but the kernels",
    ),
    "no triton on Windows": (replace(LAPTOP, system="Windows", versions=NO_TRITON), "triton", "warn", "all but"),
    "no triton on Linux": (replace(LAPTOP, versions=NO_TRITON), "triton", "fail", "requirements.lock"),
    "another triton than torch's": (replace(LAB, torch_needs_triton="3.6.0"), "triton", "warn", "triton==3.6.0"),
    "a GPU and no C compiler": (replace(LAB, c_compiler=False), "triton", "fail", "gcc"),
    "a driver too old for torch": (
        replace(LAB, torch_sees_gpu=False, driver="535.104.05", driver_cuda=(12, 2)),
        "GPU",
        "fail",
        "update the driver to 580",
    ),
    "a GPU below sm_75": (replace(LAB, gpus=(Gpu("Tesla V100", 16.0, (7, 0)),)), "GPU", "fail", 'device="cpu"'),
    "CPU torch beside a GPU": (
        replace(LAB, torch_cuda=None, torch_sees_gpu=False),
        "GPU",
        "warn",
        "install a CUDA build",
    ),
    "CPU torch, driver present, GPU silent": (
        replace(LAPTOP, driver="580.65.06", driver_cuda=(13, 0)),
        "GPU",
        "warn",
        "install a CUDA build",
    ),
    "a GPU that is hidden": (replace(LAB, torch_sees_gpu=False, hidden_by=""), "GPU", "warn", "unset"),
    "a GPU that torch can't reach": (replace(LAB, torch_sees_gpu=False), "GPU", "fail", "nvidia-smi"),
    "a GPU and no torch": (replace(LAB, torch_sees_gpu=False, versions={}), "GPU", "warn", "torch is fixed"),
    "2 GiB of memory": (replace(LAPTOP, memory_gib=2.0, memory_free_gib=1.5), "memory", "fail", "4 GiB"),
    "little memory left": (replace(LAPTOP, memory_free_gib=1.5), "memory", "warn", "close"),
    "memory unknown": (replace(LAPTOP, memory_gib=None, memory_free_gib=None), "memory", "warn", "2 GiB"),
    "a full disk": (replace(LAPTOP, model_cached=False, disk_free_gib=0.4), "disk", "fail", "free 1 GiB"),
    "model not fetched": (replace(LAPTOP, model_cached=False), "model cache", "warn", "labcore fetch"),
    "no JupyterLab": (replace(LAPTOP, versions={"torch": "2.13.0"}), "Jupyter", "fail", "requirements.lock"),
    "no kernel": (replace(LAPTOP, kernel=None), "Jupyter", "fail", "ipykernel install"),
    "another Python's kernel": (replace(LAPTOP, kernel="other"), "Jupyter", "warn", "make lab"),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_it_says_what_to_do_when_there_is(situation):
    machine, name, status, advice = SITUATIONS[situation]
    found = row(machine, name)
    assert found.status == status
    assert advice in found.advice
    assert "\n" not in found.found + found.advice


def test_an_old_driver_is_named_with_what_it_serves_and_what_torch_needs():
    machine = replace(LAB, torch_sees_gpu=False, driver="535.104.05", driver_cuda=(12, 2))
    assert row(machine, "GPU").found == "Tesla T4, 15 GiB, sm_75; driver 535.104.05 serves CUDA 12.2, torch needs 13.0"


def test_an_older_driver_of_the_same_cuda_major_is_good_enough():
    assert row(replace(LAB, torch_cuda="12.9", driver_cuda=(12, 2), driver="535.104.05"), "GPU").status == "ok"


def test_a_disk_with_200_mib_is_enough_once_the_model_is_there():
    assert row(replace(LAPTOP, disk_free_gib=0.3), "disk").status == "ok"


def test_warnings_pass_and_failures_do_not():
    assert passed(diagnose(replace(LAPTOP, model_cached=False)))
    assert not passed(diagnose(replace(LAPTOP, python=(3, 9, 0))))


def test_the_table_puts_advice_under_its_row():
    lines = table(diagnose(replace(LAPTOP, model_cached=False))).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("warn  model cache"))
    assert lines[at + 1].strip() == "→ run `labcore fetch` (93 MB)"


def test_local_and_pre_release_versions_count_by_their_numbers():
    assert row(replace(LAPTOP, versions={**VERSIONS, "torch": "2.13.0+cpu"}), "torch").status == "ok"
    assert row(replace(LAPTOP, versions={**VERSIONS, "torch": "2.14.0a0+git1"}), "torch").status == "ok"


def test_gpus_are_read_from_the_drivers_list_and_errors_are_not():
    listing = "Tesla T4, 15360 MiB, 7.5\nNVIDIA GeForce RTX 3090, 24576 MiB, 8.6\n"
    assert facts.parse_gpus(listing) == (Gpu("Tesla T4", 15.0, (7, 5)), Gpu("NVIDIA GeForce RTX 3090", 24.0, (8, 6)))
    assert facts.parse_gpus("Tesla K80, 11441 MiB") == (Gpu("Tesla K80", 11441 / 1024, None),)
    assert facts.parse_gpus("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.") == ()


def test_a_fake_nvidia_smi_is_believed_when_torch_sees_nothing(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\ncase "$1" in *compute_cap*) echo "Tesla V100, 16384 MiB, 7.0";; *) echo 535.1;; esac\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert facts.gpus_by_driver() == (Gpu("Tesla V100", 16.0, (7, 0)),)


def test_the_doctor_of_this_machine_prints_no_path_so_that_notebooks_can_store_it(capsys):
    doctor()
    printed = capsys.readouterr().out
    assert str(Path.home()) not in printed and sys.prefix not in printed
    assert len([line for line in printed.splitlines() if line[:4].strip() in ("ok", "warn", "fail")]) == 9


BROKEN_TORCH = """
import sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "torch" or name.startswith("torch."):
            raise OSError("libtorch_cpu.so: cannot open shared object file")
sys.meta_path.insert(0, Broken())
from labcore.cli.main import main
sys.exit(main(["doctor", "--json"]))
"""


def test_the_doctor_answers_where_torch_does_not_import():
    done = subprocess.run([sys.executable, "-c", BROKEN_TORCH], capture_output=True, text=True)
    report = json.loads(done.stdout)
    torch = next(row for row in report["rows"] if row["name"] == "torch")
    assert done.returncode == 1 and report["ok"] is False
    assert torch["status"] == "fail" and "libtorch_cpu.so" in torch["found"]
