"""Trainer state on disk: one safetensors file and, written last, a state.json that names it and its checksum."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from safetensors.torch import load, save

from moe.update import PolicyTrainer

STATE_FILE = "state.json"
FORMAT = 1


def save_trainer_state(trainer: PolicyTrainer, folder: Path) -> None:
    """Write the trainer's state into `folder`, replacing an older state there.

    A crash at any point leaves the older state or the new one, never a mixture: the tensors get a new name, and
    state.json, which names them, is replaced last.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in trainer.state_tensors().items()}
    data = bytes(save(tensors))
    sha256 = hashlib.sha256(data).hexdigest()
    tensors_file = f"trainer-{sha256[:16]}.safetensors"
    _write(folder / tensors_file, data)
    state = {
        "format": FORMAT,
        "tensors_file": tensors_file,
        "tensors_sha256": sha256,
        "size_bytes": len(data),
        "progress": trainer.progress(),
    }
    _write(folder / STATE_FILE, json.dumps(state, indent=1, sort_keys=True).encode())
    for old in folder.glob("trainer-*.safetensors"):
        if old.name != tensors_file:
            old.unlink(missing_ok=True)


def load_trainer_state(trainer: PolicyTrainer, folder: Path) -> None:
    """Restore the state that `save_trainer_state` wrote.

    Raises ValueError naming the file that is missing or corrupt, or the tensor that does not fit the trainer's model.
    """
    state = _read_state(folder / STATE_FILE)
    path = folder / str(state["tensors_file"])
    if not path.is_file():
        raise ValueError(f"checkpoint {path}: the file is missing; restore it or go back to an older checkpoint")
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != state["tensors_sha256"]:
        raise ValueError(f"checkpoint {path}: its checksum is wrong; restore it or go back to an older checkpoint")
    trainer.load_state(load(data), state["progress"])


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ValueError(f"checkpoint {path}: the file is missing; the checkpoint was never finished") from error
    except ValueError as error:
        raise ValueError(f"checkpoint {path}: not JSON ({error}); go back to an older checkpoint") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"checkpoint {path}: not a trainer state of format {FORMAT}; write it anew")
    if missing := {"tensors_file", "tensors_sha256", "progress"} - state.keys():
        raise ValueError(f"checkpoint {path}: key {min(missing)} is missing; go back to an older checkpoint")
    return state


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
