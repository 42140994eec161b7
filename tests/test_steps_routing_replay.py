"""Routing replay through the steps: what the sampler records is what the trainer is given."""

from moe.batch import TrainingBatch
from steps import paths
from steps.adapters import ledger
from steps.adapters.publications_manifest import read_manifest
from steps.batches import BATCH_FILE
from tests.fixtures_steps import RUN, TINY_CONFIG, StepRunner


def batch_of(steps: StepRunner) -> TrainingBatch:
    prefix = paths.batch_prefix(RUN, 1)
    key = read_manifest(steps.store, prefix).key_of(prefix, BATCH_FILE)
    return TrainingBatch.from_bytes(steps.store.get_bytes(key))


def test_the_samplers_experts_reach_the_trainer(steps: StepRunner) -> None:
    started = steps.init(TINY_CONFIG + '[moe]\nrouting_replay = "sampler"\n')
    assert started.code == 0, started.log
    steps.iterate()
    batch = batch_of(steps)
    assert batch.prompt_routing_PLK is not None and batch.response_routing_RLK is not None
    assert batch.prompt_routing_PLK.shape == (len(batch.prompt_ids), 1, 2)
    last = batch.response_lens_N.cumsum(0) - 1
    known = (batch.response_routing_RLK >= 0).all(dim=-1).all(dim=-1)
    assert not bool(known[last].any())
    assert int(known.sum()) == len(batch.response_ids) - len(batch)
    assert [row.policy_version for row in ledger.list_publications(steps.database, RUN)] == [0, 1]


def test_a_run_without_the_samplers_replay_records_nothing(steps: StepRunner) -> None:
    started = steps.init(TINY_CONFIG + '[moe]\nrouting_replay = "trainer"\n')
    assert started.code == 0, started.log
    steps.iterate()
    assert batch_of(steps).prompt_routing_PLK is None
