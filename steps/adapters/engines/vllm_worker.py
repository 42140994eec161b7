"""Runs inside the workers of a vLLM server (`--worker-extension-cls`): a reload of weights that is right on CPU too.

vLLM mixes the class into its own worker, so its methods can be called through `/collective_rpc`. Nothing of this
project is imported here: the server's environment need not have it installed.
"""

from typing import Any


class PublicationWorker:
    """Adds `reload_publication` to a vLLM worker."""

    def reload_publication(self, folder: str) -> int:
        """Load the weights of `folder` in place; the number of expert layers that were packed again.

        vLLM 0.32.0 packs the experts of its CPU kernels only when a model is loaded first
        (`UnquantizedFusedMoEMethod._setup_kernel`): after `reload_weights` they lie unpacked in packed storage and are
        read in a wrong order, with no error. The kernels of GPUs have no such step (a no-op there).
        """
        worker: Any = self
        worker.reload_weights(weights_path=folder)
        packed = 0
        if worker.device.type != "cpu":
            return packed
        for layer in worker.get_model().modules():
            kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
            if kernel is not None and hasattr(layer, "w13_weight"):
                kernel.fused_experts.process_weights_after_loading(layer)
                packed += 1
        return packed
