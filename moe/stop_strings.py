"""Finds the strings at which responses end, while they are sampled token by token."""

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


class StopStrings:
    """Reads `count` responses along; each token costs the text that it adds, however long the response is."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, stops: Sequence[str], count: int) -> None:
        """Raises ValueError for a tokenizer that can't decode incrementally."""
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise ValueError(
                "rollout.sampling.stop: the sampler needs a fast tokenizer (tokenizer.json) to find strings; save the "
                "checkpoint's tokenizer as one, or remove the stop strings"
            )
        self._tokenizer, self._stops = tokenizer.backend_tokenizer, stops
        self._longest = max(map(len, stops))
        self._streams = [DecodeStream(skip_special_tokens=True) for _ in range(count)]
        self._tails = [""] * count

    def ends(self, row: int, token: int) -> bool:
        """Whether the text of response `row` contains a stop string now that `token` follows."""
        added = self._streams[row].step(self._tokenizer, token)
        if not added:
            return False
        text = self._tails[row] + added
        self._tails[row] = text[max(0, len(text) - self._longest + 1) :]
        return any(stop in text for stop in self._stops)
