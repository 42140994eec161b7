"""What the model of a configuration weighs, and which limits its expert exchange breaks, as JSON on stdout.

`moerl plan` asks this: it needs torch, which `workflows` does not load. No weight is read.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from moe.families import FAMILIES
from moe.model_shape import ModelShape
from moe.model_size import exchange_problems, measure
from moe.tokenizer import build_char_tokenizer
from steps.adapters.store import open_store
from steps.arguments import StepParser, positive_int
from steps.config import RunConfig
from steps.config_loader import config_from_json
from steps.errors import ConfigError, StepError
from steps.tasks.catalog import build_dataset

MODELS = Path(__file__).resolve().parents[1] / "configs" / "models"
EXAMPLE = "  moerl config show --json | python -m steps.model_size --ranks-per-node 8"


def main() -> None:
    parser = StepParser(prog="steps.model_size", description=f"{__doc__}\nexample:\n{EXAMPLE}", allow_abbrev=False)
    parser.add_argument("--ranks-per-node", type=positive_int, default=8, help="GPUs of one training node")
    arguments = parser.parse_args()
    try:
        config = config_from_json(sys.stdin.read())
        with TemporaryDirectory() as temporary:
            source = _write_model_config(config, Path(temporary))
            try:
                size = measure(Path(temporary))
            except ValueError as error:
                raise ConfigError(f"warmup.start = {config.warmup.start!r}: {error}") from None
    except StepError as error:
        print(f"model_size: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    print(json.dumps(_answer(config, size, source, arguments.ranks_per_node), sort_keys=True))


def _answer(config: RunConfig, size: ModelShape, source: str, ranks_per_node: int) -> dict[str, object]:
    sampling, micro = config.rollout.sampling, config.train.update.micro_batch_tokens
    tokens = max(micro, sampling.max_prompt_tokens, sampling.max_new_tokens)
    problems = exchange_problems(size, config.moe, config.train.ranks, ranks_per_node, tokens)
    return {"size": asdict(size), "source": source, "exchange_problems": list(problems)}


def _write_model_config(config: RunConfig, folder: Path) -> str:
    """Put the model's config.json into `folder`; says where it is from."""
    start = config.warmup.start
    if start == "random":
        tokenizer = build_char_tokenizer(build_dataset(config.task, config.seed).alphabet)
        FAMILIES[config.model.family].configure(config.model, len(tokenizer)).save_pretrained(folder)
        return "[model]"
    text, source = _published_config(start)
    (folder / "config.json").write_bytes(text)
    return source


def _published_config(start: str) -> tuple[bytes, str]:
    """The checkpoint's own config.json; without access to it the one that is kept for a model of its name."""
    here = Path(start) / "config.json"
    if here.is_file():
        return here.read_bytes(), str(here)
    name = start.rstrip("/").rpartition("/")[2].lower()
    kept = MODELS / f"{name}.json"
    if kept.is_file():
        return kept.read_bytes(), f"configs/models/{kept.name}"
    if not start.startswith("s3://"):
        known = ", ".join(sorted(path.stem for path in MODELS.glob("*.json")))
        raise ConfigError(f"warmup.start = {start!r}: no config.json there, and its name is none of {known}")
    return open_store(start).get_bytes("config.json"), f"{start}/config.json"


if __name__ == "__main__":
    main()
