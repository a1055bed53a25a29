"""Writes the random weights of `load_format: dummy` as a checkpoint that any engine loads.

    python -m benchmarks.make_checkpoint benchmarks/models/qwen3-0.6b OUT [--dtype bfloat16] [--device cuda]

OUT gets config.json and safetensors files with the very bits that `load_format: dummy` makes of the same shape, so that
other engines, transformers among them, can be compared with this one on one model. Memory stays below the largest
piece in flight (256 MB), whatever the model's size.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

import torch

from configs.read_config import read_model_config
from parallel.plan import Span, as_matrix
from worker.weights.checkpoint import expected_shapes
from worker.weights.dummy_weights import DummyCheckpoint

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TAGS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_PIECE_BYTES = 256 << 20
_MAX_SHARD_BYTES = 5_000_000_000

_Shapes = Mapping[str, tuple[int, ...]]


def write_checkpoint(
    source: Path,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    max_shard_bytes: int = _MAX_SHARD_BYTES,
) -> None:
    """Writes the random model of `source`'s shape to `out`, which is made when it is not there.

    Args:
        source: a directory with config.json.
        dtype: of the files; None is the config's own. Weights of another type are another model: `load_format: dummy`
            makes them of `out`, whose config.json names this type.
        device: where the values are made.
        max_shard_bytes: of one file; a tensor that is larger has a file of its own.

    Raises:
        CheckpointError: `source` is no model that can be served.
    """
    model = read_model_config(source)
    dtype_name = model.dtype if dtype is None else str(dtype).removeprefix("torch.")
    dtype = _DTYPES[dtype_name]
    shapes = expected_shapes(model)
    shards = _shards(shapes, dtype.itemsize, max_shard_bytes)
    out.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    with DummyCheckpoint(dataclasses.replace(model, dtype=dtype_name)) as checkpoint:
        for i, names in enumerate(shards, 1):
            file = f"model-{i:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
            weight_map.update(dict.fromkeys(names, file))
            _write_shard(out / file, checkpoint, {name: shapes[name] for name in names}, dtype, torch.device(device))
    if len(shards) > 1:
        total = dtype.itemsize * sum(prod(shape) for shape in shapes.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    config = json.loads((source / "config.json").read_text())
    for key in ("dtype", "quantization_config"):  # transformers 5's name of the same, and what the files are not in
        config.pop(key, None)
    (out / "config.json").write_text(json.dumps({**config, "torch_dtype": dtype_name}, indent=2) + "\n")


def _shards(shapes: _Shapes, itemsize: int, max_bytes: int) -> list[list[str]]:
    """Names of the tensors of each file, in the order of `shapes`."""
    shards: list[list[str]] = []
    room = 0
    for name, shape in shapes.items():
        size = itemsize * prod(shape)
        if not shards or size > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(name)
        room -= size
    return shards


def _write_shard(
    path: Path, checkpoint: DummyCheckpoint, shapes: _Shapes, dtype: torch.dtype, device: torch.device
) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + dtype.itemsize * prod(shape)
        header[name] = {"dtype": _TAGS[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            matrix = as_matrix(shape)
            for rows in _pieces(matrix, dtype.itemsize):
                piece = torch.empty(rows.size, *matrix[1:], dtype=dtype, device=device)
                checkpoint.read(name, piece, rows=rows)
                file.write(memoryview(piece.cpu().view(torch.uint8).numpy()))


def _pieces(shape: Sequence[int], itemsize: int) -> Iterator[Span]:
    """Spans of rows that together are all of them."""
    step = max(1, _PIECE_BYTES // (itemsize * prod(shape[1:])))
    for start in range(0, shape[0], step):
        yield Span(start, min(start + step, shape[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a directory with config.json")
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=sorted(_DTYPES), help="of the files; the config's own when left out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--max-shard-bytes", type=int, default=_MAX_SHARD_BYTES)
    args = parser.parse_args()
    dtype = None if args.dtype is None else _DTYPES[args.dtype]
    write_checkpoint(args.model, args.out, dtype=dtype, device=args.device, max_shard_bytes=args.max_shard_bytes)
    print(args.out)


if __name__ == "__main__":
    main()
