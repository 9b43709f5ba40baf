"""Llama models in GGUF files, version 3, with weights of 4 or 8 bits expanded to float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvcore.engine.llama import Llama, LlamaShape, LlamaWeights

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

__all__ = ["GGUFFile", "load_gguf"]

_SCALARS = {
    0: Struct("<B"),
    1: Struct("<b"),
    2: Struct("<H"),
    3: Struct("<h"),
    4: Struct("<I"),
    5: Struct("<i"),
    6: Struct("<f"),
    7: Struct("<?"),
    10: Struct("<Q"),
    11: Struct("<q"),
    12: Struct("<d"),
}
_STRING, _ARRAY = 8, 9
_COUNT, _TYPE = Struct("<Q"), Struct("<I")


class _Format(NamedTuple):
    """How a run of weights is stored: first as an array of this dtype, then expanded."""

    name: str
    dtype: np.dtype[Any]
    weights: int
    """Of one element."""
    expand: Callable[[Any], Any]


def _expand_q4_1(blocks: Any) -> Any:
    nibbles = np.concatenate([blocks["weights"] & 15, blocks["weights"] >> 4], axis=1)
    return nibbles * blocks["scale"].astype(np.float32) + blocks["least"].astype(np.float32)


def _expand_q8_0(blocks: Any) -> Any:
    return blocks["weights"] * blocks["scale"].astype(np.float32)


_FORMATS = {
    0: _Format("F32", np.dtype("<f4"), 1, np.asarray),
    1: _Format("F16", np.dtype("<f2"), 1, lambda halves: halves.astype(np.float32)),
    3: _Format(
        "Q4_1",
        np.dtype([("scale", "<f2", (1,)), ("least", "<f2", (1,)), ("weights", "u1", (16,))]),
        32,
        _expand_q4_1,
    ),
    8: _Format(
        "Q8_0", np.dtype([("scale", "<f2", (1,)), ("weights", "i1", (32,))]), 32, _expand_q8_0
    ),
}


class _Tensor(NamedTuple):
    shape: tuple[int, ...]
    format: int
    offset: int


class GGUFFile:
    """What a GGUF file says of itself, and its tensors, which are read when asked for.

    Attributes
    ----------
    metadata : dict of str to object
        Its keys and values: numbers, strings, booleans and lists of them.

    Raises
    ------
    ValueError
        It is no GGUF file of version 3, or ends too early.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = np.fromfile(path, np.uint8)
        self._at = 8
        magic = self._data[:4].tobytes()
        version = int.from_bytes(self._data[4:8].tobytes(), "little")
        if magic != b"GGUF" or version != 3:
            raise ValueError(f"{path}: expected GGUF version 3, found {magic!r} version {version}")
        tensors, pairs = self._number(_COUNT), self._number(_COUNT)
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._string().decode()
            self.metadata[key] = self._value(self._number(_TYPE))
        self._tensors: dict[str, _Tensor] = {}
        for _ in range(tensors):
            name = self._string().decode()
            sizes = [self._number(_COUNT) for _ in range(self._number(_TYPE))]
            # The file has the size of a row first.
            self._tensors[name] = _Tensor(
                tuple(reversed(sizes)), self._number(_TYPE), self._number(_COUNT)
            )
        alignment = self.metadata.get("general.alignment", 32)
        self._start = -(-self._at // alignment) * alignment

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> Floats:
        """Read and expand one, as float32 with the rows first. O(weights).

        Raises
        ------
        ValueError
            There is no such tensor, its format is not known, or the file ends before it.
        """
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ValueError(f"{self.path}: there is no tensor {name!r}")
        form = _FORMATS.get(tensor.format)
        if form is None:
            known = ", ".join(f"{number} ({one.name})" for number, one in _FORMATS.items())
            raise ValueError(
                f"{self.path}: tensor {name!r} has format {tensor.format}; known are {known}"
            )
        count = int(np.prod(tensor.shape)) // form.weights
        start = self._start + tensor.offset
        stored = self._bytes(start, count * form.dtype.itemsize).view(form.dtype)
        expanded: Floats = form.expand(stored).reshape(tensor.shape)
        return expanded

    def _bytes(self, start: int, count: int) -> NDArray[np.uint8]:
        if start + count > len(self._data):
            raise ValueError(f"{self.path}: ends at byte {len(self._data)}, in the middle")
        return self._data[start : start + count]

    def _number(self, kind: Struct) -> Any:
        start, self._at = self._at, self._at + kind.size
        return kind.unpack(self._bytes(start, kind.size).tobytes())[0]

    def _string(self) -> bytes:
        count = self._number(_COUNT)
        start, self._at = self._at, self._at + count
        return self._bytes(start, count).tobytes()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string().decode()
        if kind == _ARRAY:
            kind, count = self._number(_TYPE), self._number(_COUNT)
            return [self._value(kind) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"{self.path}: metadata has a value of type {kind}")
        return self._number(_SCALARS[kind])


def load_gguf(file: GGUFFile) -> Llama:
    """Make a model of the weights of a file.

    Raises
    ------
    ValueError
        The architecture is not llama, or something that this needs is missing.
    """

    def value(key: str) -> Any:
        if key not in file.metadata:
            raise ValueError(f"{file.path}: there is no {key!r}")
        return file.metadata[key]

    if value("general.architecture") != "llama":
        raise ValueError(
            f"{file.path}: expected architecture 'llama', found {value('general.architecture')!r}"
        )
    embedding = file.tensor("token_embd.weight")
    shape = LlamaShape(
        layers=value("llama.block_count"),
        dim=value("llama.embedding_length"),
        hidden=value("llama.feed_forward_length"),
        heads=value("llama.attention.head_count"),
        kv_heads=value("llama.attention.head_count_kv"),
        vocab=len(embedding),
        context=value("llama.context_length"),
        rope_theta=file.metadata.get("llama.rope.freq_base", 10_000.0),
        norm_epsilon=value("llama.attention.layer_norm_rms_epsilon"),
    )

    def layers(name: str) -> Floats:
        return np.stack([file.tensor(f"blk.{i}.{name}.weight") for i in range(shape.layers)])

    return Llama(
        shape,
        LlamaWeights(
            embedding=embedding,
            attention_norm=layers("attn_norm"),
            query=layers("attn_q"),
            key=layers("attn_k"),
            value=layers("attn_v"),
            attention_out=layers("attn_output"),
            feed_forward_norm=layers("ffn_norm"),
            gate=layers("ffn_gate"),
            up=layers("ffn_up"),
            down=layers("ffn_down"),
            final_norm=file.tensor("output_norm.weight"),
            output=file.tensor("output.weight") if "output.weight" in file else embedding,
        ),
    )
