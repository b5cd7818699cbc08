"""The `octavo` command.

Reads the arguments and hands over to one module for each subcommand, imported when it is chosen, so that `octavo
--help` costs neither gRPC nor a client. Scheduler and executor are started as processes, never imported. Whatever goes
wrong ends in one sentence on stderr and an exit code, never in a traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from octavo.cli.terminal import ExitCode, Failure, abandon_stdout, leave_at_interrupt, open_missing_streams, say


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    open_missing_streams()
    leave_at_interrupt()
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except Failure as failure:
        say(str(failure))
        return failure.code
    except KeyboardInterrupt:  # in a conversation, between an answer and the next line
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        abandon_stdout()
        return ExitCode.BROKEN_PIPE


def _run(words: Sequence[str]) -> int:
    match words:
        case ["scheduler" | "executor" as name, *rest]:
            from octavo.cli.serve import module, require_torch

            if name == "executor":
                require_torch()
            command = module(name, *rest)
            os.execv(command[0], command)
        case ["fetch" | "kernels" as name, *rest]:
            from octavo.cli.serve import module, require_torch

            require_torch()
            command = module({"fetch": "executor.fetch", "kernels": "executor.backends.cuda.report"}[name], *rest)
            os.execv(command[0], command)

    from importlib.metadata import version

    from octavo.cli.parser import build_parser

    options = build_parser(version("octavo")).parse_args(words)
    match options.command:
        case "demo":
            from octavo.cli.demo import demo

            return demo(options)
        case "serve":
            from octavo.cli.serve import serve

            return serve(options)
        case "generate":
            from octavo.cli.generate import generate

            return generate(options)
        case "chat":
            from octavo.cli.chat import chat

            return chat(options)
        case "health":
            from octavo.cli.status import show_health

            return show_health(options)
        case "load":
            from octavo.cli.status import show_load

            return show_load(options)
        case "top":
            from octavo.cli.top import top

            return top(options)
        case "drain":
            from octavo.cli.status import drain

            return drain(options)
        case "bench":
            from octavo.cli.bench import bench

            return bench(options)
    raise AssertionError(f"the parser let {options.command!r} through")
