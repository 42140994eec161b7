"""Every step of an iteration, killed by SIGKILL before and after each of its durable writes, and run again.

The outcome must be that of a step that nobody disturbed: tables, objects, pointers, weights, and a clean audit. As each
step's outcome is the same, so is all that follows from it. docs/commit-points.md lists the writes; by default some of
the points are tried, with MOERL_TEST_COMMIT_POINTS=all all of them.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commit_points import Site, Write
from tests.fixtures_steps import REPOSITORY, RUN, STAGES, TINY_CONFIG, StepRunner, stage_argv
from workflows.local.warm_client import DEFAULT_PRELOAD, Preload, WarmServer

EVERY = 1 if os.environ.get("MOERL_TEST_COMMIT_POINTS") == "all" else 7
"""Of the points that are tried: a number that divides neither the writes of a unit nor those of a folder."""
CONFIG = (
    (
        TINY_CONFIG.replace("iterations = 2", "iterations = 3")
        .replace("lease_s = 2.0", "lease_s = 60.0")
        .replace("[model]", '[model]\ndtype = "bfloat16"')
        .replace("learning_rate = 1e-2", "learning_rate = 1e-4")
        .replace("optimizer_steps_per_epoch = 8", "optimizer_steps_per_epoch = 4")
    )
    + """
[train]
checkpoint_every = 1
keep_checkpoints = 1
[publish]
full_every = 4
"""
)
RANKS = CONFIG.replace("[publish]", "ranks = 2\n[moe]\ndispatcher = 'all_to_all'\n[publish]")
pytestmark = pytest.mark.timeout(1800)  # of all points, on a busy machine
PAGE = REPOSITORY / "docs" / "commit-points.md"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmServer]:
    preload = Preload(first=(*DEFAULT_PRELOAD.first, "tests.commit_recorder"))
    server = WarmServer(log=tmp_path_factory.mktemp("warm") / "server.log", cwd=REPOSITORY, preload=preload)
    yield server
    server.close()


def new_site(server: WarmServer, folder: Path) -> Site:
    (folder / "run").mkdir(parents=True)
    runner = StepRunner(server, folder / "steps", f"{folder}/run/store", f"sqlite:///{folder}/run/moerl.sqlite")
    runner.env["MOERL_CACHE_DIR"] = f"{folder}/run/cache"
    return Site(runner, folder / "run", folder / "saved")


INIT = ["steps.init_run", "--run", RUN, "--config"]
GROUPS = {
    "begin": (CONFIG, 0, ("init_run",)),
    "experience": (CONFIG, 1, ("plan", "rollout", "reward", "flush")),
    "update": (CONFIG, 1, ("train",)),
    "ranks": (RANKS, 1, ("train",)),
    # Here publish stores a delta to a delta, and deletes a checkpoint.
    "policy": (CONFIG, 3, ("publish", "evaluate", "report", "summary")),
}
"""Steps that come one after the other in one run, and the iteration that they are tried in."""


def command(step: str, config: str, iteration: int) -> list[str]:
    if step == "init_run":
        return [*INIT, config]
    return ["steps.report", "--run", RUN] if step == "summary" else stage_argv(step, iteration)


def arrive(site: Site, step: str, config: str, iteration: int) -> None:
    """Bring the run to where `step` of an iteration is to come."""
    if step == "init_run":
        return
    site.finish([*INIT, config])
    for earlier in range(1, iteration):
        for stage in STAGES:
            site.finish(stage_argv(stage, earlier))
    for stage in STAGES[: STAGES.index(step)]:
        site.finish(stage_argv(stage, iteration))


def documented(title: str) -> list[str]:
    """The writes in the table below a title of the page."""
    section = PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `(.*?)` \|", section, re.MULTILINE)


def try_points(site: Site, argv: list[str], writes: list[Write]) -> None:
    """Kill the step at its writes, each time in a run like the first one's."""
    expected = site.outcome()
    points = [(write, side) for write in writes for side in ("before", "after")]
    for write, side in [*points[::EVERY], points[-1]]:
        site.put_back()
        site.kill_at(argv, write, side)
        site.finish(argv)
        assert site.outcome() == expected, (write, side)


@pytest.mark.parametrize("group", GROUPS)
def test_a_step_killed_at_a_write_and_run_again_has_the_outcome_of_an_undisturbed_one(
    server: WarmServer, tmp_path: Path, group: str
) -> None:
    config, iteration, steps = GROUPS[group]
    site = new_site(server, tmp_path)
    arrive(site, steps[0], config, iteration)
    for step in steps:
        argv = command(step, config, iteration)
        site.save()
        writes = site.record(argv)
        title = f"{step} in ranks" if group == "ranks" else step
        assert list(dict.fromkeys(write.name for write in writes)) == documented(title), title
        try_points(site, argv, writes)


def test_the_page_has_every_step_of_a_campaign() -> None:
    titles = re.findall(r"^## (.*)$", PAGE.read_text(), re.MULTILINE)
    assert set(titles) >= {"init_run", *STAGES, "summary", "train in ranks"}
