"""llama.cpp as a peer: `python llamacpp.py FILE.gguf`, in an environment that has llama-cpp-python.

It answers one request after another.
"""

import itertools
import os
import sys
import time

from protocol import Answer, Arrivals, Task, serve

MAX_MODEL_LEN = 4096


def build() -> Answer:
    from llama_cpp import Llama

    threads = len(os.sched_getaffinity(0))
    llama = Llama(sys.argv[1], n_ctx=MAX_MODEL_LEN, n_threads=threads, n_threads_batch=threads, verbose=False)

    def answer(task: Task) -> Arrivals:
        arrivals: Arrivals = []
        for work in task.now + task.late:
            tokens = llama.generate(work.prompt_token_ids, temp=0.0)
            arrivals.append([(time.perf_counter(), 1) for _ in itertools.islice(tokens, work.num_output_tokens)])
        return arrivals

    return answer


if __name__ == "__main__":
    serve("llama.cpp", build)
