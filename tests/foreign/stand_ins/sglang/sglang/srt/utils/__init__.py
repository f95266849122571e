"""What SGLang's tests end a server with."""

from __future__ import annotations

from typing import Any

from sglang.test.test_utils import stop


def kill_process_tree(pid: int, *_: Any, **__: Any) -> None:
    stop(pid)
