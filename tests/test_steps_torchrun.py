"""torchrun's exit code is that of the rank that failed, so that a platform can tell what to do about it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from tests.fixtures_steps import REPOSITORY, RUN, STAGES, TINY_CONFIG, StepRunner
from workflows.iteration import TRAIN
from workflows.jobset import gang_manifest
from workflows.local.variables import substitute
from workflows.platform import CPU

OPTIONS = ["--nproc-per-node=2", "--master-port=0", "--no-python", "sh", "-c"]
CODES = {
    "exit 0": 0,
    '[ "$RANK" = 0 ] || exit 78; exec sleep 1000': 78,
    '[ "$RANK" = 1 ] || exit 75; exec sleep 1000': 75,
    """[ "$RANK" = 1 ] || sh -c 'kill -KILL $PPID'; exec sleep 1000""": 137,
}
"""What a rank does -> how torchrun is to end."""


def gang_container(**parameters: str) -> dict[str, Any]:
    """The container of the JobSet's pods as Argo fills it in."""
    scope = {f"workflow.parameters.{name.replace('_', '-')}": value for name, value in parameters.items()}
    fixed = dict.fromkeys(("queue", "image", "environment", "credentials"), "")
    scope |= {f"workflow.parameters.{name}": value for name, value in fixed.items()} | {"workflow.name": "tiny-00001"}
    manifest = yaml.safe_load(substitute(gang_manifest(TRAIN, CPU), scope, "test"))
    pod = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert isinstance(container, dict)
    return container


def test_a_rank_that_fails_ends_the_others_and_gives_its_code() -> None:
    program = (
        "import json, sys; from steps.torchrun import run; options, scripts = map(json.loads, sys.argv[1:]); "
        "print(json.dumps([run([*options, script]) for script in scripts]))"
    )
    arguments = [json.dumps(OPTIONS), json.dumps(list(CODES))]
    output = subprocess.run([sys.executable, "-c", program, *arguments], cwd=REPOSITORY, capture_output=True, text=True)
    assert output.returncode == 0, output.stderr
    assert json.loads(output.stdout) == list(CODES.values())


def test_pods_of_the_gang_train_together_with_the_words_of_the_manifest(steps: StepRunner, tmp_path: Path) -> None:
    """Also that torchrun does not take the step's --run for its own --run-path."""
    started = steps.init(TINY_CONFIG + "\n[train]\nranks = 2\n[moe]\ndispatcher = 'all_to_all'\n")
    assert started.code == 0, started.log
    for stage in STAGES[: STAGES.index("train")]:
        assert steps.step(stage).code == 0, stage
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    container = gang_container(run=RUN, iteration="00001", training_nodes="2", ranks_per_node="1")
    local = {r"--master-addr=.*": "--master-addr=127.0.0.1", r"--master-port=.*": f"--master-port={port}"}
    words = [next((new for old, new in local.items() if re.fullmatch(old, word)), word) for word in container["args"]]
    pods = [
        subprocess.Popen(
            [sys.executable, *container["command"][1:], *(w.replace("$(JOB_COMPLETION_INDEX)", str(n)) for w in words)],
            cwd=REPOSITORY,
            env={
                **os.environ,
                **steps.env,
                "MOERL_OUTPUTS_DIR": str(tmp_path / f"outputs-{n}"),
                "OMP_NUM_THREADS": "1",
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(2)
    ]
    logs = [pod.communicate(timeout=300)[1] for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], "\n".join(logs)
    assert (tmp_path / "outputs-0" / "checkpoint-uri").read_text()
    assert steps.step("publish").code == 0


def test_sigterm_leaves_the_ranks_time_to_save_and_ends_with_75(tmp_path: Path) -> None:
    save = f"sleep 0.3; touch {tmp_path}/saved-$RANK; exit 75"
    rank = f'trap "{save}" TERM; touch {tmp_path}/ready-$RANK; while :; do sleep 0.05; done'
    agent = subprocess.Popen([sys.executable, "-m", "steps.torchrun", *OPTIONS, rank], cwd=REPOSITORY)
    while len(list(tmp_path.glob("ready-*"))) < 2:
        time.sleep(0.01)
    agent.send_signal(signal.SIGTERM)
    assert agent.wait() == 75
    assert len(list(tmp_path.glob("saved-*"))) == 2
