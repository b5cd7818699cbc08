"""The grammar of the `octavo` command: its subcommands and their flags. Nothing is run here."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from pathlib import Path

from octavo.cli.flags import ACCESS, served

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 50051
DEFAULT_SERVER = f"{DEFAULT_HOST}:{DEFAULT_PORT}"
DEMO_PROMPT = "What is gravity?"
BENCH_WORKLOADS = ("chat", "shared_prefix", "long_and_short", "single")

_DESCRIPTION = "Serves large language models over gRPC: a scheduler that decides, executors that compute."
_EPILOG = """\
exit codes:
  0    done
  1    it failed; one sentence on stderr says why
  2    a wrong flag or value
  3    `octavo scheduler --exit-on-executor-loss` alone: the executor is gone
  130  interrupted
"""


def build_parser(version: str) -> ArgumentParser:
    parser = ArgumentParser(
        prog="octavo",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"octavo {version}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, summary: str) -> ArgumentParser:
        description = summary[0].upper() + summary[1:] + "."
        return commands.add_parser(name, help=summary, description=description, allow_abbrev=False)

    demo = command("demo", "set the demo model up, start a server, stream one answer, and stop")
    demo.add_argument("prompt", nargs="?", metavar="PROMPT", default=DEMO_PROMPT, help=f"default: {DEMO_PROMPT!r}")
    demo.add_argument("--max-tokens", type=positive, default=128, metavar="N", help="most tokens of the answer")
    _add_process_flags(demo, leave_out=("--host", "--port", *ACCESS))

    serve = command("serve", "start a scheduler and an executor, and stop both at Ctrl-C")
    _add_process_flags(serve)

    generate = command("generate", "stream the answer to a prompt from a running server")
    generate.add_argument("prompt", metavar="PROMPT", help="the prompt; - reads it from stdin")
    _add_client_flags(generate)
    _add_sampling_flags(generate)
    form = generate.add_mutually_exclusive_group()
    form.add_argument(
        "--chat", action="store_true", help="as a user's message (the default, if the model has a template)"
    )
    form.add_argument("--raw", action="store_true", help="as it is, for the model to go on with")
    generate.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    generate.add_argument("--n", type=positive, metavar="N", help="outputs to draw")
    generate.add_argument("--beam-width", type=positive, metavar="N", help="beam search with N hypotheses")
    generate.add_argument("--tenant", metavar="NAME", help="whose request it is; absent: the tenant `default`")
    generate.add_argument("--priority", type=int, metavar="N", help="smaller is served first; default 0")
    generate.add_argument("--logprobs", type=natural, metavar="K", help="with --json: report K alternatives a token")
    generate.add_argument("--json", action="store_true", help="one JSON object a line for each event")

    chat = command("chat", "hold a conversation with a running server")
    _add_client_flags(chat)
    _add_sampling_flags(chat)
    chat.add_argument("--system", metavar="TEXT", help="a system message at the beginning")

    _add_client_flags(command("health", "print whether a server, or an executor, is ready; exit code 0 if it is"))
    load = command("load", "print what runs and what waits on a server")
    _add_client_flags(load)
    load.add_argument(
        "--watch", nargs="?", type=seconds, const=1.0, metavar="SECONDS", help="again and again; default: every second"
    )
    top = command("top", "show the inside of a server live: steps, the map of KV blocks, the queue; q leaves")
    _add_client_flags(top)
    top.add_argument("--interval", type=seconds, default=0.5, metavar="SECONDS", help="between pictures (default 0.5)")
    top.add_argument("--once", action="store_true", help="print one picture; so it does where stdout is no terminal")
    drain = command("drain", "let a server, or one of its executors, finish what it runs and stop")
    drain.add_argument(
        "executor", nargs="?", metavar="EXECUTOR", help="as `octavo load` names it; absent: the scheduler"
    )
    _add_client_flags(drain)
    _add_bench_flags(command("bench", "measure what a running server achieves on a workload"))
    for name in ("scheduler", "executor"):
        commands.add_parser(name, help=f"one {name} alone, with its own flags", add_help=False)
    commands.add_parser("fetch", help="put a model into the cache of executors", add_help=False)
    commands.add_parser("kernels", help="compile every CUDA kernel and print what each takes", add_help=False)
    return parser


def _add_process_flags(parser: ArgumentParser, leave_out: Sequence[str] = ()) -> None:
    group = parser.add_argument_group("passed on to the processes")
    for flag in served(leave_out):
        text = f"{flag.help}; default {flag.default}" if flag.default else flag.help
        if flag.metavar is None:
            group.add_argument(flag.name, action="store_true", help=text)
        else:
            group.add_argument(flag.name, metavar=flag.metavar, help=text)


def _add_client_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--server", metavar="ADDRESS", default=DEFAULT_SERVER, help=f"default: {DEFAULT_SERVER}")
    parser.add_argument("--timeout", type=seconds, metavar="SECONDS", help="give up after so long")
    group = parser.add_argument_group("access")
    group.add_argument("--tls", action="store_true", help="encrypt, and trust the system's roots")
    group.add_argument("--tls-ca", type=Path, metavar="FILE", help="encrypt, and trust these PEM roots alone")
    group.add_argument("--tls-name", metavar="NAME", help="that the server's certificate must hold, not its address")
    group.add_argument("--tls-cert", type=Path, metavar="FILE", help="PEM certificate to show, and --tls-key its key")
    group.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM key")
    group.add_argument(
        "--token-file", type=Path, metavar="FILE", help="holds the token to show; absent: OCTAVO_TOKEN, else none"
    )


def _add_sampling_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (what is absent is the model's default)")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    group.add_argument("--top-k", type=natural, metavar="K", help="draw from the K most likely tokens; 0: from all")
    group.add_argument("--top-p", type=float, metavar="P", help="draw from the most likely tokens that make up P")
    group.add_argument("--min-p", type=float, metavar="P", help="drop tokens less likely than P times the best")
    group.add_argument("--presence-penalty", type=float, metavar="X", help="in [-2, 2]")
    group.add_argument("--frequency-penalty", type=float, metavar="X", help="in [-2, 2]")
    group.add_argument("--repetition-penalty", type=float, metavar="X", help="1 changes nothing")
    group.add_argument("--seed", type=natural, metavar="N", help="the same seed draws the same tokens")
    group.add_argument("--max-tokens", type=positive, metavar="N", help="most tokens of an output")
    group.add_argument("--min-tokens", type=natural, metavar="N", help="fewest tokens before an end is drawn")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end where TEXT appears; repeatable")
    group.add_argument("--ignore-eos", action="store_true", help="go on over the model's end")


def _add_bench_flags(parser: ArgumentParser) -> None:
    _add_client_flags(parser)
    what = parser.add_argument_group("what is sent")
    one = what.add_mutually_exclusive_group()
    one.add_argument("--workload", choices=BENCH_WORKLOADS, help="default: chat")
    one.add_argument("--prompt-tokens", type=positive, metavar="N", help="random prompts of N tokens")
    one.add_argument("--prompts", metavar="FILE", help="one a line: text, or JSON with text, token_ids or chat")
    what.add_argument("--output-tokens", type=positive, metavar="N", help="tokens of each answer, no workload's own")
    what.add_argument("--ignore-eos", action="store_true", help="with --prompts: go on over the model's end")
    what.add_argument("--seed", type=natural, default=0, metavar="N", help="of random prompts and times (default 0)")
    how = parser.add_argument_group("how it is sent")
    loop = how.add_mutually_exclusive_group()
    loop.add_argument("--concurrency", type=positive, metavar="N", help="N under way at any time")
    loop.add_argument("--rate", type=seconds, metavar="R", help="R a second, at random times, whatever is under way")
    how.add_argument("--requests", type=positive, metavar="N", help="stop after N; default: what the workload has")
    how.add_argument("--seconds", type=seconds, metavar="S", help="stop after S seconds; what then runs is cut off")
    how.add_argument("--warmup", type=natural, default=4, metavar="N", help="short requests before it (default 4)")
    out = parser.add_argument_group("what is told")
    out.add_argument("--slo-ttft-ms", type=seconds, metavar="MS", help="goodput counts requests no later than this")
    out.add_argument("--slo-itl-ms", type=seconds, metavar="MS", help="and with no gap between tokens above this")
    out.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    out.add_argument("--plot", metavar="FILE", help="a picture as well, as out.png; needs the extra `bench`")


def _integer(name: str, least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise ArgumentTypeError(f"{text} is less than {least}")
        return value

    parse.__name__ = name  # argparse names it where the text is no number
    return parse


positive = _integer("integer", 1)
natural = _integer("integer", 0)


def seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ArgumentTypeError(f"{text} is not above 0")
    return value
