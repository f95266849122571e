"""The tasks of the running event loop."""

from __future__ import annotations

import asyncio


def running_tasks() -> list[str]:
    """Names of their coroutines, without those that `wait_for` makes around an event's wait: they
    come and go with every time limit."""
    names = (str(task.get_coro()) for task in asyncio.all_tasks())
    return sorted(name.partition(" at ")[0] for name in names if "Event.wait" not in name)
