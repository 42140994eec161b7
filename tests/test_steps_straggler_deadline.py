"""The straggler deadline of a rollout: an iteration ends with what was sampled in time, and says what was left out."""

from steps import paths
from steps.adapters import ledger
from steps.adapters.leases import lease_unit, outstanding
from steps.adapters.stragglers import DROP_REASON
from tests.experience import worker
from tests.fixtures_steps import RUN, StepRunner, stage_argv

LONG_S = 3600.0


def test_unit_that_is_held_for_too_long_is_left_out_and_the_iteration_is_trained(steps: StepRunner) -> None:
    assert steps.init().code == 0
    assert steps.step("plan").code == 0
    held = lease_unit(steps.database, RUN, 1, "rollout", worker(9), LONG_S)
    assert held is not None
    result = steps.run([*stage_argv("rollout"), "--straggler-deadline", "1"])
    assert result.code == 0, result.log
    assert "units dropped: not sampled 1 s after the first was begun" in result.log
    assert outstanding(steps.database, RUN, 1, "rollout") == 0
    dropped = {draw.prompt_uid for draw in ledger.list_draws(steps.database, RUN, 1) if draw.drop_reason == DROP_REASON}
    assert dropped >= set(held.unit.prompt_uids)
    for stage in ("reward", "flush", "train", "publish", "evaluate", "report"):
        assert steps.step(stage).code == 0, stage
    assert DROP_REASON in steps.store.get_bytes(paths.run_report_key(RUN, "html")).decode()
