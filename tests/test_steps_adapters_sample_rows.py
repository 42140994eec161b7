"""steps/adapters/sample_rows.py and steps/sample_routing.py: a sample from the sampler to the batch."""

import struct
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
import torch
from alembic import command
from alembic.config import Config

from steps import paths, sample_routing
from steps.adapters import migrations
from steps.adapters.buffer import unit_samples
from steps.adapters.database import migrate, open_database
from steps.adapters.local_store import LocalStore
from steps.adapters.sample_rows import SAMPLE_COLUMNS, check_samples, decode_sample, sample_values
from steps.adapters.store import NotFound
from steps.adapters.tables import iterations, prompt_draws, rewards, runs, samples
from steps.batches import training_batch
from steps.errors import DataError
from steps.records import Lease, Reward, Sample, SampleRouting, ScoredSample, WorkUnit
from tests.experience import make_reward, make_sample, worker

RUN = "run-1"
LEASE = Lease(
    unit=WorkUnit(run_id=RUN, iteration=1, kind="rollout", unit=0, prompt_uids=("a",)),
    token="token",
    attempt=1,
    worker=worker(0),
)


def routed(layers: int, index: int = 0) -> Sample:
    """Three prompt and three response tokens, two experts a token."""
    ids = torch.arange(6 * layers * 2, dtype=torch.int16).view(6, layers, 2)
    return replace(make_sample("a", index), routing=sample_routing.from_expert_ids(ids))


def scored(sample: Sample) -> ScoredSample:
    reward: Reward = make_reward(sample.prompt_uid, sample.sample_index)
    return ScoredSample(sample=sample, reward=reward)


def through_a_row(sample: Sample) -> Sample:
    values = sample_values(LEASE, sample) | {"prompt_ids": struct.pack("<3i", *sample.prompt_ids)}
    return decode_sample([values[column.name] for column in SAMPLE_COLUMNS])


def test_a_row_holds_the_sample_with_or_without_routing() -> None:
    spilled = SampleRouting(num_layers=48, top_k=8, ids=b"", uri="s3://bucket/x.bin")
    several_turns = replace(make_sample("a", 0), mask_T=(True, False, True))
    for sample in (make_sample("a", 0), routed(2), replace(make_sample("a", 0), routing=spilled), several_turns):
        assert replace(through_a_row(sample), seed=sample.seed) == sample


def test_expert_ids_survive_as_bytes() -> None:
    ids = torch.tensor([[[0, 300], [-1, 32767]], [[-1, -1], [5, 4]]], dtype=torch.int16)
    routing = sample_routing.from_expert_ids(ids)
    assert (routing.num_layers, routing.top_k, len(routing.ids)) == (2, 2, 16)
    assert routing.ids[:4] == b"\x00\x00\x2c\x01"
    assert torch.equal(sample_routing.to_expert_ids(routing), ids)


def test_small_routing_stays_and_large_routing_goes_to_the_store_once(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    small = routed(2)
    assert sample_routing.spill(store, RUN, small) is small
    assert store.list("") == []
    large = routed(sample_routing.INLINE_BYTES // 24 + 1)
    spilled = sample_routing.spill(store, RUN, large)
    assert sample_routing.spill(store, RUN, replace(large, sample_index=1)).routing == spilled.routing
    (written,) = store.list(f"runs/{RUN}/routing")
    assert spilled.routing is not None and large.routing is not None
    assert (spilled.routing.ids, spilled.routing.uri) == (b"", store.uri_of(written.key))
    assert store.get_bytes(written.key) == large.routing.ids
    assert sample_routing.fetch(store, RUN, scored(through_a_row(spilled))).sample.routing == large.routing
    assert sample_routing.fetch(store, RUN, scored(small)).sample is small


def test_a_lost_or_changed_object_of_the_store_is_an_error_that_names_it(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    spilled = sample_routing.spill(store, RUN, routed(sample_routing.INLINE_BYTES // 24 + 1))
    assert spilled.routing is not None
    key = paths.routing_key(RUN, Path(spilled.routing.uri).stem)
    store.put_bytes(key, b"other")
    with pytest.raises(DataError, match=key):
        sample_routing.fetch(store, RUN, scored(spilled))
    store.delete([key])
    with pytest.raises(NotFound, match=key):
        sample_routing.fetch(store, RUN, scored(spilled))


def test_the_batch_carries_the_routing_and_marks_samples_without() -> None:
    batch = training_batch([scored(routed(2, 0)), scored(make_sample("a", 1))])
    assert batch.prompt_routing_PLK is not None and batch.response_routing_RLK is not None
    assert batch.prompt_routing_PLK.shape == (6, 2, 2)
    assert batch.response_routing_RLK[:3].flatten().tolist() == list(range(12, 24))
    assert bool((batch.response_routing_RLK[3:] == -1).all())
    assert training_batch([scored(make_sample("a", 0))]).prompt_routing_PLK is None


def test_samples_of_different_models_make_no_batch() -> None:
    with pytest.raises(DataError, match="routings of different models"):
        training_batch([scored(routed(2, 0)), scored(routed(1, 1))])


def test_samples_from_before_routing_was_stored_are_still_there_after_the_upgrade(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/old.sqlite"
    sample = make_sample("a", 0)
    key = {"run_id": RUN, "iteration": 1}
    zeros = {"created_at": 0.0, "policy_version": 0, "cursor_start": 0, "cursor_end": 1, "num_prompts": 1}
    later = {"routing", "routing_uri", "mask"}
    row = {name: value for name, value in sample_values(LEASE, sample).items() if name not in later}
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        config = Config()
        config.set_main_option("script_location", migrations.__path__[0])
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        connection.execute(runs.insert().values(run_id=RUN, config_hash="", created_at=0.0, config_json="{}"))
        connection.execute(iterations.insert().values(**key, **zeros, num_units=1))
        prompt = {"prompt_uid": "a", "position": 0, "unit": 0, "status": "drawn"}
        connection.execute(prompt_draws.insert().values(**key, **prompt, prompt_ids=struct.pack("<3i", 1, 7, 8)))
        connection.execute(samples.insert().values(**row))
        score = {"prompt_uid": "a", "sample_index": 0, "status": "ok", "value": 1.0, "detail": "", "worker": "w"}
        connection.execute(rewards.insert().values(**key, **score))
    engine.dispose()
    migrate(url)
    with open_database(url).read() as connection:
        assert connection.execute(sa.select(rewards.c.value)).scalar_one() == 1.0
    assert unit_samples(open_database(url), RUN, 1, ["a"]) == [sample]


@pytest.mark.parametrize("mask_T", [(), (True,), (False, False, False)])
def test_a_mask_that_does_not_fit_is_refused(mask_T: tuple[bool, ...]) -> None:
    with pytest.raises(ValueError, match="sample a/0: mask_T needs 3 values"):
        check_samples(LEASE, [replace(make_sample("a", 0), mask_T=mask_T)])


def test_a_batch_marks_sampled_tokens_only_where_a_sample_does() -> None:
    single, several = scored(make_sample("a", 0)), scored(replace(make_sample("a", 1), mask_T=(True, False, True)))
    assert training_batch([single]).sampled is None
    sampled = training_batch([single, several]).sampled
    assert sampled is not None and sampled.tolist() == [True, True, True, True, False, True]
