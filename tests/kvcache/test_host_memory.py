"""Memory in a container: the limit of every control group counts, whatever psutil sees of the machine below it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from tiny_models import tiny

from labcore import LLM
from labcore.doctor import facts as machine
from labcore.kvcache import host_memory
from labcore.kvcache.host_memory import HostMemory
from labcore.kvcache.sizing import GIB, available_memory
from labcore.models import from_model

V2 = "31 23 0:28 {top} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 31 0:32 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"


class System:
    """A machine of 32 GiB, 22 of them free, with the files in which Linux tells of its control groups."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        seen = SimpleNamespace(total=32 * GIB, available=22 * GIB)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: seen)

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def process(self, group: str, mount: str, top: str = "/") -> None:
        """This process is in `group`; the tree is mounted from the group `top` on."""
        self.write("proc/self/cgroup", group)
        self.write("proc/self/mountinfo", "23 1 0:20 / / rw - ext4 /dev/vda rw\n" + mount.format(top=top))

    def group(self, path: str, limit: object, used: int = 0, idle: int = 0) -> None:
        self.write(f"sys/fs/cgroup/{path}/memory.max", limit)
        self.write(f"sys/fs/cgroup/{path}/memory.current", used)
        self.write(f"sys/fs/cgroup/{path}/memory.stat", f"anon {used}\ninactive_file {idle}")

    def memory(self) -> HostMemory:
        return host_memory.host_memory(self.root)


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> System:
    return System(tmp_path, monkeypatch)


def test_memory_without_control_groups_is_the_machines(system):
    """Case: macOS, Windows."""
    assert system.memory() == HostMemory(32 * GIB, 22 * GIB)


def test_memory_of_a_container_is_its_limit_less_what_it_uses(system):
    """A container sees its own group as the root of the tree."""
    system.process("0::/", V2)
    system.group("", limit=GIB, used=GIB // 4)
    assert system.memory() == HostMemory(GIB, GIB * 3 // 4)


def test_memory_that_holds_idle_file_cache_is_free(system):
    """Case: a model's files, read and in the cache, counted as taken."""
    system.process("0::/", V2)
    system.group("", limit=4 * GIB, used=3 * GIB, idle=2 * GIB)
    assert system.memory().available == 3 * GIB


def test_memory_limit_of_a_group_above_counts(system):
    """Case: a pod's limit, or a batch job's, above a group that says max; the pod's other groups use its memory, too."""
    system.process("0::/pod/run/step", V2)
    system.group("pod", limit=8 * GIB, used=6 * GIB)
    system.group("pod/run", limit="max", used=GIB)
    system.group("pod/run/step", limit=16 * GIB, used=GIB)
    assert system.memory() == HostMemory(8 * GIB, 2 * GIB)


def test_memory_limit_of_another_group_does_not_count(system):
    system.process("0::/mine", V2)
    system.group("mine", limit="max", used=GIB)
    system.group("other", limit=GIB, used=0)
    assert system.memory() == HostMemory(32 * GIB, 22 * GIB)


@pytest.mark.parametrize("top, group", [("/docker/4f", "/docker/4f"), ("/docker/4f", "/docker/4f/inner"), ("/", "/../9c")])
def test_memory_group_is_found_where_the_tree_is_mounted_from_a_group_on(system, top, group):
    system.process(f"0::{group}", V2, top)
    system.group("", limit=2 * GIB, used=GIB)
    assert system.memory() == HostMemory(2 * GIB, GIB)


def test_memory_limit_of_version_1_counts(system):
    system.process("9:name=systemd:/\n4:cpu,memory:/docker/4f\n0::/", V1 + "\n" + V2.format(top="/"), "/docker/4f")
    for name, number in (("limit_in_bytes", 3 * GIB), ("usage_in_bytes", 2 * GIB)):
        system.write(f"sys/fs/cgroup/memory/memory.{name}", number)
    system.write("sys/fs/cgroup/memory/memory.stat", f"inactive_file 1\ntotal_inactive_file {GIB // 2}")
    assert system.memory() == HostMemory(3 * GIB, 3 * GIB // 2)


def test_memory_of_version_1_without_a_limit_is_the_machines(system):
    system.process("4:memory:/", V1)
    system.write("sys/fs/cgroup/memory/memory.limit_in_bytes", 2**63 - 4096)
    system.write("sys/fs/cgroup/memory/memory.usage_in_bytes", GIB)
    assert system.memory() == HostMemory(32 * GIB, 22 * GIB)


def test_memory_of_a_group_beyond_its_limit_is_none_at_all(system):
    system.process("0::/", V2)
    system.group("", limit=GIB, used=2 * GIB)
    assert system.memory() == HostMemory(GIB, 0)


def test_memory_is_the_same_to_the_engine_and_to_the_doctor(monkeypatch):
    """Case: the doctor knew the container's limit, the engine took a pool of four times as much, and was killed."""
    monkeypatch.setattr(host_memory, "host_memory", lambda: HostMemory(GIB, GIB // 2))
    monkeypatch.setattr("labcore.kvcache.sizing.host_memory", host_memory.host_memory)
    assert machine.memory() == (1.0, 0.5)
    assert available_memory(torch.device("cpu")) == GIB // 2
    with pytest.raises(ValueError, match=r"takes 4\.0 GiB, 0\.5 are free: lower num_blocks, kv_cache_memory_gb"):
        LLM(from_model(tiny("llama")), kv_cache_memory_gb=4, max_num_seqs=100_000)


def test_memory_of_this_very_machine_can_be_told():
    found = host_memory.host_memory()
    assert 0 < found.available <= found.total
