"""The null recorder: what an engine calls when nothing is to be recorded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class NullRecorder:
    """Accepts the engine's six calls (see `labcore.recorder.recorder`) and records nothing."""

    def added(self, request: Any) -> None: ...

    def begin_step(self, step: int | None = None) -> None: ...

    def scheduled(self, plan: Any, requests: Iterable[Any]) -> None: ...

    def sampled(self, request: Any, token_id: int) -> None: ...

    def finished(self, request: Any) -> None: ...

    def end_step(self, pool: Any = None) -> None: ...
