"""TRL's GRPOTrainer on a policy of ours: seconds of each batch, and its held-out reward after each.

    PYTHON benchmarks/_trl_grpo.py SPEC.json OUTPUT.json

`benchmarks.rl_loop` runs this under an interpreter that has TRL, writes the specification and reads the output. Nothing
of this repository is imported. A batch is one generation, its rewards and all optimizer steps on it.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class BatchClock(TrainerCallback):  # type: ignore[misc]
    """Takes the time of each batch; evaluates between batches while its clock stands still. Stops at the limits."""

    def __init__(self, spec: dict[str, Any], tokenizer: Any) -> None:
        self._spec, self._tokenizer = spec, tokenizer
        self.batch_seconds: list[float] = []
        self.rewards: list[float] = []
        self._resumed_s = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._resumed_s = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % (args.steps_per_generation * args.num_iterations):
            return
        self.batch_seconds.append(time.perf_counter() - self._resumed_s)
        if sum(self.batch_seconds) >= self._spec["limit_s"]:
            control.should_training_stop = True
        target = self._spec["target_reward"]
        if target is not None:
            self.rewards.append(held_out_reward(kwargs["model"], self._tokenizer, self._spec))
            if self.rewards[-1] >= target:
                control.should_training_stop = True
        self._resumed_s = time.perf_counter()


@torch.no_grad()
def held_out_reward(model: Any, tokenizer: Any, spec: dict[str, Any]) -> float:
    """Mean reward of the greedy answers to the held-out prompts."""
    prompts = [text for text, _ in spec["heldout"]]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    model.eval()
    generated = model.generate(
        **inputs,
        max_new_tokens=spec["max_new_tokens"],
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model.train()
    responses = tokenizer.batch_decode(generated[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    rewards = exact_match(responses, [answer for _, answer in spec["heldout"]])
    return sum(rewards) / len(rewards)


def exact_match(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """A reward function as TRL calls it; the same rule as the verifier `exact`."""
    return [float(given.strip() == wanted.strip()) for given, wanted in zip(completions, answer, strict=True)]


def trainer_config(spec: dict[str, Any], folder: str) -> GRPOConfig:
    """The run's settings in TRL's words. `bnpo` is the mean over the mini-batch's tokens, as ours; `delta` bounds the
    ratio of a negative advantage, as the dual clip does. Checkpointing and bf16, on by default, would slow it down."""
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=spec["seed"],
        max_steps=spec["batches"] * spec["steps_per_batch"] * spec["epochs"],
        per_device_train_batch_size=spec["prompts"] * spec["group_size"] // spec["steps_per_batch"],
        steps_per_generation=spec["steps_per_batch"],
        gradient_accumulation_steps=1,
        num_iterations=spec["epochs"],
        num_generations=spec["group_size"],
        max_completion_length=spec["max_new_tokens"],
        temperature=spec["temperature"],
        top_p=spec["top_p"],
        use_vllm=False,
        beta=0.0,
        router_aux_loss_coef=0.0,
        epsilon=spec["clip_low"],
        epsilon_high=spec["clip_high"],
        delta=spec["dual_clip"],
        loss_type="bnpo",
        scale_rewards="group",
        max_grad_norm=spec["max_grad_norm"],
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def build_trainer(spec: dict[str, Any], clock: BatchClock, tokenizer: Any, folder: str) -> GRPOTrainer:
    """A trainer on the published weights, with the optimizer and the schedule that ours uses."""
    model = AutoModelForCausalLM.from_pretrained(spec["publication"], dtype=torch.float32, local_files_only=True)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=spec["learning_rate"],
        betas=tuple(spec["betas"]),
        eps=spec["epsilon"],
        weight_decay=spec["weight_decay"],
        fused=True,
    )
    warmup_steps = spec["warmup_steps"]
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: min(1.0, (done + 1) / warmup_steps) if warmup_steps else 1.0
    )
    rows = {"prompt": [text for text, _ in spec["train"]], "answer": [answer for _, answer in spec["train"]]}
    return GRPOTrainer(
        model=model,
        reward_funcs=exact_match,
        args=trainer_config(spec, folder),
        train_dataset=Dataset.from_dict(rows),
        processing_class=tokenizer,
        callbacks=[clock],
        optimizers=(optimizer, schedule),
    )


def main() -> None:
    spec_path, output_path = map(Path, sys.argv[1:])
    spec = json.loads(spec_path.read_text())
    torch.set_num_threads(spec["threads"])
    tokenizer = AutoTokenizer.from_pretrained(spec["publication"], local_files_only=True)
    clock = BatchClock(spec, tokenizer)
    build_trainer(spec, clock, tokenizer, str(output_path.parent / "trl")).train()
    output_path.write_text(json.dumps({"batch_seconds": clock.batch_seconds, "rewards": clock.rewards}))


if __name__ == "__main__":
    main()
