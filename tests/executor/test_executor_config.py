"""The command line: values, defaults, and what is refused with exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor.config import ExecutorConfig, build_parser, format_address, parse_arguments


def parse(*arguments: str, **environment: str) -> ExecutorConfig:
    return parse_arguments(arguments, environment)


def test_no_flags_give_the_defaults() -> None:
    assert parse(XDG_CACHE_HOME="/cache") == ExecutorConfig(cache_dir=Path("/cache/octavo"))


def test_every_flag_arrives() -> None:
    flags = (
        "--model m --host ::1 --port 0 --device cuda --dtype float16 --quantization int8 --block-size 32 "
        "--kv-cache-memory 3G --gpu-memory-share 0.5 --max-num-seqs 5 --max-num-batched-tokens 6 "
        "--max-model-len 7 --deterministic --threads 2 --cache-dir /c "
        "--grace-period 1.5 --max-message-bytes 8M --log-format json --log-level debug --exit-with-parent"
    )
    config = parse(*flags.split())
    assert config == ExecutorConfig(
        model="m",
        host="::1",
        port=0,
        device="cuda",
        dtype="float16",
        quantization="int8",
        block_size=32,
        kv_cache_memory=3 << 30,
        gpu_memory_share=0.5,
        max_num_seqs=5,
        max_num_batched_tokens=6,
        max_model_len=7,
        deterministic=True,
        threads=2,
        cache_dir=Path("/c"),
        grace_period=1.5,
        max_message_bytes=8 << 20,
        log_format="json",
        log_level="debug",
        exit_with_parent=True,
    )


def test_every_setting_has_a_flag_with_a_help_text() -> None:
    actions = [action for action in build_parser()._actions if action.dest != "help"]
    assert {action.dest for action in actions} == set(ExecutorConfig.__dataclass_fields__)
    assert all(action.help for action in actions)


@pytest.mark.parametrize(("host", "expected"), [("127.0.0.1", "127.0.0.1:5"), ("::1", "[::1]:5"), ("[::]", "[::]:5")])
def test_ipv6_addresses_stand_in_brackets(host: str, expected: str) -> None:
    assert format_address(host, 5) == expected


@pytest.mark.parametrize(("text", "size"), [("100", 100), ("2K", 2048), ("3m", 3 << 20), ("1G", 1 << 30)])
def test_sizes_have_units(text: str, size: int) -> None:
    assert parse("--kv-cache-memory", text).kv_cache_memory == size


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--port 65536", "--port 65536 is not in [0, 65535]"),
        ("--num-blocks 1", "--num-blocks 1 is less than 2"),
        ("--max-model-len 1", "--max-model-len 1 is less than 2: a prompt and an output"),
        ("--num-blocks 2147483648", "--num-blocks 2147483648 is more than 2147483647"),
        ("--max-model-len 2147483648", "--max-model-len 2147483648 is more than 2147483647"),
        ("--max-message-bytes 2G", "--max-message-bytes 2147483648 is more than 2147483647, the most that gRPC takes"),
        ("--num-blocks 5 --kv-cache-memory 1G", "give one of them"),
        ("--kv-cache-memory 1.5G", "'1.5G' is no size"),
        ("--kv-cache-memory 0", "--kv-cache-memory 0 is less than 1"),
        ("--max-num-seqs 0", "--max-num-seqs 0 is less than 1"),
        ("--max-num-batched-tokens 63", "less than --max-num-seqs 64"),
        ("--threads -1", "--threads -1 is less than 1"),
        ("--grace-period nan", "--grace-period nan is less than 0"),
        ("--max-message-bytes 5", "less than 1M"),
        ("--otlp-endpoint c:4317", "--otlp-endpoint 'c:4317' is no URL"),
        ("--block-size 8", "invalid choice: 8"),
        ("--dtype float8", "invalid choice: 'float8'"),
        ("--device tpu", "invalid choice: 'tpu'"),
        ("--gpu-memory-share 1.5", "--gpu-memory-share 1.5 is not in (0, 1]"),
        ("--gpu-memory-share nan", "--gpu-memory-share nan is not in (0, 1]"),
        ("--unknown", "unrecognized arguments: --unknown"),
    ],
)
def test_a_wrong_value_is_a_sentence_and_exit_code_2(
    arguments: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse(*arguments.split())
    assert exit_info.value.code == 2
    assert sentence in capsys.readouterr().err
