"""Text as it grows: always a part of the full decoding, and all of it at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer

from scheduler.detokenizer import Detokenizer, UnknownDecoder, prompt_text
from scheduler.tokenizer import Tokenizer
from tests.services.tokenizers_for_tests import byte_level, llama_style, metaspace, reference, words

KINDS: dict[str, Callable[[], dict[str, bytes]]] = {
    "byte_level": byte_level,
    "llama_style": llama_style,
    "metaspace": metaspace,
    "words": words,
}


def deltas(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    """What each token brings, and last what is left at the end."""
    detokenizer = Detokenizer(tokenizer.pieces, prompt or [])
    return [*map(detokenizer.push, ids), detokenizer.finish()]


def ids_of(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One id for each byte, whatever kind of tokenizer it is."""
    single = {tokenizer.pieces.piece(i): i for i in range(400)}
    return [single[bytes([byte])] for byte in data]


def drawn_ids(tokenizer: Tokenizer, library: FastTokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids, some of no token; where bytes are a fallback, their runs are texts (see the module's docstring)."""
    any_id = st.integers(0, library.get_vocab_size() + 3)
    if "ByteFallback" not in library.to_str():
        return st.lists(any_id, max_size=40)
    other = any_id.filter(lambda i: not isinstance(tokenizer.pieces.piece(i), bytes)).map(lambda i: [i])
    text = st.text(max_size=3).map(lambda text: ids_of(tokenizer, text.encode()))
    return st.lists(other | text, max_size=20).map(lambda parts: [i for part in parts for i in part])


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> tuple[Tokenizer, FastTokenizer]:
    files = KINDS[request.param]()
    return Tokenizer(files), reference(files)


@pytest.fixture(scope="module")
def smollm2(smollm2_files: Mapping[str, bytes]) -> tuple[Tokenizer, FastTokenizer]:
    return Tokenizer(smollm2_files), reference(smollm2_files)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_joined_deltas_equal_the_full_decoding(pair: tuple[Tokenizer, FastTokenizer], data: st.DataObject) -> None:
    tokenizer, library = pair
    ids = data.draw(drawn_ids(tokenizer, library))
    for skip in (True, False):
        detokenizer = Detokenizer(tokenizer.pieces, skip_special_tokens=skip)
        text = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
        assert text == library.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30), cut=st.integers(0, 200))
def test_prompt_and_output_join_to_the_full_decoding(
    pair: tuple[Tokenizer, FastTokenizer], text: str, cut: int
) -> None:
    tokenizer, library = pair
    ids = library.encode(text, add_special_tokens=False).ids
    prompt, output = ids[: cut % (len(ids) + 1)], ids[cut % (len(ids) + 1) :]
    joined = prompt_text(tokenizer.pieces, prompt) + "".join(deltas(tokenizer, output, prompt))
    assert joined == library.decode(ids, skip_special_tokens=True)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_joined_deltas_equal_the_full_decoding_of_the_demo_model(
    smollm2: tuple[Tokenizer, FastTokenizer], data: st.DataObject
) -> None:
    tokenizer, library = smollm2
    ids = data.draw(st.lists(st.integers(0, library.get_vocab_size() - 1), max_size=40))
    for skip in (True, False):
        detokenizer = Detokenizer(tokenizer.pieces, skip_special_tokens=skip)
        text = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
        assert text == library.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("make", [byte_level, llama_style])
def test_a_character_of_several_bytes_comes_whole(make: Callable[[], dict[str, bytes]]) -> None:
    tokenizer = Tokenizer(make())
    parts = deltas(tokenizer, ids_of(tokenizer, "😀".encode()))
    assert "".join(parts) == "😀"
    assert [part for part in parts if part] == ["😀"]


@pytest.mark.parametrize("make", [byte_level, llama_style])
def test_an_end_inside_a_character_keeps_all_earlier_text(make: Callable[[], dict[str, bytes]]) -> None:
    tokenizer = Tokenizer(make())
    word = tokenizer.encode("Paris", add_special_tokens=False)
    ids = [*word, *ids_of(tokenizer, "é😀".encode()[:4])]
    text = "".join(deltas(tokenizer, ids))
    assert text == "Parisé\ufffd"


def test_good_characters_stay_where_a_run_of_byte_tokens_holds_a_bad_one() -> None:
    tokenizer = Tokenizer(llama_style())
    assert "".join(deltas(tokenizer, ids_of(tokenizer, "é".encode() + b"\xff" + b"a"))) == "é\ufffda"


@pytest.mark.parametrize("make", [byte_level, llama_style])
def test_the_first_delta_after_a_prompt_that_ends_inside_a_character_holds_only_new_text(
    make: Callable[[], dict[str, bytes]],
) -> None:
    tokenizer = Tokenizer(make())
    data = "né😀".encode()
    prompt, output = ids_of(tokenizer, data[:5]), ids_of(tokenizer, data[5:])
    assert "".join(deltas(tokenizer, output, prompt)) == "😀"
    assert prompt_text(tokenizer.pieces, prompt) == "né"


def test_a_blank_before_the_first_word_stays_after_a_prompt() -> None:
    tokenizer = Tokenizer(llama_style())
    world = reference(llama_style()).token_to_id("▁world")
    assert "".join(deltas(tokenizer, [world])) == "world"
    assert "".join(deltas(tokenizer, [world], [world])) == " world"


def test_special_tokens_have_no_text() -> None:
    tokenizer = Tokenizer(byte_level())
    ids = tokenizer.encode("Hello</s>", add_special_tokens=False)
    assert "".join(deltas(tokenizer, ids)) == "Hello"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "Hello</s>"


def test_a_token_on_its_own_is_text_where_it_can_be() -> None:
    tokenizer = Tokenizer(llama_style())
    library = reference(llama_style())
    assert tokenizer.pieces.text(library.token_to_id("▁world")) == " world"
    assert tokenizer.pieces.text(library.token_to_id("<0xE4>")) == "\ufffd"
    assert tokenizer.pieces.text(library.token_to_id("<0x41>")) == "A"
    assert tokenizer.pieces.text(library.token_to_id("<s>")) == "<s>"
    assert tokenizer.pieces.text(10**6) == ""


def test_a_decoder_that_is_not_known_is_named() -> None:
    files = byte_level()
    spec = files["tokenizer.json"].replace(b'"decoder":{"type":"ByteLevel"', b'"decoder":{"type":"WordPiece"')
    with pytest.raises(UnknownDecoder, match="WordPiece"):
        Tokenizer({**files, "tokenizer.json": spec.replace(b'"use_regex":true}', b'"prefix":"##","cleanup":true}')})
