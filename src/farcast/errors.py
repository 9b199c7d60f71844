"""Every error farcast raises on purpose, in one tree.

A class exists where a caller would act differently. Each says whether the same
call may succeed later (`retry`) and the exit status a command ends with.
A message is one sentence of what is wrong and one of what to do. It never holds
a credential, a token or a signed URL.

    FarcastError
    ├── ConfigError                  the user's input: fix it and run again
    │   └── MissingDependencyError   an extra is not installed
    ├── FormatError                  bytes that do not follow the format
    │   └── LimitError               bytes that ask for more than the format allows
    ├── IntegrityError               bytes that are not what their digest says
    │   └── SignatureError           not signed by a key that the reader trusts
    ├── StoreError
    │   ├── StoreUnavailableError    (retry) network, throttling, server fault
    │   ├── StoreAccessError         credentials or permissions
    │   ├── StoreFullError           no space or quota left
    │   ├── StoreUnsupportedError    the store lacks what farcast needs (conditional create)
    │   ├── InvalidKeyError          a key that no store is asked for (traversal, odd characters)
    │   ├── ObjectNotFoundError      no object under that key
    │   └── ObjectExistsError        a conditional create lost: the key was taken
    ├── LineageError
    │   ├── RunMismatchError         the store, folder or record belongs to another run
    │   ├── UnknownVersionError      that version was never published, or is gone
    │   ├── VersionConflictError     another publisher wrote that version first
    │   └── FreshnessError           (retry) the store may be showing an old state of the run
    │       ├── RollbackError        older than what was seen here, or than what is signed
    │       └── FreezeError          nothing says that it is recent: the signed timestamp ran out
    ├── PoisonError                  weights or samples that would ruin the run
    ├── RankError                    (retry) another rank of this publisher failed: nothing was
    │   │                            published, and no rank's baseline moved
    │   └── RankLostError            a rank did not answer in time: restart all of them
    ├── TargetError
    │   ├── TensorMismatchError      names, shapes or dtypes differ; nothing was written
    │   ├── TargetChangedError       the target moved between reading and writing
    │   ├── TargetFullError          no space left where the target lives; the old version stands
    │   ├── TargetUncertainError     a commit failed and could not be undone: replace the engine
    │   └── EngineError
    │       ├── EngineUnreachableError (retry) the engine's server did not answer
    │       └── EngineRefusedError   the engine answered, but not that it did what was asked
    ├── TrajectoryError
    │   ├── BacklogFullError         (retry) the trainer is behind: wait
    │   ├── TrajectoryTooLargeError  one trajectory is over the limit
    │   ├── BrokenBatchError         a batch in the store cannot be read: skip it, or stop
    │   └── ScoringError             an environment failed at an answer: that episode is aborted
    ├── ProcessFailedError           a process of the run ended when it should not have
    └── StoppedAtOnceError           a second Ctrl-C: the message says what was left
"""


class FarcastError(Exception):
    """Base of all of farcast's own errors."""

    retry: bool = False
    exit_code: int = 1


class ConfigError(FarcastError):
    exit_code = 2


class MissingDependencyError(ConfigError):
    """An optional dependency is absent; the message names the extra to install."""


class FormatError(FarcastError):
    exit_code = 3


class LimitError(FormatError):
    """A count or length read from bytes is beyond its stated bound."""


class IntegrityError(FarcastError):
    exit_code = 3


class SignatureError(IntegrityError):
    pass


class StoreError(FarcastError):
    exit_code = 4


class StoreUnavailableError(StoreError):
    retry = True


class StoreAccessError(StoreError):
    pass


class StoreFullError(StoreError):
    pass


class StoreUnsupportedError(StoreError):
    pass


class InvalidKeyError(StoreError):
    """Raised before any I/O: the key could leave the store, or is not portable between stores."""


class ObjectNotFoundError(StoreError):
    pass


class ObjectExistsError(StoreError):
    pass


class LineageError(FarcastError):
    exit_code = 5


class RunMismatchError(LineageError):
    pass


class UnknownVersionError(LineageError):
    pass


class VersionConflictError(LineageError):
    pass


class FreshnessError(LineageError):
    """What the target holds was verified and goes on serving; the store's word on what is newest
    is not believed. A later look may be."""

    retry = True


class RollbackError(FreshnessError):
    pass


class FreezeError(FreshnessError):
    pass


class PoisonError(FarcastError):
    exit_code = 6


class RankError(FarcastError):
    """Raised on the ranks that did their part; the rank that failed raises its own error."""

    retry = True
    exit_code = 9


class RankLostError(RankError):
    retry = False


class TargetError(FarcastError):
    exit_code = 7


class TensorMismatchError(TargetError):
    pass


class TargetChangedError(TargetError):
    retry = True


class TargetFullError(TargetError):
    pass


class TargetUncertainError(TargetError):
    pass


class EngineError(TargetError):
    """An engine that runs as a server of its own; what it holds is not known from this alone."""


class EngineUnreachableError(EngineError):
    retry = True


class EngineRefusedError(EngineError):
    pass


class TrajectoryError(FarcastError):
    exit_code = 8


class BacklogFullError(TrajectoryError):
    retry = True


class TrajectoryTooLargeError(TrajectoryError):
    pass


class BrokenBatchError(TrajectoryError):
    """The batch `sequence` of `worker_id` is damaged, missing or not what its key says; the
    cause says which. Nothing was taken from it."""

    def __init__(self, message: str, *, worker_id: str, sequence: int) -> None:
        super().__init__(message)
        self.worker_id = worker_id
        self.sequence = sequence


class ScoringError(TrajectoryError):
    pass


class ProcessFailedError(FarcastError):
    """Carries the exit status of the process that failed, where it had one."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class StoppedAtOnceError(FarcastError):
    exit_code = 130
