"""What can be wrong with a model that a user names: it is not there, of an unknown kind, or broken."""

from __future__ import annotations


class ModelError(Exception):
    """The model cannot be served; the message says why."""


class ModelNotFound(ModelError):
    """No model answers to the name; the message lists what was tried."""


class UnsupportedModel(ModelError):
    """The model is whole, but of a kind that the decoder does not compute."""


class BrokenModel(ModelError):
    """Files of the model are missing, unreadable or do not fit its configuration."""
