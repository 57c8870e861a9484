"""Retry and caching policies of the tasks.

Nothing here is cached by Prefect: our own objects on the store say whether a shard is done, because a result cache
can outlive, or die before, what it describes.
"""

from __future__ import annotations

from typing import Any

from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun

from dflash.errors import ObjectNotFoundError, PreconditionError, StorageError


def is_storage_failure(_task: Any, _run: TaskRun, state: State[Any]) -> bool:
    """Only what passes by itself may be tried again as it is.

    A refusal or a lost race needs a person or a new plan; an object that is gone or was replaced stays so.
    """
    error = state.result(raise_on_failure=False)
    return isinstance(error, StorageError) and not isinstance(error, ObjectNotFoundError | PreconditionError)


# Store calls retry inside; these retries cover what outlasts them, such as a restarted server.
STORE_TASK: dict[str, Any] = {
    "cache_policy": NO_CACHE,
    "persist_result": False,
    "retries": 2,
    "retry_delay_seconds": [5, 30],
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": is_storage_failure,
}
# A shard that fails on its content fails again: no retries. The pool itself repeats a job whose process died.
COMPUTE_TASK: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False, "retries": 0}
