"""Which model to run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from kvcore.engine.byte_pairs import BytePairTokenizer
from kvcore.engine.gguf import GGUFFile, load_gguf
from kvcore.engine.random_model import random_llama
from kvcore.engine.stories import StoriesTokenizer, load_stories
from kvcore.engine.tokenizer import ByteTokenizer

if TYPE_CHECKING:
    from kvcore.engine.llama import Llama
    from kvcore.engine.tokenizer import Tokenizer

__all__ = ["load_model"]


def load_model(path: str | Path | None = None) -> tuple[Llama, Tokenizer]:
    """Load a model and its tokenizer.

    Parameters
    ----------
    path : str or Path, optional
        A ``.gguf`` file of the Llama architecture, a weight file of llama2.c with a
        ``tok*.bin`` beside it, or a folder that has ``stories260K`` in it. By default what
        ``KVCORE_MODEL`` names and, without that, small random weights.

    Raises
    ------
    FileNotFoundError
        There is no such file, or no one tokenizer beside it.
    ValueError
        The file is not what it should be.
    """
    path = path or os.environ.get("KVCORE_MODEL")
    if path is None:
        return random_llama(), ByteTokenizer()
    file = Path(path)
    if file.is_dir():
        file = file / "stories260K" / "stories260K.bin"
    if not file.is_file():
        raise FileNotFoundError(f"path {str(path)!r}: there is no model {file}")
    if file.suffix == ".gguf":
        gguf = GGUFFile(file)
        return load_gguf(gguf), BytePairTokenizer(gguf.metadata)
    model = load_stories(file)
    tokenizers = sorted(file.parent.glob("tok*.bin"))
    if len(tokenizers) != 1:
        raise FileNotFoundError(f"{file.parent}: expected one tok*.bin, found {len(tokenizers)}")
    return model, StoriesTokenizer(tokenizers[0], model.shape.vocab)
