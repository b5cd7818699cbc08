"""`octavo chat`: a conversation in the terminal.

Owns the history; the server keeps none, but finds its beginning in the prefix cache each time. Ctrl-C stops the answer
that runs and keeps what was said of it; Ctrl-D or /exit leaves; /reset begins anew.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import uuid
from argparse import Namespace
from collections.abc import Generator, Iterator

from octavo.cli.answer import Timed, print_text
from octavo.cli.connection import connected, failure
from octavo.cli.sampling import sampling_of
from octavo.cli.terminal import ExitCode, Failure, say, write
from octavo.client import Client, Delta, Event, GenerateOptions, OctavoError, ServerUnavailable

_HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


class Conversation:
    """What was said, oldest first."""

    def __init__(self, system: str | None) -> None:
        self._beginning = [("system", system)] if system else []
        self.messages = list(self._beginning)

    def reset(self) -> None:
        self.messages = list(self._beginning)

    def add(self, role: str, content: str) -> None:
        self.messages.append((role, content))


def chat(options: Namespace) -> int:
    with contextlib.suppress(ImportError):  # line editing and history, where Python was built with them
        import readline  # noqa: F401
    conversation = Conversation(options.system)
    with connected(options) as client:
        model = client.model()
        if not model.has_chat_template:
            raise Failure(f"{model.name} has no chat template; use `octavo generate --raw`")
        say(f"{model.name}; {_HELP}")
        signal.signal(signal.SIGINT, signal.default_int_handler)  # it ends an answer or a line, not the conversation
        while (line := _read_line()) is not None:
            match line.strip():
                case "":
                    continue
                case "/exit" | "/quit":
                    break
                case "/reset":
                    conversation.reset()
                    say("the conversation begins anew")
                case command if command.startswith("/"):
                    say(f"no command {command}; {_HELP}")
                case _:
                    _answer(client, conversation, line, sampling_of(options))
    return ExitCode.OK


def _answer(client: Client, conversation: Conversation, question: str, sampling: GenerateOptions) -> None:
    """Streams the answer and adds both to the history; a question that was refused is forgotten."""
    spoken: list[str] = []
    request_id = uuid.uuid4().hex
    messages = [*conversation.messages, ("user", question)]
    asked: GenerateOptions = {**sampling, "chat": messages, "request_id": request_id}
    try:
        events = client.generate(**asked)
    except ValueError as error:  # bytes that are no text
        say(str(error))
        return
    answer = Timed(_overheard(events, spoken))
    try:
        print_text(answer)
        say(answer.summary)
        answer.tell_failures()
    except KeyboardInterrupt:
        with contextlib.suppress(OctavoError):
            # The interrupt may have come while the call was being made, which is then nobody's to cancel.
            client.abort(request_id, tenant=sampling.get("tenant"))
        write("\n")
        say("stopped")
    except OctavoError as error:
        if isinstance(error, ServerUnavailable) and not spoken:
            raise
        say(str(failure(error, client.address)))
    finally:
        if isinstance(events, Generator):
            events.close()  # cancels what still runs
    if spoken:
        conversation.add("user", question)
        conversation.add("assistant", "".join(spoken))


def _overheard(events: Iterator[Event], spoken: list[str]) -> Iterator[Event]:
    for event in events:
        if isinstance(event, Delta) and event.text:
            spoken.append(event.text)
        yield event


def _read_line() -> str | None:
    """None at the end of the input; a Ctrl-C while typing discards the line."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "")
        except EOFError:
            if sys.stdin.isatty():
                write("\n")
            return None
        except UnicodeDecodeError as error:
            say(f"what was typed is not {error.encoding}")
        except KeyboardInterrupt:
            write("\n")
