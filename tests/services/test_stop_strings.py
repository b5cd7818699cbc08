"""Stop strings: nothing of one is ever returned, and where the text was cut into parts makes no difference."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.stop_strings import StopScanner, StopStrings


def scan(stop: list[str], parts: list[str]) -> tuple[list[str], str | None]:
    """The text returned for each part until a stop string was found, and that string."""
    scanner = StopScanner(StopStrings(stop))
    texts = []
    for part in parts:
        scanned = scanner.push(part)
        texts.append(scanned.text)
        if scanned.stop is not None:
            return texts, scanned.stop
    return [*texts, scanner.finish()], None


def test_nothing_of_a_stop_string_that_arrives_in_parts_is_returned() -> None:
    assert scan(["DEFGHIJ"], ["abc", "DEF", "G", "HI", "J"]) == (["abc", "", "", "", ""], "DEFGHIJ")


def test_text_is_cut_inside_a_part() -> None:
    assert scan(["Pari"], ["I love ", "Paris"]) == (["I love ", ""], "Pari")
    assert scan(["ri"], ["Paris"]) == (["Pa"], "ri")


def test_what_became_no_stop_string_is_returned() -> None:
    assert scan(["END"], ["x", "EN", "T", "E"]) == (["x", "", "ENT", "", "E"], None)


def test_the_match_that_is_complete_first_wins() -> None:
    assert scan(["abcd", "bc"], ["xabcd"]) == (["xa"], "bc")


def test_of_matches_that_end_together_the_longest_wins() -> None:
    assert scan(["c", "abc"], ["xabc"]) == (["x"], "abc")


def test_an_overlapping_start_is_not_missed() -> None:
    assert scan(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", ""], "aab")


LETTERS = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)


@given(STOPS, st.lists(LETTERS, max_size=6))
def test_parts_make_no_difference(stop: list[str], parts: list[str]) -> None:
    texts, found = scan(stop, parts)
    whole, found_whole = scan(stop, ["".join(parts)])
    assert ("".join(texts), found) == ("".join(whole), found_whole)


@given(STOPS, LETTERS)
def test_the_result_equals_a_search_over_all_ends(stop: list[str], text: str) -> None:
    expected = (text, None)
    for end in range(1, len(text) + 1):
        matches = [s for s in stop if text[:end].endswith(s)]
        if matches:
            longest = max(matches, key=len)
            expected = (text[: end - len(longest)], longest)
            break
    texts, found = scan(stop, [text])
    assert ("".join(texts), found) == expected
