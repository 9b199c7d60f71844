"""The one place where errors become words for a person and an exit status.

A `FarcastError` already is one sentence of what is wrong and one of what to do. Errors of the
operating system that a user can put right (no space, no permission) are put the same way.
Anything else is a bug and keeps its traceback.
"""

import errno
import sys
from collections.abc import Callable
from typing import NoReturn

from farcast.errors import FarcastError

DEBUG_OPTION = "--debug"
_EXIT_STORE_FULL = 4
_EXIT_USER = 2

_ADVICE = {
    errno.ENOSPC: ("there is no space left", "Free some space and run the same command again."),
    errno.EDQUOT: ("the disk quota is used up", "Free some space and run the same command again."),
    errno.EACCES: ("permission was denied", "Choose another path or change its permissions."),
    errno.EPERM: ("it is not permitted", "Choose another path or change its permissions."),
    errno.EROFS: ("the file system is read-only", "Choose another path."),
    errno.ENOTDIR: ("a part of the path is not a folder", "Choose another path."),
    errno.EISDIR: ("it is a folder, a file was expected", "Choose another path."),
    errno.EEXIST: ("it exists already", "Choose another path."),
    errno.ENOENT: ("it does not exist", "Check the path."),
}


def run(command: Callable[[list[str]], None], arguments: list[str]) -> NoReturn:
    """Run a command line and end the process with its status."""
    debug = DEBUG_OPTION in arguments
    try:
        command([argument for argument in arguments if argument != DEBUG_OPTION])
    except FarcastError as error:
        if debug:
            raise
        fail(str(error), error.exit_code)
    except OSError as error:
        if debug or error.errno not in _ADVICE:
            raise
        fail(describe(error), _exit_code(error))
    sys.exit(0)


def describe(error: OSError) -> str:
    """One sentence of what the system refused and one of what to do."""
    what, advice = _ADVICE[error.errno or 0]
    where = f"{error.filename}: " if error.filename else "A file could not be used: "
    return f"{where}{what}. {advice}"


def fail(message: str, status: int) -> NoReturn:
    print(f"farcast: {message}", file=sys.stderr)  # a supervisor looks for this prefix
    sys.exit(status)


def _exit_code(error: OSError) -> int:
    return _EXIT_STORE_FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else _EXIT_USER
