"""Whatever a verifier does costs its own sample and no other, and it reaches nothing that is not its own."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from steps.config import RewardConfig, TaskConfig
from steps.errors import ConfigError, Interrupted
from steps.tasks.dataset import make_prompt
from steps.tasks.sandbox import Scorer
from steps.tasks.scoring import Outcome

ACT, TOLD = (TaskConfig(verifier=f"tests.hostile_verifiers:{name}") for name in ("act", "told"))
REWARD = RewardConfig(timeout_s=60.0, memory_mib=512)
IMPATIENT = RewardConfig(timeout_s=1.0, memory_mib=512)
FINE: Outcome = ("ok", 1.0, "")


def outcomes(responses: list[str], *, reward: RewardConfig = REWARD, **meta: Any) -> list[Outcome]:
    with Scorer(ACT, reward) as scorer:
        return scorer.score([(make_prompt("q", "a", meta), response) for response in responses])


def outcome(response: str, *, reward: RewardConfig = REWARD, **meta: Any) -> Outcome:
    """Of one sample between two others, which must not notice."""
    first, middle, last = outcomes(["fine", response, "fine"], reward=reward, **meta)
    assert (first, last) == (FINE, FINE)
    return middle


@pytest.mark.parametrize(
    ("verifier", "answer", "wrong"),
    [
        ("exact", "12", "13"),
        ("numeric", "12", "13"),
        ("regex", "[0-9]+2", "13"),
        ("per_position", "12", "no"),
        ("math_verify", "$12$", "$13$"),
    ],
)
def test_our_own_verifiers_score_in_the_sandbox(verifier: str, answer: str, wrong: str) -> None:
    with Scorer(TaskConfig(verifier=verifier), REWARD) as scorer:
        prompt = make_prompt("q", answer)
        assert scorer.score([(prompt, "12"), (prompt, wrong)]) == [FINE, ("ok", 0.0, "")]


@pytest.mark.parametrize("response", ["hang", "hang in C", "stop"])
def test_a_verifier_that_hangs_is_a_timeout(response: str) -> None:
    assert outcome(response, reward=IMPATIENT) == ("timeout", None, "no result within 1 s")


def test_processor_time_is_limited_too() -> None:
    reward = RewardConfig(timeout_s=2.0, memory_mib=2048)
    status, value, _ = outcomes(["burn", "fine"], reward=reward)[0]
    assert (status, value) == ("timeout", None)


@pytest.mark.parametrize(
    ("response", "detail"),
    [
        ("eat memory", "MemoryError"),
        ("segfault", "the scoring process was killed by SIGSEGV"),
        ("exit", "the scoring process ended with code 3"),
        ("garbage", "the scoring process wrote something that is no answer"),
        ("endless line", "the scoring process wrote something that is no answer"),
        ("close pipes", "the scoring process ended with code"),
        ("kill parent", "PermissionError"),
        ("kill everybody", "PermissionError"),
        ("limit parent", "PermissionError"),
        ("fork", "PermissionError"),
        ("run program", "PermissionError"),
        ("exec", "PermissionError"),
        ("large file", "OSError: [Errno 27] File too large"),
    ],
)
def test_a_verifier_that_misbehaves_is_an_error_of_its_own_sample(response: str, detail: str) -> None:
    status, value, found = outcome(response)
    assert (status, value) == ("error", None)
    assert found.startswith(detail)


def test_what_a_verifier_prints_is_no_answer_and_is_cut_short(capfd: pytest.CaptureFixture[str]) -> None:
    assert outcome("print") == FINE
    shown = capfd.readouterr().err
    assert "noise" in shown and "is not shown" in shown
    assert len(shown) < 600_000


def test_answers_to_questions_that_were_not_asked_count_for_nothing() -> None:
    with Scorer(ACT, REWARD) as scorer:
        prompt = make_prompt("q", "a")
        scorer.score([(prompt, "forge")])
        assert scorer.score([(prompt, "exit"), (prompt, "fine")])[1] == FINE
        assert scorer.score([(prompt, "exit")])[0][0] == "error"


def test_what_an_earlier_sample_left_behind_does_not_count_against_a_later_one() -> None:
    assert outcomes(["leak"] * 8) == [FINE] * 8


def test_many_samples_keep_their_order() -> None:
    prompts = [make_prompt(f"{n}>", str(n)) for n in range(700)]
    with Scorer(TaskConfig(), RewardConfig()) as scorer:
        found = scorer.score([(prompt, str(n - n % 3)) for n, prompt in enumerate(prompts)])
        assert [value for _, value, _ in found] == [float(n % 3 == 0) for n in range(700)]
        assert scorer.score([]) == []


def test_texts_of_every_kind_arrive() -> None:
    texts = ["", "\ud800", "a\nb\r\u2028", "\x00", '"\\', "x" * 300_000, "é🎉"]
    with Scorer(TaskConfig(), RewardConfig()) as scorer:
        found = scorer.score([(make_prompt("q", text), text) for text in texts])
    assert found == [FINE] * len(texts)


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def datagrams(tmp_path: Path) -> Iterator[str]:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(path)
        yield path


def test_there_is_no_network(listener: int, datagrams: str) -> None:
    assert outcome("connect", port=listener)[2].startswith("PermissionError")
    assert outcome("connect unix", path=datagrams)[2].startswith("PermissionError")
    assert outcome("io_uring") == ("ok", 0.0, "")


def test_threads_and_a_scratch_folder_are_there(tmp_path: Path) -> None:
    assert outcomes(["threads", "scratch"]) == [FINE, FINE]
    with Scorer(ACT, REWARD) as scorer:
        for _ in range(2):
            assert scorer.score([(make_prompt("q", "a"), "leave a file")]) == [FINE]


@pytest.mark.parametrize("action", ["write", "remove", "chmod", "truncate"])
def test_nothing_outside_the_scratch_folder_changes(action: str, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    if action == "remove":
        target.mkdir()
        (target / "file").write_text("kept")
    else:
        target.write_text("kept")
    mode = target.stat().st_mode
    assert outcome(action, path=str(target))[0] == "error"
    assert target.stat().st_mode == mode
    assert (target / "file" if action == "remove" else target).read_text() == "kept"


def test_secrets_in_files_are_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the working directory, where a user's module lies, hidden files and the run's own folder are none of its."""
    private = tmp_path / "runs" / "store"
    private.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    paths = {
        ".env": False,
        "runs/store/object": False,
        "data.txt": True,
        "package/data.txt": True,
        f"/proc/{os.getpid()}/environ": False,
        "/proc/self/environ": False,
        "/etc/passwd": False,
        "/proc/1/cmdline": False,
    }
    Path("package").mkdir()
    Path("link").symlink_to(private)
    for name in paths:
        if not name.startswith("/"):
            Path(name).write_text("text")
    with Scorer(ACT, REWARD, private=[private]) as scorer:
        found = scorer.score([(make_prompt("q", "a", {"path": name}), "read") for name in [*paths, "link/object"]])
    assert [status == "ok" for status, _, _ in found] == [*paths.values(), False]


