"""GGUF files: small ones written here, weight by weight, and SmolLM2 where it is at hand."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcore import BlockManager
from kvcore.engine import (
    BytePairTokenizer,
    Chunk,
    Engine,
    GGUFFile,
    Llama,
    LlamaShape,
    LlamaWeights,
    PagedCache,
    load_gguf,
    load_model,
    random_llama,
)

SHAPE = LlamaShape(
    layers=2, dim=64, hidden=96, heads=4, kv_heads=2, vocab=300, context=64, rope_theta=50_000.0
)
NAMES = {
    "attention_norm": "attn_norm",
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "attention_out": "attn_output",
    "feed_forward_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def stored(array: Any, form: int) -> tuple[bytes, Any]:
    """An array in a format, and what a reader should make of it. One weight at a time."""
    if form == 0:
        return array.astype("<f4").tobytes(), array
    if form == 1:
        halves = array.astype("<f2")
        return halves.tobytes(), halves.astype(np.float32)
    data, expected = b"", []
    for block in array.reshape(-1, 32):
        if form == 8:
            scale = np.float16(np.abs(block).max() / 127)
            whole = [round(float(one) / float(scale)) for one in block]
            whole = [max(-128, min(127, one)) for one in whole]
            data += struct.pack("<e32b", scale, *whole)
            expected += [np.float32(one) * np.float32(scale) for one in whole]
        else:
            least, most = np.float16(block.min()), block.max()
            scale = np.float16((most - least) / 15)
            whole = [round(float(one - least) / float(scale)) for one in block]
            whole = [max(0, min(15, one)) for one in whole]
            pairs = [whole[i] | whole[i + 16] << 4 for i in range(16)]
            data += struct.pack("<ee16B", scale, least, *pairs)
            expected += [np.float32(one) * np.float32(scale) + np.float32(least) for one in whole]
    return data, np.array(expected, np.float32).reshape(array.shape)


def text_of(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def value_of(value: Any) -> bytes:
    """A metadata value with its type."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text_of(value)
    items = [value_of(one) for one in value]
    return struct.pack("<I4sQ", 9, items[0][:4], len(items)) + b"".join(one[4:] for one in items)


METADATA = {
    "general.architecture": "llama",
    "general.alignment": 64,
    "llama.block_count": SHAPE.layers,
    "llama.embedding_length": SHAPE.dim,
    "llama.feed_forward_length": SHAPE.hidden,
    "llama.attention.head_count": SHAPE.heads,
    "llama.attention.head_count_kv": SHAPE.kv_heads,
    "llama.context_length": SHAPE.context,
    "llama.rope.freq_base": SHAPE.rope_theta,
    "llama.attention.layer_norm_rms_epsilon": SHAPE.norm_epsilon,
    "tokenizer.ggml.add_bos_token": False,
}


def write(path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[Any, int]]) -> Any:
    """Write a file; returns what each tensor should be read as."""
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += text_of(key) + value_of(value)
    body, expected = b"", {}
    for name, (array, form) in tensors.items():
        data, expected[name] = stored(array, form)
        head += text_of(name) + struct.pack(
            f"<I{array.ndim}QIQ", array.ndim, *array.shape[::-1], form, len(body)
        )
        body += data + bytes(-len(data) % 64)
    path.write_bytes(head + bytes(-len(head) % 64) + body)
    return expected


def write_model(path: Path, is_tied: bool) -> Llama:
    """A random model in all formats; returns it as it should be read."""
    weights = random_llama(SHAPE, seed=7).weights
    tensors: dict[str, tuple[Any, int]] = {"token_embd.weight": (weights.embedding, 8)}
    for place, (field, name) in enumerate(NAMES.items()):
        for layer in range(SHAPE.layers):
            array = getattr(weights, field)[layer]
            form = 0 if array.ndim == 1 else (3, 8, 1)[place % 3]
            tensors[f"blk.{layer}.{name}.weight"] = (array, form)
    tensors["output_norm.weight"] = (weights.final_norm, 0)
    if not is_tied:
        tensors["output.weight"] = (weights.output, 3)
    read = write(path, METADATA, tensors)
    layers = {
        field: np.stack([read[f"blk.{layer}.{name}.weight"] for layer in range(SHAPE.layers)])
        for field, name in NAMES.items()
    }
    return Llama(
        SHAPE,
        LlamaWeights(
            embedding=read["token_embd.weight"],
            final_norm=read["output_norm.weight"],
            output=read["token_embd.weight" if is_tied else "output.weight"],
            **layers,
        ),
    )


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_model_is_read_weight_by_weight(tmp_path: Path, is_tied: bool) -> None:
    expected = write_model(tmp_path / "model.gguf", is_tied)
    model = load_gguf(GGUFFile(tmp_path / "model.gguf"))
    assert model.shape._replace(norm_epsilon=0) == SHAPE._replace(norm_epsilon=0)
    assert model.shape.norm_epsilon == pytest.approx(SHAPE.norm_epsilon)
    for name, array in model.weights._asdict().items():
        assert array.dtype == np.float32, name
        assert np.array_equal(array, getattr(expected.weights, name)), name
    chunk = Chunk([1, 299, 5], 0, np.arange(3), np.zeros(1, np.int32), 3)
    logits = [one.forward([chunk], PagedCache(SHAPE, 1, 4)) for one in (model, expected)]
    assert np.allclose(*logits, atol=1e-4)


