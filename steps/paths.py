"""Every key in the store as a pure function of (run, iteration, version): no step passes a path to another."""

import re

from steps.errors import UsageError

RUN_ID_PATTERN = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")


def validate_run_id(run_id: str) -> str:
    """Return `run_id`, or raise UsageError: it becomes a folder, an object key and a Kubernetes name.

    At most 40 characters, so that `<run>-<iteration>-train-w-0-0` stays within the 63 of a pod's host name.
    """
    if not RUN_ID_PATTERN.fullmatch(run_id):
        raise UsageError(
            f"run id {run_id!r}: use 1 to 40 lower-case letters, digits and inner hyphens, as in reverse-digits-1"
        )
    return run_id


def run_prefix(run_id: str) -> str:
    return f"runs/{validate_run_id(run_id)}"


def config_key(run_id: str) -> str:
    return f"{run_prefix(run_id)}/config.json"


def dataset_key(run_id: str, split: str) -> str:
    return f"{run_prefix(run_id)}/data/{split}.jsonl"


def iteration_prompts_key(run_id: str, iteration: int) -> str:
    """The prompts that one iteration draws: a worker reads these, never the whole data set."""
    return f"{run_prefix(run_id)}/prompts/{iteration:05d}.jsonl"


def routing_key(run_id: str, sha256: str) -> str:
    """Expert ids of one sample that are too large for the database, named by their content."""
    return f"{run_prefix(run_id)}/routing/{sha256}.bin"


def batch_prefix(run_id: str, iteration: int) -> str:
    return f"{run_prefix(run_id)}/batches/{iteration:05d}"


def checkpoint_prefix(run_id: str, version: int) -> str:
    """Trainer state after `version` policy updates (0: after the warm-up)."""
    return f"{run_prefix(run_id)}/checkpoints/{version:05d}"


def partial_checkpoints_prefix(run_id: str, version: int) -> str:
    """Trainer states inside the update to `version`."""
    return f"{checkpoint_prefix(run_id, version)}-partial"


def partial_checkpoint_prefix(run_id: str, version: int, optimizer_step: int) -> str:
    """Trainer state after `optimizer_step` optimizer steps of the batch that leads to `version`."""
    return f"{partial_checkpoints_prefix(run_id, version)}/{optimizer_step:05d}"


def publication_prefix(run_id: str, version: int) -> str:
    return f"{run_prefix(run_id)}/publications/{version:05d}"


def latest_key(run_id: str) -> str:
    return f"{run_prefix(run_id)}/latest.json"


def validated_key(run_id: str) -> str:
    return f"{run_prefix(run_id)}/validated.json"


def iteration_report_key(run_id: str, iteration: int, extension: str) -> str:
    return f"{run_prefix(run_id)}/reports/iteration-{iteration:05d}.{extension}"


def run_report_key(run_id: str, extension: str) -> str:
    return f"{run_prefix(run_id)}/reports/run.{extension}"


def spool_prefix(run_id: str) -> str:
    """Metrics waiting for, or already forwarded to, the tracking server."""
    return f"{run_prefix(run_id)}/tracking"
