"""Keep one vLLM or SGLang server beside the workers: start it, put publications into it, prove them, restart it.

Workers ask this process (JSON over HTTP) to serve a policy version, and then sample from the server itself. The first
one that asks for another version has it loaded in place while the others wait. Nothing is served that the probe of the
publication does not confirm. In a cluster: one of these in each pod of the fleet, `rollout.server.url` names them. On a
single machine the first worker starts one, and it ends when it has not been used for a while.
"""

import contextlib
import json
import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from steps.adapters import retries
from steps.adapters.store import open_store
from steps.arguments import StepParser, natural_int
from steps.engine_locks import HostFiles, run_identity
from steps.engine_serving import PublicationServer
from steps.engine_transport import ExchangeDowngraded
from steps.entrypoint import RankContext, explain
from steps.environment import read_environment
from steps.errors import ConfigError, StepError
from steps.interruption import Interruption
from steps.paths import validate_run_id

STEP = "engine_host"
LONGEST_REQUEST_BYTES = 4096
LOOK_S = 0.5
"""Between two looks at whether the host shall end."""


@dataclass(frozen=True, slots=True)
class Job:
    """A version to serve; `failed_start`: number of the server's start that a worker saw fail, 0 for none."""

    version: int
    failed_start: int
    answer: Future[dict[str, Any]]


class ControlServer(ThreadingHTTPServer):
    """Takes requests on threads; the jobs are done by the thread that started the server's processes."""

    daemon_threads = True
    request_queue_size = 128  # all workers of an iteration ask at once

    def __init__(self, address: str, port: int, identity: str) -> None:
        super().__init__((address, port), ControlHandler)
        self.identity = identity
        self.jobs: queue.Queue[Job] = queue.Queue()
        self.stop_asked = threading.Event()
        self.asked_at_s = time.monotonic()

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}"


class ControlHandler(BaseHTTPRequestHandler):
    """GET /status; POST /serve {"run", "version", "failed_start"}; POST /stop, from this machine only."""

    server: ControlServer
    protocol_version = "HTTP/1.1"
    timeout = 60.0
    """For somebody who connects and says nothing."""

    def do_GET(self) -> None:
        known = self.path == "/status"
        self._answer(200 if known else 404, {"run": self.server.identity} if known else {"error": "no such path"})

    def do_POST(self) -> None:
        self.server.asked_at_s = time.monotonic()
        try:
            length = int(self.headers.get("content-length", "0"))
            if not 0 <= length <= LONGEST_REQUEST_BYTES:
                raise ValueError(f"{length} bytes")
            body = json.loads(self.rfile.read(length) or b"{}")
            if self.path == "/stop" and self.client_address[0] == "127.0.0.1":
                self.server.stop_asked.set()
                return self._answer(200, {})
            if self.path != "/serve":
                return self._answer(404, {"error": "no such path"})
            job = Job(int(body["version"]), int(body["failed_start"]), Future())
            asked_run = str(body["run"])
        except (ValueError, KeyError, TypeError) as error:
            return self._answer(400, {"error": f"not a request ({error!r})"})
        if asked_run != self.server.identity:
            line = (
                f"rollout.server.url: the engine host serves run {self.server.identity}, not {asked_run} (id, then "
                "what the store and the configuration are known by); restart it, or correct the address"
            )
            return self._answer(409, {"error": line, "exit_code": ConfigError.exit_code})
        self.server.jobs.put(job)
        try:
            self._answer(200, job.answer.result())
        except StepError as failure:
            evidence = {"transport": failure.transport} if isinstance(failure, ExchangeDowngraded) else {}
            self._answer(409, {"error": str(failure), "exit_code": failure.exit_code} | evidence)

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a worker that was killed meanwhile
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: what is done with them is."""


def run_host(context: RankContext, control: ControlServer, serving: PublicationServer, files: HostFiles | None) -> None:
    """Do the jobs until somebody asks to stop or, for a host that a worker started (`files`), nobody uses it."""
    idle_s = context.config.rollout.server.idle_s
    threading.Thread(target=control.serve_forever, name="control", daemon=True).start()
    context.say(f"{context.config.rollout.engine} for run {context.run_id}, asked at {control.url}")
    try:
        while not (context.interruption.requested or control.stop_asked.is_set()):
            try:
                job = control.jobs.get(timeout=LOOK_S)
            except queue.Empty:
                serving.bound_log()
                if files is not None and time.monotonic() - control.asked_at_s > idle_s and not files.in_use():
                    context.say(f"ends: not used for {idle_s:.0f} s")
                    return
                continue
            _do(job, serving)
            control.asked_at_s = time.monotonic()
    finally:
        serving.stop()
        control.shutdown()


def _do(job: Job, serving: PublicationServer) -> None:
    """The answer, or the failure, goes to the worker; a bug ends the host, too, with its traceback."""
    try:
        job.answer.set_result(serving.serve(job.version, job.failed_start))
    except StepError as error:
        explain(STEP, error)
        job.answer.set_exception(error)
    except BaseException:
        job.answer.set_exception(StepError("the engine host failed; its log has the traceback"))
        raise


def main() -> None:
    parser = StepParser(prog=f"steps.{STEP}", description=__doc__, allow_abbrev=False)
    parser.add_argument("--run", required=True, help="run id, for example reverse-digits-1")
    parser.add_argument("--address", default="127.0.0.1", help="where workers reach this pod; $(POD_IP) in a cluster")
    parser.add_argument("--port", type=natural_int, default=0, help="for what workers ask; 0: any free one")
    parser.add_argument("--attach", default="", help="URL of a server that runs already, instead of starting one")
    parser.add_argument("--files", type=Path, help="of a host that ends when idle: where it says how to reach it")
    arguments = parser.parse_args()
    interruption = Interruption()
    interruption.install()
    retries.heed(interruption, STEP)
    try:
        environment = read_environment()
        context = RankContext(
            step=STEP,
            run_id=validate_run_id(arguments.run),
            environment=environment,
            store=open_store(environment.store_uri),
            interruption=interruption,
        )
        files = None if arguments.files is None else HostFiles(arguments.files)
        folder = environment.cache_dir / "engines" / context.run_id if files is None else files.folder
        folder.mkdir(parents=True, exist_ok=True)
        control = ControlServer(arguments.address, arguments.port, run_identity(context))
        serving = PublicationServer(context, arguments.address, folder, attach=arguments.attach)
        if files is not None:
            files.announce(control.url)
        run_host(context, control, serving, files)
    except StepError as error:
        explain(STEP, error)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
