"""Fixtures shared by all tests: the real servers, and one torch thread a process."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MOERL_SERVICE_DEADLINE_S", "5")  # tests of services that never come back end soon

pytest_plugins = [
    "tests.fixtures_cluster",
    "tests.fixtures_s3",
    "tests.fixtures_postgres",
    "tests.fixtures_steps",
    "tests.fixtures_audit",
]
