"""From a model and an amount of memory to a number of blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcore.kv_shape import MODELS, KVShape, blocks_in, kv_shape, parse_memory

GIB = 2**30


@pytest.mark.parametrize(
    ("model", "bytes_per_token"),
    [
        ("llama-3.1-8b", 131_072),
        ("Llama-3.1-70B", 327_680),
        ("llama-2-7b", 524_288),
        ("opt-13b", 819_200),
        ("deepseek-v3", 70_272),
    ],
)
def test_well_known_models_have_their_published_bytes_per_token(
    model: str, bytes_per_token: int
) -> None:
    assert kv_shape(model).bytes_per_token == bytes_per_token


LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4_096,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (LLAMA, MODELS["llama-3.1-8b"]),
        # Every query head has keys of its own.
        ({**LLAMA, "num_key_value_heads": None}, KVShape(32, 2 * 32 * 128, 2)),
        # The head size is not always hidden size over heads.
        ({**LLAMA, "head_dim": 256}, KVShape(32, 2 * 8 * 256, 2)),
        ({**LLAMA, "torch_dtype": "float32"}, KVShape(32, 2 * 8 * 128, 4)),
        ({**LLAMA, "torch_dtype": None, "dtype": "float16"}, KVShape(32, 2 * 8 * 128, 2)),
        ({"n_layer": 12, "n_head": 12, "n_embd": 768}, KVShape(12, 2 * 12 * 64, 2)),
        ({**LLAMA, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, KVShape(32, 576, 2)),
        ({"model_type": "vision", "text_config": LLAMA}, MODELS["llama-3.1-8b"]),
        (
            {**LLAMA, "layer_types": ["linear_attention", "full_attention", "sliding_attention"]},
            KVShape(2, 2 * 8 * 128, 2),
        ),
    ],
)
def test_a_config_is_read_by_the_keys_of_its_kind(
    tmp_path: Path, config: dict[str, Any], shape: KVShape
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kv_shape(tmp_path / "config.json") == shape
    assert kv_shape(str(tmp_path)) == shape


def test_a_small_model_in_single_precision(tmp_path: Path) -> None:
    """5 layers, 4 KV heads of 8 values, float32: 1,280 bytes a token."""
    config = {
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "hidden_size": 64,
        "torch_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kv_shape(tmp_path).bytes_per_token == 1_280


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({**LLAMA, "num_hidden_layers": None}), "expected num_hidden_layers or n_layer"),
        (json.dumps({**LLAMA, "num_hidden_layers": "many"}), "num_hidden_layers must .* 'many'"),
        (json.dumps({**LLAMA, "num_key_value_heads": 0}), "num_key_value_heads must be .* not 0"),
        (json.dumps({**LLAMA, "torch_dtype": "int3"}), "torch_dtype must be one of .* not 'int3'"),
        ("[]", "expected a JSON object, found list"),
        ("{", "expected a JSON object"),
    ],
)  # fmt: skip
def test_a_config_that_lacks_something_is_refused_by_file_and_key(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=rf"config\.json: {message}"):
        kv_shape(tmp_path)


def test_an_unknown_model_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValueError, match=r"'gpt-9' is neither a config\.json nor one of llama"):
        kv_shape("gpt-9")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * GIB),
        ("24 gib", 24 * GIB),
        ("80GB", 80 * 10**9),
        ("1.5TiB", 3 * 2**39),
        ("512MiB", 2**29),
        ("4096", 4_096),
    ],
)
def test_memory_is_read_with_binary_and_decimal_units(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "24 G", "-1GiB", "0", "1e9", "24GiBs", "٣GiB"])
def test_memory_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"memory must be .* not"):
        parse_memory(text)


def test_only_whole_blocks_count() -> None:
    shape = MODELS["llama-3.1-8b"]
    block = 16 * 131_072
    assert blocks_in(24 * GIB, shape, 16) == 12_288
    assert blocks_in(2 * block - 1, shape, 16) == 1
    with pytest.raises(ValueError, match="is less than one block of 2097152"):
        blocks_in(block - 1, shape, 16)
