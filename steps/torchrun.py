"""torchrun, ending with the exit code of the rank that failed: `python -m steps.torchrun OPTIONS -m MODULE ...`.

torchrun itself ends with 1 whatever its ranks ended with, so that a wrong configuration (78) and an interruption (75)
would look alike to the platform that decides whether to start the pod again.
"""

import sys
from collections.abc import Sequence
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from steps.errors import Interrupted
from steps.gang import shell_code


def run(arguments: Sequence[str]) -> int:
    """The exit code: 0, that of the rank that failed first (128 + n for death by signal n), 75 after a signal to us.

    Ranks that were asked to end get torchrun's --shutdown-timeout for it.
    """
    try:
        torchrun(_apart(arguments))
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return shell_code(failure.exitcode)
    except SignalException:
        return Interrupted.exit_code
    return 0


def _apart(arguments: Sequence[str]) -> list[str]:
    """With the module and all that follows set apart from torchrun's own options.

    Its parser looks at every word before `--`: it would take the step's `--run` for its own `--run-path`, cut short.
    """
    if "-m" not in arguments or "--" in arguments:
        return list(arguments)
    module = arguments.index("-m") + 1
    return [*arguments[:module], "--", *arguments[module:]]


def main() -> NoReturn:
    raise SystemExit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
