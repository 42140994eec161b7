"""A batch as files: what flush writes and train reads."""

from collections.abc import Sequence
from pathlib import Path

from moe.batch import TrainingBatch
from steps.errors import DataError
from steps.records import ScoredSample
from steps.sample_routing import to_expert_ids

BATCH_FILE = "batch.safetensors"


def training_batch(scored: Sequence[ScoredSample]) -> TrainingBatch:
    """The samples as flat arrays, in key order: groups are numbered as they appear.

    Their routing must be inline. Raises DataError when samples have the routing of different models.
    """
    groups: dict[str, int] = {}
    for item in scored:
        groups.setdefault(item.sample.prompt_uid, len(groups))
    if len({(routing.num_layers, routing.top_k) for item in scored if (routing := item.sample.routing)}) > 1:
        raise DataError("samples of one batch have routings of different models; start a new run for another model")
    return TrainingBatch.from_rows(
        prompts=[item.sample.prompt_ids for item in scored],
        responses=[item.sample.response_ids_T for item in scored],
        logprobs=[item.sample.logprobs_T for item in scored],
        versions=[item.sample.versions_T for item in scored],
        rewards=[item.reward.value for item in scored],
        groups=[groups[item.sample.prompt_uid] for item in scored],
        masks=[item.sample.mask_T for item in scored],
        routings=[None if item.sample.routing is None else to_expert_ids(item.sample.routing) for item in scored],
    )


def load_batch(folder: Path) -> TrainingBatch:
    """Read a verified batch folder; DataError when the file is not a batch."""
    try:
        return TrainingBatch.from_bytes((folder / BATCH_FILE).read_bytes())
    except ValueError as error:
        raise DataError(f"batch {folder.name}: {error}") from None
