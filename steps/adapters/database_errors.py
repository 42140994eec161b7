"""What a database driver's error means: a bug, a refusal that is final, or an outage that may pass."""

import sqlite3
from typing import Any

SQLITE_PASSING = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
"""Another process is writing, recovers the log or checkpoints. An I/O error is none of these: after a failed sync
nobody knows what the disk holds, and SQLite itself must find that out when the file is opened again."""
SQLITE_FINAL = {
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_AUTH,
    sqlite3.SQLITE_NOTADB,
}
POSTGRES_PASSING = ("08", "40001", "40003", "40P01", "53200", "53300", "55P03", "57014", "57P", "58000")
"""SQLSTATE prefixes (PostgreSQL's manual, appendix A): connection, serialization, completion unknown, deadlock,
memory, too many connections, lock timeout, cancelled statement, server stopping or starting, a system error."""
POSTGRES_FINAL = ("28", "3D", "40", "53", "55", "58", "25006", "42501")
"""Authorization, no such database, rollback, disk full and limits, object state, I/O error, read-only, permission."""
POSTGRES_MISSING = ("42P01", "42703")
SQLITE_MISSING = ("no such table", "no such column", "has no column")

FINAL_REFUSALS = (
    "authentication failed",
    "does not exist",
    "no password supplied",
    "not permitted",
    "permission denied",
    "pg_hba.conf",
    "invalid connection option",
    "certificate",
    "does not support SSL",
)
"""libpq gives a failed connection no SQLSTATE: only its text tells a wrong password from a server that starts up."""


def is_missing_object(error: Any) -> bool:
    """A table or column isn't there."""
    if isinstance(error, sqlite3.Error):
        return any(phrase in str(error) for phrase in SQLITE_MISSING)
    return getattr(error, "sqlstate", None) in POSTGRES_MISSING


def is_passing(error: Any) -> bool:
    """The same transaction may succeed when it is tried again."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", -1) & 0xFF in SQLITE_PASSING
    sqlstate = getattr(error, "sqlstate", None)
    if sqlstate is not None:
        return str(sqlstate).startswith(POSTGRES_PASSING)
    return type(error).__name__ == "OperationalError" and not any(text in str(error) for text in FINAL_REFUSALS)


def is_refusal(error: Any) -> bool:
    """The database or its disk refuses, and will go on to do so until somebody acts."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", -1) & 0xFF in SQLITE_FINAL
    sqlstate = getattr(error, "sqlstate", None)
    if sqlstate is None:
        return type(error).__name__ == "OperationalError" or "invalid connection option" in str(error)
    return str(sqlstate).startswith(POSTGRES_FINAL)


def remedy(error: Any) -> str:
    reason = str(error)
    if "full" in reason or "No space" in reason:
        return "free some space and run it again"
    if "locked" in reason or "lock timeout" in reason:
        return "another process holds it; run it again when that has ended"
    if "unable to open" in reason or "does not exist" in reason:
        return "check MOERL_DATABASE_URL; python -m steps.init_run creates a SQLite file, not a PostgreSQL database"
    return "check MOERL_DATABASE_URL and that the database is up"
