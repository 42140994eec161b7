"""Audit of what was planned: the configuration, the frozen data set, the cursor, the draws and the rollout units."""

from steps import paths
from steps.adapters.audit_queries import Snapshot
from steps.adapters.runs import IterationRow, PromptDraw
from steps.adapters.store import NotFound, Store, sha256_of_bytes
from steps.audit_findings import Findings
from steps.config import RunConfig
from steps.config_loader import config_from_json
from steps.errors import StepError
from steps.seeds import draw_prompts
from steps.tasks.frozen import FrozenDataset, dataset_to_jsonl


def check_config(found: Findings, snapshot: Snapshot, store: Store) -> RunConfig:
    """The configuration in force; raises DataError when there is no such run, ConfigError when it can't be read."""
    run = snapshot.run()
    config = config_from_json(run.config_json)
    found.equal(
        "config", f"run {run.run_id}", "config_hash", run.config_hash, sha256_of_bytes(run.config_json.encode())
    )
    key = paths.config_key(run.run_id)
    stored = read_object(found, "config", store, key)
    if stored is not None:
        same = stored.decode(errors="replace") == run.config_json
        found.require(same, "config", store.uri_of(key), "differs from the configuration in the database")
    return config


def read_object(found: Findings, check: str, store: Store, key: str) -> bytes | None:
    """The bytes of an object; None, and a finding of `check`, when it is missing."""
    try:
        return store.get_bytes(key)
    except NotFound:
        found.require(False, check, store.uri_of(key), "is missing")
        return None


def check_dataset(found: Findings, run_id: str, store: Store) -> FrozenDataset | None:
    """The frozen training prompts; None when they can't be read."""
    key = paths.dataset_key(run_id, "train")
    data = read_object(found, "data-set", store, key)
    if data is None:
        return None
    try:
        dataset = FrozenDataset(data)
        dataset.select(dataset.train_uids)  # every row's uid matches its content
    except StepError as error:
        found.require(False, "data-set", store.uri_of(key), str(error))
        return None
    unique = len(set(dataset.train_uids)) == len(dataset.train_uids)
    found.require(unique, "data-set", store.uri_of(key), "holds a prompt twice")
    return dataset


def check_cursor(found: Findings, rows: list[IterationRow]) -> None:
    """Iterations are numbered from 1 without a gap, and each draws where the one before ended."""
    cursor = 0
    for number, row in enumerate(rows, start=1):
        where = f"iteration {row.iteration}"
        found.equal("cursor", where, "its number", row.iteration, number)
        found.equal("cursor", where, "cursor_start", row.cursor_start, cursor)
        found.equal("cursor", where, "cursor_end - cursor_start", row.cursor_end - row.cursor_start, row.num_prompts)
        cursor = row.cursor_end


def check_draws(
    found: Findings, row: IterationRow, draws: list[PromptDraw], config: RunConfig, dataset: FrozenDataset | None
) -> None:
    """The prompts drawn are those that the seed, the frozen data set and the cursor give."""
    where = f"iteration {row.iteration}"
    positions = [draw.position for draw in draws]
    found.equal("draws", where, "number of draws", len(draws), row.num_prompts)
    expected_positions = list(range(row.cursor_start, row.cursor_end))
    found.require(positions == expected_positions, "draws", where, "positions are not those of the cursor, each once")
    if dataset is None:
        return
    count = config.rollout.prompts_per_iteration
    expected = draw_prompts(dataset.train_uids, config.seed, row.cursor_start, count)
    for draw, uid in zip(draws, expected, strict=False):
        found.equal("draws", f"{where}, position {draw.position}", "prompt", draw.prompt_uid, uid)


def check_epochs(found: Findings, draws: list[PromptDraw], epoch_size: int) -> None:
    """No epoch draws a prompt twice."""
    seen: set[tuple[int, str]] = set()
    for draw in draws:
        epoch = draw.position // epoch_size
        again = (epoch, draw.prompt_uid) in seen
        found.require(not again, "epochs", f"prompt {draw.prompt_uid}", f"is drawn twice in epoch {epoch}")
        seen.add((epoch, draw.prompt_uid))


def check_prompts_file(
    found: Findings, run_id: str, store: Store, row: IterationRow, draws: list[PromptDraw], dataset: FrozenDataset
) -> None:
    """Workers read the prompts that were drawn."""
    key = paths.iteration_prompts_key(run_id, row.iteration)
    data = read_object(found, "prompts-file", store, key)
    if data is None:
        return
    try:
        expected = dataset_to_jsonl(dataset.select([draw.prompt_uid for draw in draws]))
    except StepError:
        return  # a prompt that is not in the data set: a finding of "draws"
    found.require(data == expected, "prompts-file", store.uri_of(key), "is not the prompts that were drawn")


def check_units(
    found: Findings, row: IterationRow, draws: list[PromptDraw], units: dict[int, tuple[str, ...]], unit_size: int
) -> None:
    """The rollout units hold each drawn prompt once, in order, `unit_size` to a unit."""
    where = f"iteration {row.iteration}"
    uids = [draw.prompt_uid for draw in draws]
    expected = [tuple(uids[start : start + unit_size]) for start in range(0, len(uids), unit_size)]
    found.equal("units", where, "number of rollout units", len(units), row.num_units)
    for number, unit_uids in enumerate(expected):
        same = units.get(number) == unit_uids
        found.require(same, "units", f"{where}, rollout unit {number}", "does not hold the prompts of its place")
    for draw in draws:
        inside = draw.prompt_uid in units.get(draw.unit, ())
        found.require(inside, "units", f"{where}, prompt {draw.prompt_uid}", f"is not in its unit {draw.unit}")
