"""Tokens per second of our sampler against `generate` of transformers: same model, same batch, the whole machine.

    python -m benchmarks.sampling [--repeats 3] [--batches 16 64 256]

Ours are two single-threaded processes, each sampling batches of the size given, as rollout workers do; transformers
runs in one process with two threads. All prompts differ, so that no prefill is shared. The ratio means something on an
idle machine only: threads that wait for one another lose far more to a busy core than processes that don't. Prints
JSON on stdout; `load_average` in it is the one-minute load before the first measurement.
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from typing import Any

WORKERS = 2
SHAPES = ((8, 8), (32, 64))
"""Prompt tokens, new tokens."""
VOCAB_SIZE = 16
MIN_SECONDS = 1.0
"""Each timed repeat calls again until this has passed."""


def main() -> None:
    """Run the comparison and print its JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="timed repeats; the median is reported")
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 64, 256], help="batch sizes")
    arguments = parser.parse_args()
    machine = _machine()
    results = [
        _compare(batch, prompt_tokens, new_tokens, arguments.repeats)
        for batch in arguments.batches
        for prompt_tokens, new_tokens in SHAPES
    ]
    print(json.dumps({"machine": machine, "versions": _versions(), "results": results}, indent=2))


def _compare(batch: int, prompt_tokens: int, new_tokens: int, repeats: int) -> dict[str, float]:
    """Interleave the two sides, so that a disturbance of the machine falls on both."""
    ours, theirs = [], []
    for _ in range(repeats):
        ours.append(_measure(_sampler_calls, WORKERS, 1, batch, prompt_tokens, new_tokens))
        theirs.append(_measure(_generate_calls, 1, WORKERS, batch, prompt_tokens, new_tokens))
    row = {
        "batch": batch,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "sampler_tokens_per_s": round(statistics.median(ours)),
        "generate_tokens_per_s": round(statistics.median(theirs)),
        "ratio": round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 2),
    }
    print(f"batch {batch}, {prompt_tokens} + {new_tokens} tokens: {row['ratio']}x", file=sys.stderr)
    return row


def _measure(make: Callable[..., Callable[[], object]], processes: int, threads: int, *shape: int) -> float:
    """Tokens per second of `processes` together."""
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(processes), context.Queue()
    workers = [
        context.Process(target=_work, args=(make, threads, shape, barrier, queue, seed)) for seed in range(processes)
    ]
    for worker in workers:
        worker.start()
    rates: list[float] = [queue.get() for _ in workers]
    for worker in workers:
        worker.join()
    return sum(rates)


def _work(
    make: Callable[..., Callable[[], object]],
    threads: int,
    shape: tuple[int, ...],
    barrier: Barrier,
    queue: Any,
    seed: int,
) -> None:
    import torch

    torch.set_num_threads(threads)
    call = make(*shape, seed)
    call()
    batch, _, new_tokens = shape
    barrier.wait()
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < MIN_SECONDS:
        call()
        calls += 1
    queue.put(calls * batch * new_tokens / (time.perf_counter() - start))


def _model_and_prompts(batch: int, prompt_tokens: int, seed: int) -> tuple[Any, Any]:
    import torch

    from moe.config import ModelConfig
    from moe.model import build_model

    model = build_model(ModelConfig(), VOCAB_SIZE, seed=0).eval()
    generator = torch.Generator().manual_seed(seed)
    return model, torch.randint(3, VOCAB_SIZE, (batch, prompt_tokens), generator=generator)


def _sampler_calls(batch: int, prompt_tokens: int, new_tokens: int, seed: int) -> Callable[[], object]:
    from moe.config import SamplingConfig
    from moe.sampler import Sampler

    model, prompts = _model_and_prompts(batch, prompt_tokens, seed)
    sampler, rows = Sampler(model, tokenizer_eos_ids=(), pad_id=0), prompts.tolist()
    cfg = SamplingConfig(max_new_tokens=new_tokens)
    return lambda: sampler.sample(rows, range(batch), cfg)


def _generate_calls(batch: int, prompt_tokens: int, new_tokens: int, seed: int) -> Callable[[], object]:
    import torch
    from transformers import GenerationConfig

    model, prompts = _model_and_prompts(batch, prompt_tokens, seed)
    model.set_experts_implementation("grouped_mm")
    settings = GenerationConfig(max_new_tokens=new_tokens, do_sample=True, top_k=0, eos_token_id=None, pad_token_id=0)
    mask = torch.ones_like(prompts)
    return lambda: model.generate(prompts, attention_mask=mask, generation_config=settings)


def _machine() -> dict[str, object]:
    return {
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "cpu": _cpu_name(),
        "load_average": os.getloadavg()[0],
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    except OSError:
        return platform.processor()


def _versions() -> dict[str, str]:
    import torch
    import transformers

    return {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}


if __name__ == "__main__":
    main()
