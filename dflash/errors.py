"""The one exception tree of the project.

```
DflashError                     base; exit code 1
 ├─ UsageError                  a parameter, URI or config value can't be used; exit code 2
 ├─ RecordError                 one record can't be used: carries a reason code; never ends a run by itself
 ├─ StorageError                the object store or the disk
 │   ├─ ObjectNotFoundError     the key does not exist
 │   ├─ PreconditionError       a conditional write lost (If-Match, If-None-Match)
 │   ├─ IntegrityError          bytes differ from the size or digest that travelled separately
 │   └─ ConditionalWriteError   the store does not enforce conditional writes, so nothing may be published
 ├─ TokenizerError              the tokenizer or its template can't be trusted
 ├─ DatasetError                a dataset root, manifest or shard is not what it should be
 │   ├─ DamagedDatasetError     re-reading found differences from the manifest
 │   └─ IncompatibleError       two datasets or versions can't be put together
 ├─ GateError                   the quality gate stopped the batch; exit code 3
 ├─ PublishConflictError        another publisher won; exit code 4
 ├─ ShardFailedError            shards of a run failed; names them
 ├─ ChildRunError               a flow run that another one started and waits for did not complete
 ├─ ServiceError                an embedded server did not start, stop or answer
 ├─ ModelError                  a target or drafter can't be loaded or used
 └─ TrainingError               a training run has to stop
     ├─ MemoryPlanError         the plan doesn't fit the device
     └─ PeerLostError           another rank of the run is gone
```

Every message says what failed, where, what was expected, what was found, and what to do.
"""

from __future__ import annotations


class DflashError(Exception):
    """Base of all errors that the project raises on purpose.

    Attributes:
        exit_code: what the command line returns for it.
    """

    exit_code: int = 1


class UsageError(DflashError):
    """A parameter, URI or configuration value can't be used."""

    exit_code = 2


class RecordError(DflashError):
    """One completion record can't be used.

    Attributes:
        reason: a code such as `empty_response`, counted in the reject report.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message

    def __reduce__(self) -> tuple[type[RecordError], tuple[str, str]]:
        """Pickle by the two arguments, so that the error crosses process boundaries."""
        return (type(self), (self.reason, self.message))


class StorageError(DflashError):
    """The object store or the disk failed."""


class ObjectNotFoundError(StorageError):
    """No object has this key."""


class PreconditionError(StorageError):
    """A conditional write lost: the object exists already, or has another ETag."""


class IntegrityError(StorageError):
    """The bytes differ from the size or digest that travelled separately."""


class ConditionalWriteError(StorageError):
    """The store doesn't enforce conditional writes, so publishing there could lose data."""


class TokenizerError(DflashError):
    """The tokenizer or its chat template can't be trusted to give the target's ids."""


class DatasetError(DflashError):
    """A dataset root, manifest or shard is not what it should be."""


class DamagedDatasetError(DatasetError):
    """Re-reading found differences from the manifest."""


class IncompatibleError(DatasetError):
    """Two datasets or versions can't be put together."""


class GateError(DflashError):
    """The quality gate stopped the batch; nothing was published."""

    exit_code = 3


class PublishConflictError(DflashError):
    """Another publisher replaced the pointer first."""

    exit_code = 4


class ShardFailedError(DflashError):
    """One or more shards of a run failed; the message names each with its cause."""


class ChildRunError(DflashError):
    """A flow run that another one started and waits for did not complete."""


class ServiceError(DflashError):
    """An embedded server did not start, stop or answer."""


class ModelError(DflashError):
    """A target or drafter can't be loaded or used."""


class TrainingError(DflashError):
    """A training run has to stop; the last good checkpoint is kept."""


class MemoryPlanError(TrainingError):
    """The planned run doesn't fit the device."""


class PeerLostError(TrainingError):
    """Another rank of the run died, ended early or fell silent."""
