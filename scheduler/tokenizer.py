"""Turns texts and conversations into token ids, with the files that the executors hand out.

One BOS, whoever adds it: the tokenizer's post-processor, its configuration, or the chat template. Conversations are
rendered in a sandbox, since a template is code from a model's author; what goes wrong there is the caller's to know.
Decoding is in detokenizer.py; nothing here needs transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer as FastTokenizer

from scheduler.chat_template import ChatTemplate, ChatTemplateError, Message
from scheduler.detokenizer import Detokenizer, Pieces, UnknownDecoder

# What an executor sends, the last two only where the model has them.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

# Names of special tokens in tokenizer_config.json that templates use as variables.
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


MAX_SHRINKING = 4  # a normalizer may leave so much less of a text (NFKC: 4 bytes to 1)


class TokenizerError(Exception):
    """The tokenizer's files cannot be used; the message says which and why."""


class Tokenizer:
    """Thread-safe: encoding long texts may run beside the event loop."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """`files` by name: tokenizer.json, and where they exist tokenizer_config.json and chat_template.jinja.

        Raises TokenizerError or UnknownDecoder, whatever the files hold.
        """
        if "tokenizer.json" not in files:
            raise TokenizerError("the executor sent no tokenizer.json")
        try:
            self._read(files)
        except UnknownDecoder:
            raise
        except Exception as error:  # tokenizers raises plain Exception, and a file may hold anything
            raise TokenizerError(f"the tokenizer's files cannot be read: {error}") from error

    def _read(self, files: Mapping[str, bytes]) -> None:
        spec = json.loads(files["tokenizer.json"])
        self._tokenizer = FastTokenizer.from_buffer(files["tokenizer.json"])
        config = json.loads(files.get("tokenizer_config.json", b"{}"))
        if not isinstance(config, dict):
            raise TokenizerError("tokenizer_config.json holds no JSON object")
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special_tokens = _special_tokens(config)
        self._bos_id = self._token_id(self._special_tokens.get("bos_token"))
        self._adds_bos = self._bos_id is not None and (
            bool(config.get("add_bos_token")) or self._tokenizer.encode("").ids[:1] == [self._bos_id]
        )
        self._template = _template(files, config)
        self._longest_piece = max(len(piece.encode()) for piece in self._tokenizer.get_vocab())
        if spec.get("normalizer"):
            self._longest_piece *= MAX_SHRINKING
        special = [token["id"] for token in spec.get("added_tokens", ()) if token.get("special")]
        self.pieces = Pieces(spec.get("decoder"), self._tokenizer.id_to_token, special)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def max_text_bytes(self, num_tokens: int) -> int:
        """A text of more bytes of UTF-8 has more tokens than that, whatever it says."""
        return num_tokens * self._longest_piece

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """With special tokens: exactly one BOS, where the model has one, even if the text begins with it."""
        # A batch of one: unlike `encode` it leaves the interpreter free for other threads.
        ids = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        return self._with_one_bos(ids) if add_special_tokens else ids

    def encode_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Raises ChatTemplateError."""
        rendered = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        return self._with_one_bos(self.encode(rendered, add_special_tokens=False))

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        if self._template is None:
            raise ChatTemplateError("the model has no chat template")
        return self._template.render(messages, self._special_tokens, add_generation_prompt=add_generation_prompt)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        detokenizer = Detokenizer(self.pieces, skip_special_tokens=skip_special_tokens)
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.finish()

    def _with_one_bos(self, ids: list[int]) -> list[int]:
        if not self._adds_bos or self._bos_id is None:
            return ids
        start = 0
        while start < len(ids) and ids[start] == self._bos_id:
            start += 1
        return [self._bos_id, *ids[start:]]

    def _token_id(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """A special token is written as a string or as an object with its content."""
    tokens = {}
    for name in SPECIAL_TOKEN_NAMES:
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            tokens[name] = token
    return tokens


def _template(files: Mapping[str, bytes], config: Mapping[str, object]) -> ChatTemplate | None:
    """The file wins over the configuration, which holds one template or a list of named ones."""
    if "chat_template.jinja" in files:
        return ChatTemplate(files["chat_template.jinja"].decode())
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return ChatTemplate(template) if isinstance(template, str) else None
