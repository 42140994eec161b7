"""Real S3 servers on loopback, shared by the test processes of one session.

`python tests/s3_servers.py KIND STATE_DIR` supervises one server (KIND: radosgw or moto): it starts it on a free port,
writes `ready.json` (endpoint and keys) or `failed.txt`, and stops it when no process listed in STATE_DIR/users lives.
"""

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass
from pathlib import Path

ACCESS_KEY = "test-access-key"
SECRET_KEY = "test-secret-key"
START_TIMEOUT_S = 90.0
RADOSGW_PROGRAMS = ("radosgw", "radosgw-admin", "ceph-mon", "ceph-osd", "ceph", "monmaptool")

CEPH_CONF = """\
[global]
fsid = {fsid}
mon_host = v1:127.0.0.1:{mon_port}
mon_initial_members = a
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 8
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
mon_warn_on_pool_no_redundancy = false
mon_data_avail_crit = 1
mon_data_avail_warn = 2
run_dir = {folder}
admin_socket = {folder}/$name.asok
log_file = {folder}/$name.log
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
ms_bind_msgr2 = false
[mon.a]
mon_data = {folder}/mon
host = localhost
[osd]
osd_data = {folder}/osd
osd_objectstore = memstore
memstore_device_bytes = 4294967296
osd_memory_target = 1073741824
osd_class_update_on_start = false
osd_crush_update_on_start = false
[client.rgw]
rgw_data = {folder}/rgw
rgw_frontends = beast endpoint=127.0.0.1:{port}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class S3Server:
    """A running server: what a client needs to reach it."""

    kind: str
    endpoint: str
    access_key: str
    secret_key: str

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
        }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def require_radosgw() -> None:
    """Raise RuntimeError with the command that installs what is missing."""
    missing = [program for program in RADOSGW_PROGRAMS if shutil.which(program) is None]
    if missing:
        raise RuntimeError(f"{', '.join(missing)} not found; run: apt-get install -y radosgw ceph-mon ceph-osd")


def join_server(kind: str, state_dir: Path) -> S3Server:
    """Start the server of `state_dir`, or join the one that another process started; leave with `leave_server`."""
    if kind == "radosgw":
        require_radosgw()
    (state_dir / "users").mkdir(parents=True, exist_ok=True)
    with open(state_dir / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (state_dir / "users" / str(os.getpid())).touch()
        if not (state_dir / "ready.json").exists():
            _start_supervisor(kind, state_dir)
    return S3Server(**json.loads((state_dir / "ready.json").read_text()))


def leave_server(state_dir: Path) -> None:
    (state_dir / "users" / str(os.getpid())).unlink(missing_ok=True)


def wait_until_stopped(state_dir: Path) -> None:
    """Wait for the server that its last user has left; STATE_DIR may be removed then."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (state_dir / "stopped.txt").exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def _start_supervisor(kind: str, state_dir: Path) -> None:
    for left in ("stopped.txt", "failed.txt"):
        (state_dir / left).unlink(missing_ok=True)
    with open(state_dir / "supervisor.log", "w") as log:
        subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), kind, str(state_dir)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (state_dir / "ready.json").exists():
        if (state_dir / "failed.txt").exists() or time.monotonic() > deadline:
            raise RuntimeError(f"{kind} did not start: see {state_dir}/supervisor.log and the logs beside it")
        time.sleep(0.05)


def _run(*command: str, timeout_s: float = 60.0) -> None:
    subprocess.run(command, check=True, timeout=timeout_s)


def _spawn(*command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)


def _wait_for_http(endpoint: str, processes: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        for process in processes:
            if process.poll() is not None:
                raise RuntimeError(f"{process.args!r} ended with {process.returncode}")
        try:
            urllib.request.urlopen(endpoint, timeout=2).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _launch_moto(folder: Path, processes: list[subprocess.Popen[bytes]]) -> str:
    port = free_port()
    processes.append(_spawn(sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)))
    endpoint = f"http://127.0.0.1:{port}"
    _wait_for_http(endpoint, processes)
    return endpoint


def _launch_radosgw(folder: Path, processes: list[subprocess.Popen[bytes]]) -> str:
    port, mon_port, fsid = free_port(), free_port(), str(uuid.uuid4())
    for name in ("mon", "osd", "rgw"):
        (folder / name).mkdir()
    conf, monmap = str(folder / "ceph.conf"), str(folder / "monmap")
    Path(conf).write_text(CEPH_CONF.format(fsid=fsid, folder=folder, port=port, mon_port=mon_port))
    _run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v1:127.0.0.1:{mon_port}]", monmap)
    _run("ceph-mon", "-c", conf, "--mkfs", "-i", "a", "--monmap", monmap)
    processes.append(_spawn("ceph-mon", "-c", conf, "-i", "a", "-f"))
    _run("ceph", "-c", conf, "osd", "create", timeout_s=START_TIMEOUT_S)
    _run("ceph-osd", "-c", conf, "-i", "0", "--mkfs")
    _run("ceph", "-c", conf, "osd", "crush", "add", "0", "1", "host=localhost", "root=default")
    processes.append(_spawn("ceph-osd", "-c", conf, "-i", "0", "-f"))
    processes.append(_spawn("radosgw", "-c", conf, "-n", "client.rgw", "-f"))
    endpoint = f"http://127.0.0.1:{port}"
    _wait_for_http(endpoint, processes)
    keys = ("--access-key", ACCESS_KEY, "--secret-key", SECRET_KEY)
    _run("radosgw-admin", "-c", conf, "user", "create", "--uid", "test", "--display-name", "test", *keys)
    return endpoint


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _abandoned(state_dir: Path) -> bool:
    """Whether no user is left; the server then can't be joined any more."""
    with open(state_dir / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if any(_alive(int(user.name)) for user in (state_dir / "users").iterdir()):
            return False
        (state_dir / "ready.json").unlink()
        return True


def _supervise(kind: str, state_dir: Path) -> None:
    processes: list[subprocess.Popen[bytes]] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    folder = Path(os.path.realpath(os.environ.get("TMPDIR", "/tmp"))) / f"s3-{uuid.uuid4().hex[:12]}"
    folder.mkdir()  # not below STATE_DIR: the path of a UNIX socket is at most 107 bytes
    try:
        launch = {"moto": _launch_moto, "radosgw": _launch_radosgw}[kind]
        ready = {"kind": kind, "endpoint": launch(folder, processes)}
        ready |= {"access_key": ACCESS_KEY, "secret_key": SECRET_KEY}
        (state_dir / "ready.tmp").write_text(json.dumps(ready))
        (state_dir / "ready.tmp").rename(state_dir / "ready.json")
        while not _abandoned(state_dir):
            time.sleep(0.2)
    except BaseException:
        (state_dir / "failed.txt").touch()
        raise
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()
        for log in folder.glob("*.log"):
            shutil.copy(log, state_dir)
        shutil.rmtree(folder, ignore_errors=True)
        (state_dir / "ready.json").unlink(missing_ok=True)
        (state_dir / "stopped.txt").touch()


if __name__ == "__main__":
    _supervise(sys.argv[1], Path(sys.argv[2]))
