"""Whether the experts' transport is the one that was asked for: collected on all ranks, judged, and kept."""

from typing import Any

from moe.experts import expert_modules, get_dispatcher
from moe.parallel import ParallelLayout
from moe.transport.counters import read_counters
from moe.transport.report import collect
from moe.update import PolicyTrainer
from steps.entrypoint import RankContext, StepContext
from steps.errors import ConfigError
from steps.gang_step import fail_together


class TransportEvidence:
    """What this attempt's exchanges moved, against what the network devices counted since it was made."""

    def __init__(self, context: RankContext, trainer: PolicyTrainer, layout: ParallelLayout) -> None:
        self._context, self._trainer, self._layout = context, trainer, layout
        self._before = read_counters()
        self.report: dict[str, Any] | None = None
        """The newest one; None before the first `collect`."""

    def collect(self) -> dict[str, Any]:
        """The report of all ranks, also put into the attempt's ledger entry; every rank calls it together.

        Raises ConfigError when the transport was downgraded and `moe.on_downgrade` is fail.
        """
        dispatcher = get_dispatcher(expert_modules(self._trainer.model)[0])
        if dispatcher is None:
            raise RuntimeError("the trainer's model has no dispatcher")
        moe, exchanged = self._context.config.moe, self._trainer.exchanged
        with self._layout.collective("collecting the transport report"):
            self.report = report = collect(
                dispatcher,
                moe,
                self._layout.expert_group,
                before=self._before,
                after=read_counters(),
                sent_bytes=exchanged.sent_bytes,
                sent_off_node_bytes=exchanged.sent_off_node_bytes,
            )
        if isinstance(self._context, StepContext):
            self._context.transport = report
        if report["status"] == "downgrade" and moe.on_downgrade == "fail":
            explanation = f"moe.dispatcher = {moe.dispatcher}: {report['reason']}"
            remedy = 'repair the network, or accept it with moe.on_downgrade = "warn"'
            fail_together(self._context, ConfigError(f"{explanation}; {remedy}"))
        return report
