"""Flags to configuration: defaults, forms, and a sentence for each bad one."""

from __future__ import annotations

import pytest

from scheduler.config import SchedulerConfig, parse_config


def test_absent_flags_have_the_defaults() -> None:
    assert parse_config(["--executors", "e:1"]) == SchedulerConfig(executors=("e:1",))


def test_every_flag_is_taken_over() -> None:
    flags = (
        "--executor [::1]:5 --host 0.0.0.0 --port 0 --max-queue-requests 3 --max-queue-tokens 4 --queue-timeout 1.5"
        " --stall-timeout 2 --pipeline-depth 3 --no-prefix-caching --step-timeout 7 --grace-period 0"
        " --tenant-weight a=3,b=0.5 --tenant-weight c=d=2"
        " --exit-on-executor-loss --exit-with-parent --max-message-bytes 9 --no-reflection --http-port 8 --http-names"
        " --log-format json --log-level debug"
    )
    assert parse_config(flags.split()) == SchedulerConfig(
        executors=("[::1]:5",), host="0.0.0.0", port=0, max_queue_requests=3, max_queue_tokens=4, queue_timeout=1.5,
        stall_timeout=2.0, pipeline_depth=3, prefix_caching=False, step_timeout=7.0, grace_period=0.0,
        tenant_weights=(("a", 3.0), ("b", 0.5), ("c=d", 2.0)),
        exit_on_executor_loss=True, exit_with_parent=True, max_message_bytes=9, reflection=False,
        http_port=8, http_names=True,
        log_format="json", log_level="debug",
    )  # fmt: skip


@pytest.mark.parametrize(("given", "taken"), [("16777216", 16 << 20), ("64M", 64 << 20), ("1g", 1 << 30)])
def test_a_size_is_written_as_for_executors(given: str, taken: int) -> None:
    assert parse_config(["--executors", "e:1", "--max-message-bytes", given]).max_message_bytes == taken


def test_help_tells_defaults_as_flags_would_have_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "above: an error status (default: 16M)" in told
    assert "names none itself (default: 60)" in told
    assert "SUPPRESS" not in told


def test_http_port_0_takes_a_free_one() -> None:
    assert parse_config(["--executors", "e:1", "--http-port", "0"]).http_port == 0


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("", "the following arguments are required: --executors"),
        ("--executors here", "'here' is not HOST:PORT"),
        ("--executors here:99999", "'here:99999' is not HOST:PORT"),
        ("--executors a:1,::1:2", "an IPv6 address stands in brackets"),
        ("--executors a:1 --port 70000", "'70000' is no port"),
        ("--executors a:1 --queue-timeout -1", "'-1' is no time in seconds"),
        ("--executors a:1 --queue-timeout 0", "must be more than 0 seconds"),
        ("--executors a:1 --step-timeout 0", "must be more than 0 seconds"),
        ("--executors a:1 --stall-timeout 0", "must be more than 0 seconds"),
        ("--executors a:1 --queue-timeout nan", "'nan' is no time in seconds"),
        ("--executors a:1 --max-queue-requests 0", "'0' is not a whole number above 0"),
        ("--executors a:1 --max-queue-requests 2147483648", "'2147483648' is more than 2147483647"),
        ("--executors a:1 --max-message-bytes 0", "'0' is no size"),
        ("--executors a:1 --max-message-bytes 2G", "'2G' is more than 2147483647 bytes, the most that gRPC takes"),
        ("--executors a:1 --max-message-bytes 5X", "'5X' is no size"),
        ("--executors a:1 --tenant-weight a", "'a' is not NAME=W with a weight above 0"),
        ("--executors a:1 --tenant-weight a=1,b=0", "'b=0' is not NAME=W with a weight above 0"),
        ("--executors a:1 --tenant-weight =1", "'=1' is not NAME=W"),
        ("--executors a:1 --otlp-endpoint c:4317", "'c:4317' is no URL"),
        ("--executors a:1 --pipeline-depth 4", "invalid choice"),
        ("--executors a:1 --log-level loud", "invalid choice"),
    ],
)
def test_a_bad_flag_is_a_sentence_and_exit_code_2(
    flags: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_config(flags.split())
    assert caught.value.code == 2
    assert sentence in capsys.readouterr().err


def test_executors_are_given_in_one_flag_or_several() -> None:
    config = parse_config(["--executors", "a:1,b:2", "--executors", "[::1]:3"])
    assert config.executors == ("a:1", "b:2", "[::1]:3")
