"""Tiny tokenizers, built from nothing: one byte-level as GPT-2's, one with byte fallback as Llama 2's, one of words."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

WORDS = ("Hello", "world", "Paris", "the", "a", "DEF", "G", "HI", "J")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level(template: str | None = None, **config: object) -> dict[str, bytes]:
    """All 256 bytes, a few words with and without a blank before them, and <s>, </s>, <|end|> as special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate(alphabet)}
    merges = []
    for start in ("Ġ", ""):
        for word in WORDS:
            left = start or word[0]
            for character in word[0 if start else 1 :]:
                merges.append((left, character))
                left += character
                vocab.setdefault(left, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(dict.fromkeys(merges))))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|end|>"])
    return _files(tokenizer, template, config)


def llama_style(template: str | None = None, **config: object) -> dict[str, bytes]:
    """Blanks as ▁, 256 byte tokens, and a post-processor that puts <s> first."""
    vocab: dict[str, int] = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for piece in ("▁", *(mark + word for word in WORDS for mark in ("", "▁")), *"abcdefghijklmnopqrstuvwxyzé你"):
        vocab.setdefault(piece, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _files(tokenizer, template, config)


def metaspace() -> dict[str, bytes]:
    """Words with ▁, decoded by Metaspace alone."""
    vocab = {piece: i for i, piece in enumerate(["▁", *(f"▁{word}" for word in WORDS), *WORDS, "x▁y"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _files(tokenizer, None, {})


def words() -> dict[str, bytes]:
    """Whole words, no decoder: joined by blanks."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return _files(tokenizer, None, {})


def reference(files: Mapping[str, bytes]) -> Tokenizer:
    """The library's own view of the same files, to compare with."""
    return Tokenizer.from_buffer(files["tokenizer.json"])


def _files(tokenizer: Tokenizer, template: str | None, config: Mapping[str, object]) -> dict[str, bytes]:
    files = {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps({"bos_token": "<s>", "eos_token": "</s>", **config}).encode(),
    }
    if template is not None:
        files["chat_template.jinja"] = template.encode()
    return files
