"""What every test shares: no network, and one fetched model for those that need the real one."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# A shell that starts us in the background has us ignore Ctrl-C, and those that we start as well: some tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Before anything imports huggingface_hub: a test that would reach for the network fails at once, here as on a train.
os.environ["HF_HUB_OFFLINE"] = "1"
# Workers side by side share the cores, with the kernels and commands that they start; OpenMP would give all to each.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    share = max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    os.environ.setdefault("OMP_NUM_THREADS", str(share))
# Notebooks run under nbval keep a learner's progress in memory, so that their outputs are the same on every machine.
os.environ["LABCORE_PROGRESS"] = "off"


# The same examples in every run: a test that passes here passes everywhere. LABCORE_EXPLORE=1 looks for new ones.
settings.register_profile("labcore", deadline=None, derandomize=not os.environ.get("LABCORE_EXPLORE"))
settings.load_profile("labcore")


@pytest.fixture(autouse=True)
def one_thread_for_tiny_models(request: pytest.FixtureRequest) -> Iterator[None]:
    """A tiny model's products are shorter than the hand-over between threads: one is faster, on a busy machine by far."""
    torch = sys.modules.get("torch")
    if torch is None or request.node.get_closest_marker("model"):
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the default model; fetched, if the cache has none (93 MB, once)."""
    from labcore.models import fetch_default

    return fetch_default()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that uses the real model, so that none is forgotten when `make test-fast` leaves them out."""
    for item in items:
        if "smollm2" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.model)
