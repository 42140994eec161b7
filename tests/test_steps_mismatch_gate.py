"""An update on samples that are not the trained policy's fails above the configured bound."""

from steps import paths
from tests.fixtures_steps import RUN, TINY_CONFIG, StepRunner

BEFORE_TRAINING = ("plan", "rollout", "reward", "flush")


def prepare(steps: StepRunner, bound: str) -> None:
    # A truncated distribution: the trainer's, over the whole vocabulary, is far from it.
    config = TINY_CONFIG.replace("max_new_tokens = 4", "max_new_tokens = 4\ntop_p = 0.5")
    config = config.replace("[train.optimizer]", f"[train]\nmax_rollout_kl = {bound}\n[train.optimizer]")
    for result in (steps.init(config), *(steps.step(stage) for stage in BEFORE_TRAINING)):
        assert result.code == 0, result.log


def test_above_the_bound_the_update_is_a_data_error_and_is_not_kept(steps: StepRunner) -> None:
    prepare(steps, "1e-3")
    result = steps.step("train")
    assert result.code == 65
    assert "is above train.max_rollout_kl = 0.001: the samples are not of the policy that is trained" in result.log
    assert "Traceback" not in result.log
    assert steps.store.head(f"{paths.checkpoint_prefix(RUN, 1)}/manifest.json") is None


def test_below_the_bound_it_is_reported_and_trained(steps: StepRunner) -> None:
    prepare(steps, "100.0")
    assert steps.step("train").code == 0
