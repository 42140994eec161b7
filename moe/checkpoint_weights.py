"""The weights in a trainer state, for a model that is not trained: the reference of a KL, an evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from moe.parallel import ParallelLayout
from moe.placement import Piece
from moe.update_state import check_names, model_pieces


@dataclass(frozen=True)
class ModelWeights:
    """What `moe.checkpoint.load_trainer_state` and `required_files` take in place of a trainer: `model` alone.

    `model` may be one rank's part, sliced and sharded in any layout; its weights are filled in place.
    """

    model: PreTrainedModel

    def prepare_load(self, stored: Mapping[str, tuple[int, ...]]) -> dict[str, Piece]:
        """The pieces of the weights; raises ValueError naming a weight when `stored` is of another model."""
        pieces = model_pieces(self.model, ParallelLayout.single())  # a reader does not care who else holds them
        check_names(pieces, stored)
        return {f"model.{name}": piece for name, piece in pieces.items()}

    def restore_progress(self, progress: Mapping[str, Any]) -> None:
        """A model has none."""
