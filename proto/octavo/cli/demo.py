"""`octavo demo`: a server for one answer.

The same two processes as `octavo serve`, on free ports of this machine, with the demo model unless another is named.
Of their logs, only errors are shown; what they do while loading is told as progress.
"""

from __future__ import annotations

import threading
import time
from argparse import Namespace

from octavo.cli.answer import Timed, print_text
from octavo.cli.connection import failure
from octavo.cli.processes import Finished, Processes
from octavo.cli.serve import plan_of, run
from octavo.cli.terminal import ExitCode, Failure, abandon_stdout, say
from octavo.client import Client, GenerateOptions, OctavoError


class Answer:
    """The work of the demo's server: one question, answered on a thread of its own."""

    def __init__(self, address: str, prompt: str, max_tokens: int) -> None:
        self._client = Client(address)
        self._prompt = prompt
        self._max_tokens = max_tokens
        self._start = time.perf_counter()
        self._stopped = False

    def begin(self, processes: Processes) -> None:
        say(f"ready after {time.perf_counter() - self._start:.1f} s; the question: {self._prompt}")
        threading.Thread(target=lambda: processes.post(Finished(self._run())), daemon=True).start()

    def stop(self) -> int:
        """Nobody waits for the rest of the answer."""
        self._stopped = True
        self._client.close()
        return ExitCode.INTERRUPTED

    def _run(self) -> int:
        try:
            return self._stream()
        except OctavoError as error:
            if not self._stopped:
                say(str(failure(error, self._client.address)))
            return ExitCode.FAILURE
        except ValueError as error:  # what gRPC says of a connection that `stop` closed between two calls
            if self._stopped:
                return ExitCode.INTERRUPTED
            say(str(error))  # bytes on the command line that are no text
            return ExitCode.USAGE
        except Failure as error:
            say(str(error))
            return error.code
        except BrokenPipeError:
            abandon_stdout()
            return ExitCode.BROKEN_PIPE

    def _stream(self) -> int:
        request: GenerateOptions = {"max_tokens": self._max_tokens, "temperature": 0}
        request["chat" if self._client.model().has_chat_template else "text"] = self._prompt
        answer = Timed(self._client.generate(**request), tells_of_waiting=False)
        print_text(answer)
        say(answer.summary)
        return answer.tell_failures()


def demo(options: Namespace) -> int:
    options.host, options.port = None, "0"
    options.health_port = options.tls_cert = None
    options.log_level = options.log_level or "error"
    if not options.prompt.strip():
        raise Failure("the prompt is empty", ExitCode.USAGE)
    plan = plan_of(options)
    return run(plan, Answer(plan.address, options.prompt, options.max_tokens))
