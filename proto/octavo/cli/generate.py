"""`octavo generate`: one request to a running server, its answer on stdout, its timings on stderr."""

from __future__ import annotations

import sys
from argparse import Namespace

from octavo.cli.answer import Timed, print_json, print_text, print_texts
from octavo.cli.connection import connected
from octavo.cli.sampling import sampling_of
from octavo.cli.terminal import ExitCode, Failure, say
from octavo.client import Client, GenerateOptions


def generate(options: Namespace) -> int:
    prompt = _read_stdin() if options.prompt == "-" else options.prompt
    if not prompt.strip():
        raise Failure("the prompt is empty", ExitCode.USAGE)
    if options.logprobs is not None and not options.json:
        raise Failure("--logprobs is printed with --json only", ExitCode.USAGE)
    with connected(options) as client:
        request: GenerateOptions = {**sampling_of(options), **_prompt(client, options, prompt)}
        try:
            answer = Timed(client.generate(**request))
        except ValueError as error:  # bytes on the command line that are no text
            raise Failure(str(error), ExitCode.USAGE) from None
        if options.json:
            print_json(answer)
        elif (options.n or 1) > 1:
            print_texts(answer)
        else:
            print_text(answer)
        say(answer.summary)
        return answer.tell_failures()


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise Failure(f"the prompt on stdin is not {error.encoding}", ExitCode.USAGE) from None


def _prompt(client: Client, options: Namespace, prompt: str) -> GenerateOptions:
    """As a conversation, where that was asked for, or where it was not and the model knows conversations."""
    if options.raw and options.system:
        raise Failure("--system belongs to a conversation, and --raw asks for none", ExitCode.USAGE)
    if options.raw or not (options.chat or options.system or client.model().has_chat_template):
        return {"text": prompt}
    system = [("system", options.system)] if options.system else []
    return {"chat": [*system, ("user", prompt)]}
