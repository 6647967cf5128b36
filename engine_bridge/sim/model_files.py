"""Writes the simulated model's directory: a byte-level BPE trained on texts, our template, a configuration.

`python -m engine_bridge.sim.model_files TEXT_FILE...` rewrites the one that comes with the package. The same
texts give the same files. They are not rewritten when the texts change: a tokenizer is an identity.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from engine_bridge.sim.template import DONE, MARKS, TEMPLATE

MODEL_DIRECTORY = Path(__file__).parent / "model"
"""Comes with the package."""

VOCABULARY = 8192
CONFIG = {"model_type": "llama", "vocab_size": VOCABULARY, "max_position_embeddings": 262144}


def train(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """A byte-level BPE of `vocabulary` tokens, the template's marks among them. Encodes any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(mark, normalized=False, special=True) for mark in MARKS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_model(directory: Path, tokenizer: Tokenizer) -> None:
    """What transformers and engines load: three JSON files."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": TEMPLATE,
        "eos_token": DONE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONFIG["max_position_embeddings"],
    }
    directory.mkdir(parents=True, exist_ok=True)
    for name, document in (
        ("tokenizer.json", json.loads(tokenizer.to_str())),
        ("tokenizer_config.json", settings),
        ("config.json", CONFIG),
    ):
        text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
        (directory / name).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_model(MODEL_DIRECTORY, train(Path(name).read_text() for name in sys.argv[1:]))
