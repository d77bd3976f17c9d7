"""The default model's file in other block formats, and as a folder for engines that do not read GGUF.

Weights that were rounded to Q4_1 once are rounded again, so the tokens of these files may differ from the original's.
They serve to compare speed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType

SOURCE_TYPE = GGMLQuantizationType.Q4_1
FILE_TYPES = {"Q4_0": LlamaFileType.MOSTLY_Q4_0, "Q8_0": LlamaFileType.MOSTLY_Q8_0}


def requantize(source: Path, target: Path, kind: str) -> None:
    """Write `source` with its Q4_1 tensors as `kind` (Q4_0 or Q8_0), all else and the metadata as they are.

    That leaves norms in float32 and the embedding table, which is the head too, in Q8_0. llama-quantize does the same
    to it: its choice for a head is Q6_K, and Q8_0 where rows are not a multiple of 256 long.
    """
    reader = GGUFReader(source)
    architecture = reader.fields[gguf.Keys.General.ARCHITECTURE].contents()
    wanted = GGMLQuantizationType[kind]
    with _replacing(target) as unfinished:
        writer = GGUFWriter(unfinished, architecture)
        _copy_metadata(reader, writer, FILE_TYPES[kind])
        for tensor in reader.tensors:
            data, dtype = tensor.data, tensor.tensor_type
            if dtype == SOURCE_TYPE:
                data, dtype = gguf.quantize(gguf.dequantize(data, dtype), wanted), wanted
            writer.add_tensor(tensor.name, data, raw_dtype=dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def as_folder(source: Path, target: Path) -> None:
    """Write a GGUF model as a Hugging Face folder: config.json and float32 safetensors, without a tokenizer."""
    from parity import transformers_model

    with _replacing(target) as unfinished:
        transformers_model(source).save_pretrained(unfinished)  # type: ignore[operator]


def made(source: Path, folder: Path, kind: str) -> Path:
    """The file `source` as `kind` (Q4_1: itself; Q4_0, Q8_0; or `folder`), written into `folder` unless it is there."""
    if kind == SOURCE_TYPE.name:
        return source
    stem = source.name.removesuffix(".gguf").removesuffix(f".{SOURCE_TYPE.name}")
    target = folder / (f"{stem}.float32" if kind == "folder" else f"{stem}.{kind}.gguf")
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        if kind == "folder":
            as_folder(source, target)
        else:
            requantize(source, target, kind)
    return target


@contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A path to write to, which becomes `target` at the end: nothing half-written is ever found there."""
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.part")
    yield unfinished
    unfinished.rename(target)


def _copy_metadata(reader: GGUFReader, writer: GGUFWriter, file_type: LlamaFileType) -> None:
    """Every key but those that the writer adds; general.file_type becomes `file_type`."""
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == gguf.Keys.General.ARCHITECTURE:
            continue
        kind = field.types[0]
        element = field.types[-1] if kind == GGUFValueType.ARRAY else None
        value = int(file_type) if field.name == gguf.Keys.General.FILE_TYPE else field.contents()
        writer.add_key_value(field.name, value, kind, sub_type=element)