def test_metadata_of_every_kind_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file.gguf"
    head = struct.pack("<4sIQQ", b"GGUF", 3, 0, 12)
    numbers: dict[int, tuple[str, Any]] = {
        0: ("B", 200), 1: ("b", -3), 2: ("H", 60_000), 3: ("h", -300), 4: ("I", 4 * 10**9),
        5: ("i", -70_000), 6: ("f", 0.5), 7: ("?", True), 10: ("Q", 2**63), 11: ("q", -(2**62)),
        12: ("d", 0.1),
    }  # fmt: skip
    for kind, (letter, value) in numbers.items():
        head += text_of(f"k{kind}") + struct.pack(f"<I{letter}", kind, value)
    words = struct.pack("<IIQ", 9, 8, 2) + text_of("é") + text_of("")
    path.write_bytes(head + text_of("words") + words)
    metadata = GGUFFile(path).metadata
    assert metadata.pop("words") == ["é", ""]
    assert metadata == {f"k{kind}": value for kind, (_, value) in numbers.items()}


BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "found b'' version 0"),
    "magic": (lambda data: b"GGML" + data[4:], "found b'GGML' version 3"),
    "version": (lambda data: data[:4] + b"\2" + data[5:], "found b'GGUF' version 2"),
    "short head": (lambda data: data[:200], "ends at byte 200, in the middle"),
    "short body": (lambda data: data[:-64], "ends at byte"),
    "no tensor": (lambda data: data.replace(b"1.attn_q.", b"1.attn_w."), "blk.1.attn_q.weight"),
    "no key": (lambda data: data.replace(b"block_count", b"block_kount"), "no 'llama.block_count'"),
    "type": (lambda data: data.replace(b"block_count\4", b"block_count\r"), "value of type 13"),
    "architecture": (lambda data: data.replace(b"\0llama", b"\0lemma", 1), "lemma"),
}


@pytest.mark.parametrize(("change", "named"), BROKEN.values(), ids=list(BROKEN))
def test_a_file_that_is_not_what_it_should_be_is_refused(
    tmp_path: Path, change: Callable[[bytes], bytes], named: str
) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, is_tied=False)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=named):
        load_gguf(GGUFFile(path))


def test_a_format_that_is_not_known_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file.gguf"
    head = struct.pack("<4sIQQ", b"GGUF", 3, 1, 0)
    path.write_bytes(head + text_of("x") + struct.pack("<IQIQ", 1, 32, 12, 0) + bytes(200))
    with pytest.raises(ValueError, match=r"tensor 'x' has format 12; known are 0 \(F32\)"):
        GGUFFile(path).tensor("x")


MERGES = ["Ġ t", "h e", "Ġt he", "Ġ c", "a t", "Ġc at", "Ċ Ċ", "Ã ©", "1 2", "x y", "y z", "' l"]
BYTES = [chr(byte) for byte in range(33, 127)] + ["Ġ", "Ċ", "Ã", "©"]
TABLES = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": [
        "<|end|>", *BYTES, *(merge.replace(" ", "") for merge in MERGES)
    ],
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.token_type": [3] + [1] * (len(BYTES) + len(MERGES)),
    "tokenizer.ggml.eos_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("the cat", ["t", "he", " cat"]),
        (" the", [" the"]),
        ("at12 3", ["at", "1", "2", " ", "3"]),
        ("the  cat", ["t", "he", " ", " cat"]),
        ("\n\n the", ["\n\n", " the"]),
        ("é<|end|>é", ["é", "<|end|>", "é"]),
        ("he'll", ["he", "'l", "l"]),
        ("xyz", ["xy", "z"]),
        ("_the", ["_", "t", "he"]),
        ("", []),
    ],
)
def test_texts_are_cut_and_merged(text: str, pieces: list[str]) -> None:
    tokenizer = BytePairTokenizer(TABLES)
    tokens = tokenizer.encode(text)
    decoded = [tokenizer.decode([token]).decode() or "<|end|>" for token in tokens]
    assert decoded == pieces
    assert tokenizer.decode(tokens).decode() == text.replace("<|end|>", "")


def test_another_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="found \\('gpt2', 'qwen2'\\)"):
        BytePairTokenizer(TABLES | {"tokenizer.ggml.pre": "qwen2"})


QUESTION = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\nWhat is the capital of France? Answer in one sentence."
    "<|im_end|>\n<|im_start|>assistant\n"
)
ONCE = (
    "Once upon a time, the city of Nova Haven was a thriving metropolis, with towering "
    "skyscrapers and bustling streets. But as the years went by"
)


def test_smollm2_says_what_it_says_elsewhere() -> None:
    """As numpy and torch with contiguous keys; ``KVCORE_GGUF`` names the file (Q4_1)."""
    path = os.environ.get("KVCORE_GGUF")
    if not path:
        pytest.skip("KVCORE_GGUF does not name SmolLM2-135M-Instruct.Q4_1.gguf")
    model, tokenizer = load_model(path)
    bm = BlockManager(32, 16, prefix_caching=True)
    engine = Engine(model, bm)
    once, question = tokenizer.encode("Once upon a time"), tokenizer.encode(QUESTION)
    engine.add("once", once, max_tokens=24)
    for turn in ("first", "again"):
        engine.add(turn, question, max_tokens=12, end_token=tokenizer.end)
        engine.run()
        assert engine.texts[turn][len(question) :] == [504, 3575, 282, 4649, 314, 7042, 30, 2]
    assert tokenizer.decode(engine.texts["once"]).decode() == ONCE
    assert engine.scheduler.counters.prefill_tokens < len(once) + 1.5 * len(question)