def fact(name: str) -> Any:
    with Scorer(TOLD, REWARD) as scorer:
        detail = scorer.score([(make_prompt("q", "a"), name)])[0][2]
    return json.loads(detail.removeprefix("RuntimeError: "))


def test_secrets_in_the_environment_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "MOERL_DATABASE_URL", "MLFLOW_TRACKING_PASSWORD", "ANYTHING_ELSE"):
        monkeypatch.setenv(name, "secret")
    known = {"PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "HOME", "TMPDIR", "PYTHONHASHSEED"}
    assert set(fact("environment")) <= known | {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"}


def test_no_descriptor_of_the_step_and_no_privilege_is_inherited(tmp_path: Path) -> None:
    with open(tmp_path / "open", "w") as file:
        os.set_inheritable(file.fileno(), True)
        assert len(fact("descriptors")) == 5  # three standard ones and the two pipes
    assert fact("capabilities") & ~0b110 == 0


def test_without_a_place_for_a_scratch_folder_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> str:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    assert [status for status, _, _ in outcomes(["fine", "scratch"])] == ["ok", "error"]


def test_the_process_ends_with_the_scorer(tmp_path: Path) -> None:
    program = (
        "import os, signal\n"
        "from steps.config import RewardConfig, TaskConfig\n"
        "from steps.tasks.sandbox import Scorer\n"
        "scorer = Scorer(TaskConfig(), RewardConfig())\n"
        "scorer.load()\n"
        "print(scorer._process._popen.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    wait_until(lambda: not alive(int(done.stdout)))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.01)


def test_an_interruption_does_not_wait_for_the_verifier() -> None:
    calls: list[int] = []

    def check() -> None:
        calls.append(0)
        if len(calls) > 10:
            raise Interrupted("SIGTERM")

    reward = RewardConfig(timeout_s=1e6)
    with pytest.raises(Interrupted), Scorer(ACT, reward, check=check) as scorer:
        scorer.score([(make_prompt("q", "a"), "hang")])


def test_a_verifier_that_cannot_be_loaded_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "dies_at_import.py").write_text("import os\nos._exit(5)\n")
    (tmp_path / "reads_secrets.py").write_text("open('/etc/passwd')\n")
    for module, reason in {
        "dies_at_import": "the scoring process ended while it loaded it: the scoring process ended with code 5",
        "reads_secrets": "importing reads_secrets failed: PermissionError",
        "nowhere_to_be_found": "there is no module nowhere_to_be_found",
    }.items():
        with (
            Scorer(TaskConfig(verifier=f"{module}:score"), RewardConfig()) as scorer,
            pytest.raises(ConfigError) as told,
        ):
            scorer.load()
        assert reason in str(told.value)
        assert "\n" not in str(told.value)


def test_what_is_in_effect_is_recorded() -> None:
    with Scorer(TaskConfig(), RewardConfig(sandbox="required")) as scorer:
        scorer.load()
        report = scorer.report()
    assert report["requested"] == "required"
    assert set(report["effective"]) == {"limits", "no_new_privs", "landlock", "seccomp"}
    assert all(report["effective"].values())


WITHOUT_LANDLOCK = """
import ctypes
from steps.tasks import sandbox_seccomp as s
for table in (s._DENIED, s._ON_ITSELF, s._ON_ITSELF_OR_ZERO):
    table.clear()
s._CLONE = (999, 999)
s._DENIED["landlock_create_ruleset"] = (444, 444)
ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)
s.install_filter()
from steps.config import RewardConfig, TaskConfig
from steps.errors import ConfigError
from steps.tasks.sandbox import Scorer
for mode in ("best-effort", "required"):
    with Scorer(TaskConfig(), RewardConfig(sandbox=mode)) as scorer:
        try:
            scorer.load()
            print(scorer.report())
        except ConfigError as error:
            print(error)
"""


def test_a_kernel_that_lacks_a_measure_is_recorded_or_refused() -> None:
    """As in a pod whose own seccomp profile keeps Landlock away."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_LANDLOCK], stdout=subprocess.PIPE, text=True, check=True)
    best_effort, required = done.stdout.splitlines()
    assert "'landlock': 'Operation not permitted'" in best_effort
    assert "'seccomp': True" in best_effort
    assert required.startswith("reward.sandbox = required: not in effect on this node: landlock")


def test_with_the_sandbox_off_only_time_is_limited(listener: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "needed")
    reward = RewardConfig(timeout_s=1.0, sandbox="off")
    found = outcomes(["connect", "fork", "hang", "exit", "fine"], reward=reward, port=listener)
    assert [status for status, _, _ in found] == ["ok", "ok", "timeout", "error", "ok"]
    assert outcomes(["has API_KEY"], reward=reward) == [FINE]
