"""Rollout and train without workflows, database and store: the seconds of each batch.

    python -m benchmarks._rollout_train CONFIG.toml PUBLICATION BATCHES

`benchmarks.rl_loop` runs this in a process of its own. As in a run, single-threaded workers sample units of whole
groups and one trainer takes the optimizer steps; here the weights lie in shared memory. Prints JSON on stdout.
"""

import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moe.batch import TrainingBatch
from moe.model import attach_dispatcher, load_model
from moe.sampler import SampledResponse, Sampler
from moe.tokenizer import decode_response, encode_prompt, load_tokenizer
from moe.update import PolicyTrainer
from steps.config import RunConfig
from steps.config_loader import load_config
from steps.records import Prompt
from steps.seeds import derive_seed, draw_prompts, sample_seed
from steps.tasks.catalog import build_dataset, load_verifier
from steps.tasks.dataset import prompt_content
from steps.tasks.scoring import score
from steps.trainers import new_trainer


@dataclass(frozen=True, slots=True)
class Row:
    """One scored response."""

    prompt_uid: str
    prompt_ids: list[int]
    response_ids: list[int]
    logprobs: list[float]
    reward: float | None


class Worker:
    """Samples units on weights that the trainer changes in place."""

    def __init__(self, config: RunConfig, publication: Path, weights: dict[str, Tensor]) -> None:
        torch.set_num_threads(1)
        model = load_model(publication)
        model.load_state_dict(weights, assign=True)
        self._config = config
        self._tokenizer = load_tokenizer(publication)
        self._sampler = Sampler(
            model, (self._tokenizer.eos_token_id,), self._tokenizer.pad_token_id, tokenizer=self._tokenizer
        )
        self._verifier = load_verifier(config.task)
        self._iteration = 0

    def sample(self, iteration: int, prompts: Sequence[Prompt]) -> list[Row]:
        """One unit: the groups of `prompts`, sampled as one batch, decoded and scored."""
        if iteration != self._iteration:
            self._sampler.refresh()
            self._iteration = iteration
        config = self._config
        members = [(prompt, index) for prompt in prompts for index in range(config.rollout.group_size)]
        contents = {prompt.uid: prompt_content(config.task, prompt) for prompt in prompts}
        encoded = {uid: encode_prompt(self._tokenizer, content) for uid, content in contents.items()}
        rows = [encoded[prompt.uid] for prompt, _ in members]
        seeds = [sample_seed(config.seed, iteration, prompt.uid, index) for prompt, index in members]
        responses = self._sampler.sample(rows, seeds, config.rollout.sampling)
        return [
            Row(prompt.uid, encoded[prompt.uid], drawn.response_ids, drawn.logprobs, self._score(prompt, drawn))
            for (prompt, _), drawn in zip(members, responses, strict=True)
        ]

    def _score(self, prompt: Prompt, response: SampledResponse) -> float | None:
        text = decode_response(self._tokenizer, response.response_ids)
        return score(self._verifier, prompt, text, self._config.reward.timeout_s)[1]


_worker: Worker | None = None


def _start_worker(config: RunConfig, publication: Path, weights: dict[str, Tensor]) -> None:
    global _worker
    _worker = Worker(config, publication, weights)


def _sample(iteration: int, prompts: Sequence[Prompt]) -> list[Row]:
    assert _worker is not None
    return _worker.sample(iteration, prompts)


def measure(config: RunConfig, publication: Path, batches: int) -> list[dict[str, float]]:
    """Each batch's seconds of rollout (rewards included) and of train, and its mean reward.

    The first one waits for the workers to start.
    """
    torch.set_num_threads(config.train.update.threads)
    model = load_model(publication)
    attach_dispatcher(model, config.moe)
    model.share_memory()
    trainer = new_trainer(config, model)
    prompts = {prompt.uid: prompt for prompt in build_dataset(config.task, config.seed).train}
    size = config.rollout.prompts_per_iteration
    workers = ProcessPoolExecutor(
        config.rollout.workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(config, publication, dict(model.state_dict())),
    )
    measured = []
    with workers:
        for iteration in range(1, batches + 1):
            drawn = draw_prompts(list(prompts), config.seed, (iteration - 1) * size, size)
            measured.append(_run_batch(workers, trainer, config, iteration, [prompts[uid] for uid in drawn]))
    return measured


def _run_batch(
    workers: Executor, trainer: PolicyTrainer, config: RunConfig, iteration: int, prompts: Sequence[Prompt]
) -> dict[str, float]:
    start_s = time.perf_counter()
    size = config.rollout.prompts_per_unit
    units = [prompts[first : first + size] for first in range(0, len(prompts), size)]
    rows = [row for unit in workers.map(_sample, [iteration] * len(units), units) for row in unit]
    sampled_s = time.perf_counter()
    trainer.run_batch(
        _training_batch(rows, iteration),
        seed=derive_seed("update", config.seed, iteration),
        start_step=0,
        on_step=lambda step: None,
        should_stop=lambda: False,
    )
    return {
        "rollout_s": sampled_s - start_s,
        "train_s": time.perf_counter() - sampled_s,
        "reward_mean": sum(row.reward or 0.0 for row in rows) / len(rows),
    }


def _training_batch(rows: Sequence[Row], iteration: int) -> TrainingBatch:
    """In the order of the prompts' uids, as the buffer selects a batch: the mini-batches are then those of a run."""
    rows = sorted(rows, key=lambda row: row.prompt_uid)
    groups = {uid: number for number, uid in enumerate(dict.fromkeys(row.prompt_uid for row in rows))}
    return TrainingBatch.from_rows(
        prompts=[row.prompt_ids for row in rows],
        responses=[row.response_ids for row in rows],
        logprobs=[row.logprobs for row in rows],
        versions=[[iteration - 1] * len(row.response_ids) for row in rows],
        rewards=[row.reward for row in rows],
        groups=[groups[row.prompt_uid] for row in rows],
    )


def main() -> None:
    config_path, publication, batches = sys.argv[1:]
    print(json.dumps(measure(load_config(config_path), Path(publication), int(batches))))


if __name__ == "__main__":
    main()
