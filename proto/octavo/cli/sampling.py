"""The flags of a command that say how to run a request, as its arguments; what is absent is left to the model."""

from __future__ import annotations

from argparse import Namespace
from typing import cast

from octavo.client import GenerateOptions

_NAMES = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "stop",
    "ignore_eos",
    "n",
    "beam_width",
    "logprobs",
    "tenant",
    "priority",
)


def sampling_of(options: Namespace) -> GenerateOptions:
    """Of the flags that the command has and the user gave."""
    values = {name: getattr(options, name, None) for name in _NAMES}
    return cast(GenerateOptions, {name: value for name, value in values.items() if _is_given(value)})


def _is_given(value: object) -> bool:
    """0 is a value."""
    return value is not None and value is not False and value != []
