"""What is sent: the same prompts as those of the project's benchmarks, endless, and those of a file."""

from __future__ import annotations

import itertools

import pytest
from octavo.bench.workloads import TOKEN_IDS, WORKLOADS, BadLine, Work, drawn_from, fixed, read_prompts
from octavo.cli.parser import BENCH_WORKLOADS

from benchmarks import workloads as listed


@pytest.mark.parametrize("name", ["chat", "shared_prefix", "long_and_short"])
def test_a_stream_begins_with_the_prompts_of_the_benchmarks(name: str) -> None:
    works = itertools.islice(WORKLOADS[name].stream(TOKEN_IDS, 5), 12)
    sent = [(work.prompt["token_ids"], work.num_output_tokens) for work in works]
    assert sent == [tuple(work) for work in listed.WORKLOADS[name](12, 5)]


def test_single_begins_with_the_prompt_of_the_benchmarks() -> None:
    (work,) = listed.single(3)
    assert next(WORKLOADS["single"].stream(TOKEN_IDS, 3)) == Work(
        {"token_ids": work.prompt_token_ids}, work.num_output_tokens, len(work.prompt_token_ids)
    )


def test_the_command_line_offers_every_workload() -> None:
    assert set(BENCH_WORKLOADS) == set(WORKLOADS)


@pytest.mark.parametrize(("vocab_size", "ids"), [(49152, TOKEN_IDS), (300, range(100, 300)), (40, range(20, 40))])
def test_ids_are_in_the_vocabulary(vocab_size: int, ids: range) -> None:
    assert drawn_from(vocab_size) == ids


def test_fixed_sizes_are_kept_and_prompts_differ() -> None:
    first, second = itertools.islice(fixed(range(10, 90), 0, 20, 3), 2)
    assert (first.num_prompt_tokens, first.num_output_tokens) == (20, 3)
    assert first.prompt != second.prompt


def test_a_file_has_a_prompt_a_line() -> None:
    lines = ["Why?", "", '{"token_ids": [4, 5, 6], "max_tokens": 9}', '{"chat": "Hi!"}']
    assert read_prompts(lines, 32) == [
        Work({"text": "Why?"}, 32),
        Work({"token_ids": [4, 5, 6]}, 9, 3),
        Work({"chat": "Hi!"}, 32),
    ]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{text: 1}", "line 2 begins as JSON and is none"),
        ("{}", "line 2 needs one of"),
        ('{"text": "a", "chat": "b"}', "line 2 needs one of"),
        ('{"text": "a", "max_tokens": 0}', "line 2 has max_tokens 0"),
        ('{"token_ids": "abc"}', "line 2 cannot be sent"),
        ('{"chat": [{"role": "user"}]}', "line 2 cannot be sent"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(line: str, why: str) -> None:
    with pytest.raises(BadLine, match=why):
        read_prompts(["Why?", line], 32)


def test_an_empty_file_has_no_prompts() -> None:
    with pytest.raises(BadLine, match="no prompt"):
        read_prompts(["", " "], 32)
