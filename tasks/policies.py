"""Retry and caching policies of the tasks.

Nothing here is cached by Prefect: our own objects on the store say whether a shard is done, because a result cache
can outlive, or die before, what it describes.
"""

from __future__ import annotations

from typing import Any

from prefect.cache_policies import NO_CACHE

# Store calls retry inside; these retries cover what outlasts them, such as a restarted server.
STORE_TASK: dict[str, Any] = {
    "cache_policy": NO_CACHE,
    "persist_result": False,
    "retries": 2,
    "retry_delay_seconds": [5, 30],
    "retry_jitter_factor": 0.5,
}
# A shard that fails on its content fails again: no retries. The pool itself repeats a job whose process died.
COMPUTE_TASK: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False, "retries": 0}
