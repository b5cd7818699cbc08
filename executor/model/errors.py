"""What can be wrong with a model that a user names: it is not there, of an unknown kind, broken, or has no place."""

from __future__ import annotations

import errno
from pathlib import Path

# What a file system answers that takes no more, or nothing from us.
NO_PLACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM})


class ModelError(Exception):
    """The model cannot be served; the message says why."""


class ModelNotFound(ModelError):
    """No model answers to the name; the message lists what was tried."""


class UnsupportedModel(ModelError):
    """The model is whole, but of a kind that the decoder does not compute."""


class BrokenModel(ModelError):
    """Files of the model are missing, unreadable or do not fit its configuration."""


class UnusableCache(ModelError):
    """The file system does not let the cache be written; the message says where, why, and what to do."""

    def __init__(self, directory: Path, error: OSError) -> None:
        reason = "Not a directory" if isinstance(error, FileExistsError) else error.strerror or str(error)
        super().__init__(f"cannot write the cache {directory}: {reason}; choose another with --cache-dir")
