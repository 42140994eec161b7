"""Every task by its kind, every verifier by its name."""

from collections.abc import Mapping, Sequence

from steps.config import TaskConfig
from steps.errors import ConfigError
from steps.tasks import verifiers
from steps.tasks.dataset import Dataset, Verifier, prompt_content
from steps.tasks.jsonl import build_jsonl
from steps.tasks.procedural import build_procedural
from steps.tasks.reasoning_gym_tasks import build_reasoning_gym, load_reasoning_gym_verifier

__all__ = ["Dataset", "Verifier", "build_dataset", "demonstrations", "load_verifier"]


def build_dataset(task: TaskConfig, seed: int) -> Dataset:
    """The task's prompts: a function of the task's settings, its files and the seed alone.

    Raises:
        ConfigError: a setting names something that does not exist or can't be met.
        DataError: a row of the user's file is wrong.
    """
    if task.kind == "jsonl":
        return build_jsonl(task, seed)
    if task.kind == "reasoning_gym":
        return build_reasoning_gym(task, seed)
    return build_procedural(task, seed)


def demonstrations(task: TaskConfig, dataset: Dataset) -> list[tuple[str | Sequence[Mapping[str, str]], str]]:
    """(prompt, response) pairs to imitate: the training prompts that have an answer.

    Raises:
        ConfigError: the answers are no responses, or there are none.
    """
    remedy = "set warmup.max_steps = 0 and name a trained checkpoint as warmup.start"
    if task.verifier == "regex":
        raise ConfigError(
            f"warmup.max_steps: with task.verifier = regex an answer is a pattern, not a response to learn; {remedy}"
        )
    pairs = [(prompt_content(task, prompt), prompt.answer) for prompt in dataset.train if prompt.answer]
    if not pairs:
        raise ConfigError(f"warmup.max_steps: no training prompt has an answer to learn; {remedy}")
    return pairs


def load_verifier(task: TaskConfig) -> Verifier:
    """The verifier that the task names, imported and ready.

    Raises:
        ConfigError: the verifier does not exist or does not fit the task.
    """
    if task.verifier in verifiers.BY_NAME:
        return verifiers.BY_NAME[task.verifier]
    if task.verifier == "math_verify":
        return verifiers.load_math_verify()
    if task.verifier == "reasoning_gym":
        return load_reasoning_gym_verifier(task)
    if ":" in task.verifier:
        return verifiers.load_entry_point(task.verifier)
    raise ConfigError(f"task.verifier = {task.verifier}: there is no such verifier")
