"""What whoever submits may say about the training: its nodes, and the dispatcher of the run."""

import pytest

from steps import paths
from steps.config_loader import config_from_json
from steps.errors import ConfigError
from steps.init_run import training_layout
from tests.fixtures_steps import RUN, TINY_CONFIG, StepRunner


@pytest.mark.parametrize(
    ("ranks", "nodes", "most", "layout"),
    [
        (1, 0, 0, (1, 1)),
        (4, 0, 0, (1, 4)),
        (4, 2, 0, (2, 2)),
        (1, 0, 8, (1, 1)),
        (8, 0, 8, (1, 8)),
        (16, 0, 8, (2, 8)),
        (12, 0, 8, (2, 6)),
        (16, 4, 8, (4, 4)),
    ],
)
def test_ranks_are_spread_evenly_over_as_few_nodes_as_hold_them_or_over_those_asked_for(
    ranks: int, nodes: int, most: int, layout: tuple[int, int]
) -> None:
    assert training_layout(ranks, nodes, most) == layout


@pytest.mark.parametrize(
    ("ranks", "nodes", "most", "message"),
    [
        (1, 2, 0, "train.ranks = 1: must be a multiple of training-nodes = 2"),
        (17, 0, 8, "train.ranks = 17: must be a multiple of training-nodes = 3"),
        (16, 1, 8, "training-nodes = 1: 16 of train.ranks = 16 on each node, which has 8 GPUs; use 2 nodes"),
    ],
)
def test_ranks_that_do_not_fit_the_nodes_are_refused(ranks: int, nodes: int, most: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        training_layout(ranks, nodes, most)


def init(steps: StepRunner, *options: str) -> list[str]:
    return ["steps.init_run", "--run", RUN, "--config", TINY_CONFIG, *options]


def test_init_tells_the_nodes_and_ranks_and_freezes_the_dispatcher_that_was_asked_for(steps: StepRunner) -> None:
    config = TINY_CONFIG + "\n[train]\nranks = 2\n"
    argv = ["steps.init_run", "--run", RUN, "--config", config]
    result = steps.run([*argv, "--dispatcher", "all_to_all", "--training-nodes", "2", "--most-ranks-per-node", "8"])
    assert result.code == 0, result.log
    assert (result.outputs["training-nodes"], result.outputs["ranks-per-node"]) == ("2", "1")
    frozen = config_from_json(steps.store.get_bytes(paths.config_key(RUN)).decode())
    assert frozen.moe.dispatcher == "all_to_all"


def test_dispatcher_from_the_configuration_is_left_as_it_is(steps: StepRunner) -> None:
    result = steps.run(init(steps, "--dispatcher", "from-config"))
    assert result.code == 0, result.log
    assert config_from_json(steps.store.get_bytes(paths.config_key(RUN)).decode()).moe.dispatcher == "local"


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--dispatcher", "pigeon"), 64, "--dispatcher: invalid choice: 'pigeon'"),
        (("--training-nodes", "3"), 78, "train.ranks = 1: must be a multiple of training-nodes = 3"),
        (("--training-nodes", "-1"), 64, "--training-nodes"),
    ],
)
def test_wrong_options_end_with_their_class_before_anything_is_made(
    steps: StepRunner, options: tuple[str, ...], code: int, words: str
) -> None:
    result = steps.run(init(steps, *options))
    assert result.code == code
    assert words in result.log
    assert "Traceback" not in result.log
    assert steps.store.head(paths.config_key(RUN)) is None
