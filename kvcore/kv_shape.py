"""How many bytes of KV cache a token of a model needs, and how many blocks that makes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["MODELS", "KVShape", "blocks_in", "kv_shape", "parse_memory"]

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class KVShape(NamedTuple):
    """What one token leaves in the cache."""

    layers: int
    """Layers that attend to earlier tokens."""
    values_per_layer: int
    """Numbers kept in each: 2 x KV heads x head size, or the latent's size."""
    bytes_per_value: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of cache that one token takes, over all layers."""
        return self.layers * self.values_per_layer * self.bytes_per_value


def _heads(layers: int, kv_heads: int, head_size: int) -> KVShape:
    return KVShape(layers, 2 * kv_heads * head_size, 2)


MODELS = {
    "llama-2-7b": _heads(32, 32, 128),
    "llama-2-13b": _heads(40, 40, 128),
    "llama-3.1-8b": _heads(32, 8, 128),
    "llama-3.1-70b": _heads(80, 8, 128),
    "llama-3.1-405b": _heads(126, 8, 128),
    "mistral-7b": _heads(32, 8, 128),
    "qwen2.5-7b": _heads(28, 4, 128),
    "qwen2.5-72b": _heads(80, 8, 128),
    "qwen3-8b": _heads(36, 8, 128),
    "qwen3-32b": _heads(64, 8, 128),
    "opt-13b": _heads(40, 40, 128),
    "deepseek-v3": KVShape(61, 512 + 64, 2),
}
"""Well-known models, with 16-bit keys and values."""


def kv_shape(model: str | Path) -> KVShape:
    """Look up a name of ``MODELS``, or read a Hugging Face ``config.json``.

    Parameters
    ----------
    model : str or Path
        A name, the path of a config, or of the directory that holds ``config.json``.

    Raises
    ------
    ValueError
        Neither a known name nor a file, or a config without what is needed; names
        the file and the key.
    """
    if str(model).lower() in MODELS:
        return MODELS[str(model).lower()]
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    if not path.is_file():
        known = ", ".join(MODELS)
        raise ValueError(f"model {str(model)!r} is neither a config.json nor one of {known}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected a JSON object; {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(config).__name__}")
    return _from_config(path, config)


def _from_config(path: Path, config: dict[str, Any]) -> KVShape:
    # A model of text and images keeps the numbers of its language model one level down.
    text = config.get("text_config")
    config = config | text if isinstance(text, dict) else config

    def number(*names: str) -> int:
        for name in names:
            if config.get(name) is not None:
                value = config[name]
                if type(value) is not int or value < 1:
                    raise ValueError(f"{path}: {name} must be a positive integer, not {value!r}")
                return value
        raise ValueError(f"{path}: expected {' or '.join(names)}, found neither")

    layers = number("num_hidden_layers", "n_layer")
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        # Linear attention and state-space layers keep a fixed state, not one per token.
        layers = sum(kind in ("full_attention", "sliding_attention") for kind in kinds)
    dtype = config.get("torch_dtype") or config.get("dtype") or "bfloat16"
    if dtype not in _BYTES:
        raise ValueError(f"{path}: torch_dtype must be one of {', '.join(_BYTES)}, not {dtype!r}")
    if config.get("kv_lora_rank") is not None:
        values = number("kv_lora_rank") + number("qk_rope_head_dim")
        return KVShape(layers, values, _BYTES[dtype])
    heads = number("num_attention_heads", "n_head")
    head_size = (
        number("head_dim")
        if config.get("head_dim") is not None
        else number("hidden_size", "n_embd") // heads
    )
    if config.get("num_key_value_heads") is not None:
        heads = number("num_key_value_heads")
    return KVShape(layers, 2 * heads * head_size, _BYTES[dtype])


def parse_memory(text: str) -> int:
    """Bytes in ``"24GiB"``, ``"1.5 TB"``, ``"800MB"`` or a plain number of bytes.

    ``ValueError`` names the text if it is none of these, or no byte at all.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip(), re.IGNORECASE | re.ASCII)
    unit = None if match is None else _UNITS.get(match[2].upper())
    if match is None or unit is None:
        raise ValueError(f"memory must be a size like 24GiB or 80GB, not {text!r}")
    size = int(float(match[1]) * unit)
    if size < 1:
        raise ValueError(f"memory must be at least one byte, not {text!r}")
    return size


def blocks_in(memory: int, shape: KVShape, block_size: int) -> int:
    """Whole blocks of ``block_size`` tokens that ``memory`` bytes of cache hold.

    ``ValueError`` if it is not one.
    """
    bytes_per_block = shape.bytes_per_token * block_size
    if memory < bytes_per_block:
        raise ValueError(f"memory of {memory} bytes is less than one block of {bytes_per_block}")
    return memory // bytes_per_block
