"""Reading a Hugging Face folder that somebody else wrote: what can be wrong with it becomes one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PICKLED_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@contextmanager
def reading(what: str, folder: Path) -> Iterator[None]:
    """Turn any failure inside the block, but a lack of memory, into a ValueError of one line: `what`, `folder`, why."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        # transformers, safetensors and tokenizers raise some fifteen unrelated classes for a malformed file.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = " ".join(lines[:2])[:300] if lines else "it can't be read"
        raise ValueError(
            f"{what} of {folder}: {type(error).__name__}: {reason}; give a complete Hugging Face checkpoint folder"
        ) from error


def require_safetensors(folder: Path) -> None:
    """Raise ValueError unless the weights are safetensors: pickle files can run code, so none is ever opened."""
    if any(folder.glob("*.safetensors")):
        return
    pickled = sorted(path.name for pattern in _PICKLED_WEIGHTS for path in folder.glob(pattern))
    if pickled:
        raise ValueError(
            f"model folder {folder} has {pickled[0]} and no .safetensors file: pickled weights are never loaded; "
            "convert them with save_pretrained of transformers"
        )
    raise ValueError(f"model folder {folder} has no .safetensors file: give a complete Hugging Face checkpoint folder")
