"""One output's text and end: the same however the tokens arrive and whenever the client reads."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.plan import TokenLogprobs
from scheduler.core.request import SamplingParams
from scheduler.output import Output, OutputDelta
from scheduler.outputs import EndReason, OutputEvent, OutputFinish, Submission
from scheduler.stop_strings import StopStrings
from scheduler.tokenizer import Tokenizer
from tests.services.fake_engine import EOS, TOKENIZER_FILES, text_ids

TOKENIZER = Tokenizer(TOKENIZER_FILES)
BYTES = {TOKENIZER.pieces.piece(i): i for i in range(256)}


def make_output(
    stop: Sequence[str] = (), *, include_stop: bool = False, prefix: str = "", prompt: str = "a", min_tokens: int = 0
) -> Output:
    sampling = SamplingParams(stop_token_ids=frozenset({EOS}), min_tokens=min_tokens)
    submission = Submission(tuple(text_ids(prompt)), 1, None, 100, sampling, 0, "", 60.0, "default")
    strings = StopStrings(stop) if stop else None
    return Output(0, submission, TOKENIZER.pieces, strings, include_stop=include_stop, prefix=prefix)


def feed(output: Output, batches: Sequence[Sequence[int]], reason: EndReason = EndReason.LENGTH) -> list[OutputDelta]:
    """What a client gets that reads after each batch; the engine obeys a found stop string a batch too late."""
    deltas, position = [], 0
    for batch in batches:
        output.take_in(OutputEvent(0, position, tuple(batch)))
        position += len(batch)
        if (delta := output.take_delta(1000)) is not None:
            deltas.append(delta)
    output.take_in(OutputEvent(0, position, finish=OutputFinish(reason, num_output_tokens=position)))
    if (delta := output.take_delta(1000)) is not None:
        deltas.append(delta)
    return deltas


def text(deltas: Sequence[OutputDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def tokens(deltas: Sequence[OutputDelta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


def ids(*words: str) -> list[list[int]]:
    return [text_ids(word) for word in words]


def test_nothing_of_a_stop_string_over_several_tokens_is_ever_sent() -> None:
    output = make_output(["DEFGHIJ"])
    deltas = feed(output, ids("a", "DEF", "G", "HI", "J", "world"))
    assert text(deltas) == "a"
    assert output.end is not None
    assert (output.end.reason, output.end.stop) == (EndReason.STOP, "DEFGHIJ")


def test_an_outputs_tokens_end_with_the_one_that_completed_the_stop_string() -> None:
    output = make_output(["DEFGHIJ"])
    batches = ids("a", "DEF", "G", "HI", "J", "world")
    deltas = feed(output, batches)
    assert tokens(deltas) == [token_id for batch in batches[:-1] for token_id in batch]
    assert output.end is not None
    assert output.end.num_output_tokens == len(tokens(deltas))


def test_text_is_cut_inside_the_token_that_completes_the_stop_string() -> None:
    output = make_output(["Pari"])
    assert text(feed(output, ids("a ", "Paris"))) == "a "
    assert output.end is not None
    assert output.end.num_output_tokens == 3


def test_a_stop_string_is_kept_where_wanted_but_nothing_after_it() -> None:
    assert text(feed(make_output(["Pari"], include_stop=True), ids("a ", "Paris", "world"))) == "a Pari"


def test_text_of_the_prompt_is_no_part_of_a_stop_string() -> None:
    output = make_output(["HelloDEF"], prompt="Hello", prefix="Hello")
    assert text(feed(output, ids("DEF", "G"))) == "HelloDEFG"


def test_text_of_the_first_min_tokens_tokens_is_no_part_of_a_stop_string() -> None:
    output = make_output(["G"], min_tokens=2)
    assert text(feed(output, ids("G", "G", "DEF", "G"))) == "GGDEF"


def test_held_back_text_is_sent_at_the_end() -> None:
    output = make_output(["DEFG"])
    assert text(feed(output, ids("a", "DEF"))) == "aDEF"
    assert output.end is not None
    assert output.end.reason is EndReason.LENGTH


def test_the_token_that_ended_the_output_is_named_and_has_no_text() -> None:
    output = make_output()
    deltas = feed(output, [*ids("Hello"), [EOS]], EndReason.STOP)
    assert (text(deltas), tokens(deltas)[-1]) == ("Hello", EOS)
    assert output.end is not None
    assert (output.end.stop_token_id, output.end.stop) == (EOS, None)


def test_the_text_of_a_stop_token_is_kept_where_wanted() -> None:
    output = make_output(include_stop=True)
    assert text(feed(output, [*ids("Hello"), [EOS]], EndReason.STOP)) == "Hello</s>"


def test_an_end_inside_a_character_keeps_all_earlier_text() -> None:
    pieces = [[BYTES[bytes([byte])]] for byte in "é😀".encode()[:4]]
    assert text(feed(make_output(), pieces)) == "é\ufffd"


def test_an_output_whose_stop_string_was_found_has_stopped_even_if_it_was_aborted_meanwhile() -> None:
    output = make_output(["G"])
    feed(output, ids("G"), EndReason.CANCELLED)
    assert output.end is not None
    assert output.end.reason is EndReason.STOP


def test_only_the_first_sight_of_a_stop_string_is_told() -> None:
    output = make_output(["G"])
    assert output.take_in(OutputEvent(0, 0, tuple(text_ids("G"))))
    assert not output.take_in(OutputEvent(0, 1, tuple(text_ids("G"))))


def test_a_merged_delta_is_cut_to_the_bound_and_its_text_comes_with_the_last_part() -> None:
    output = make_output()
    entries = tuple(TokenLogprobs(-float(i), 1, ()) for i in range(5))
    output.take_in(OutputEvent(0, 0, tuple(text_ids("GGGGG")), logprobs=entries))
    parts = [output.take_delta(2), output.take_delta(2), output.take_delta(2), output.take_delta(2)]
    assert [part and (part.first_position, len(part.token_ids), part.text) for part in parts] == [
        (0, 2, ""),
        (2, 2, ""),
        (4, 1, "GGGGG"),
        None,
    ]
    assert [entry.logprob for part in parts if part for entry in part.logprobs] == [0, -1, -2, -3, -4]


WORDS = st.lists(st.sampled_from(["a", "DEF", "G", "HI", "J", "é", "😀", "Paris", " "]), max_size=12)


@given(WORDS, st.lists(st.sampled_from(["DEFG", "GHI", "G", "é", "ris", "😀a", "J "]), max_size=3), st.data())
def test_how_tokens_arrive_makes_no_difference(words: list[str], stop: list[str], data: st.DataObject) -> None:
    flat = [token_id for batch in ids(*words) for token_id in batch]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(flat)), max_size=5)))
    batches = [flat[i:j] for i, j in zip([0, *cuts], [*cuts, len(flat)], strict=True)]
    one_by_one, in_batches = make_output(stop), make_output(stop)
    singly, together = feed(one_by_one, [[token_id] for token_id in flat]), feed(in_batches, batches)
    assert text(singly) == text(together)
    assert tokens(singly) == tokens(together)
    assert one_by_one.end is not None
    assert in_batches.end is not None
    assert one_by_one.end.stop == in_batches.end.stop
    assert one_by_one.end.num_output_tokens == in_batches.end.num_output_tokens
