"""The errors that a user or the platform can cause, each with the exit code that Argo's retry rules read.

    0 done · 1 a bug · 64 usage · 65 bad input data · 69 a service is unavailable · 75 interrupted, run me again ·
    78 bad configuration

Every other exception is a bug: it keeps its traceback and exits with 1.
"""


class StepError(Exception):
    """A failure that is explained in one line: what, where, what to do."""

    exit_code = 1


class UsageError(StepError):
    """The command was called wrongly."""

    exit_code = 64


class DataError(StepError):
    """A data set, checkpoint or publication is missing, malformed or does not match its checksum."""

    exit_code = 65


class ServiceUnavailable(StepError):
    """The database, the store or another service can't be reached or refuses to serve."""

    exit_code = 69


class Interrupted(StepError):
    """The platform asked us to stop (SIGTERM, Spot notice); run the same command again."""

    exit_code = 75


class ConfigError(StepError):
    """The configuration is wrong; the message names the dotted field."""

    exit_code = 78
