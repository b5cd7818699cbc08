"""Renders a conversation with a model's chat template, as Hugging Face's templates expect to be rendered.

The template comes with the model and the messages come from clients, so it runs in jinja2's immutable sandbox. Whatever
fails there, on purpose (`raise_exception`) or not, becomes one ChatTemplateError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(Exception):
    """The template refuses the conversation, or cannot render it."""


class Message(NamedTuple):
    role: str
    content: str


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks an assistant's words for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML, which a prompt must not have."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """One template, compiled at its first conversation: a broken one must not keep the model from being served.
    Thread-safe; two first conversations at once both compile it."""

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._environment = environment
        self._source = source
        self._compiled: Template | None = None

    def render(
        self, messages: Sequence[Message], special_tokens: Mapping[str, str], *, add_generation_prompt: bool
    ) -> str:
        """Raises ChatTemplateError."""
        try:
            if self._compiled is None:
                self._compiled = self._environment.from_string(self._source)
            return self._compiled.render(
                messages=[message._asdict() for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **special_tokens,
            )
        except Exception as error:  # a template is code: any error is possible, all are about this conversation
            raise ChatTemplateError(f"the chat template cannot render this conversation: {error}") from error
