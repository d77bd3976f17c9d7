"""The GGUF reader: values, maps, split models, and damaged files."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from doubles.tiny_checkpoints import tiny_model, write_gguf
from slipstream.core.errors import LoadError
from slipstream.loading.gguf import GGUFFile

U32, STRING, ARRAY = 4, 8, 9


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def entry(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def file_of(
    tmp_path: Path,
    *,
    pairs: list[bytes] | None = None,
    entries: list[bytes] | None = None,
    data: bytes = b"",
    version: int = 3,
    counts: tuple[int, int] | None = None,
    align: int = 32,
) -> Path:
    pairs, entries = pairs or [], entries or []
    counts = counts or (len(entries), len(pairs))
    body = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(entries)
    path = tmp_path / "model.gguf"
    path.write_bytes(body + bytes(-len(body) % align) + data)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(LoadError) as caught:
        GGUFFile(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


class TestValues:
    def test_every_kind_of_metadata(self, tmp_path: Path) -> None:
        path = tmp_path / "kinds.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        expected = {
            "uint8": 200, "int8": -100, "uint16": 60000, "int16": -30000, "uint32": 2**32 - 1, "int32": -(2**31),
            "uint64": 2**64 - 1, "int64": -(2**63), "float32": 0.5, "float64": 0.1, "bool": True, "string": "ü\n日本",
        }  # fmt: skip
        for kind, value in expected.items():
            getattr(writer, f"add_{kind}")(f"x.{kind}", value)
        lists = {"x.ints": [1, 2, 3], "x.floats": [0.5, -1.5], "x.bools": [True, False], "x.words": ["a", "", "ß"]}
        for key, values in lists.items():
            writer.add_array(key, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        metadata = GGUFFile(path).metadata
        expected = {"general.architecture": "llama", **{f"x.{k}": v for k, v in expected.items()}, **lists}
        assert metadata == expected
        assert {k: type(v) for k, v in metadata.items()} == {k: type(v) for k, v in expected.items()}

    def test_nested_and_empty_lists(self, tmp_path: Path) -> None:
        inner = struct.pack("<IQ2H", 2, 2, 5, 6) + struct.pack("<IQ", STRING, 0)
        path = file_of(tmp_path, pairs=[pair("x", ARRAY, struct.pack("<IQ", ARRAY, 2) + inner)], version=2)
        assert GGUFFile(path).metadata == {"x": [[5, 6], []]}

    def test_tensors_agree_with_the_package(self, tmp_path: Path) -> None:
        kinds = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
        turn = iter(kinds * 10)
        path = write_gguf(tmp_path / "m.gguf", tiny_model(), formats=lambda name, shape: next(turn))
        file = GGUFFile(path)
        reader = gguf.GGUFReader(path)
        assert [t.name for t in reader.tensors] == list(file.tensors)
        assert {t.type for t in file.tensors.values()} == set(kinds)
        for theirs in reader.tensors:
            ours = file.tensors[theirs.name]
            assert (ours.type, ours.offset, ours.nbytes) == (
                theirs.tensor_type.name,
                theirs.data_offset,
                theirs.n_bytes,
            )
            assert ours.shape == tuple(theirs.shape.tolist()[::-1])
            np.testing.assert_array_equal(file.raw(ours.name), theirs.data.view(np.uint8).reshape(-1))
            values = gguf.quants.dequantize(theirs.data, theirs.tensor_type)
            np.testing.assert_array_equal(file.tensor(ours.name).float().numpy(), values.reshape(ours.shape))

    def test_plain_floats_come_from_the_map(self, tmp_path: Path) -> None:
        for kind, dtype in (("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)):
            file = GGUFFile(write_gguf(tmp_path / f"{kind}.gguf", tiny_model(), formats=kind))
            tensor = file.tensor("blk.0.ffn_up.weight")
            assert tensor.dtype == dtype
            assert tensor.data_ptr() == file.raw("blk.0.ffn_up.weight").ctypes.data
            before = tensor.clone()
            file.close()
            assert torch.equal(tensor, before)

    def test_raw_bytes_cannot_be_written(self, tmp_path: Path) -> None:
        file = GGUFFile(write_gguf(tmp_path / "m.gguf", tiny_model()))
        with pytest.raises(ValueError, match="read-only"):
            file.raw("blk.0.ffn_up.weight")[0] = 1

    def test_unaligned_floats_are_copied(self, tmp_path: Path) -> None:
        alignment = pair("general.alignment", U32, struct.pack("<I", 1))
        values = struct.pack("<3f", 1, 2, 3)
        for size in range(4):  # the padding key shifts the data
            path = file_of(
                tmp_path,
                pairs=[alignment, pair("x" * size, STRING, text(""))],
                entries=[entry("w", [3], 0, 0)],
                data=values,
                align=1,
            )
            assert GGUFFile(path).tensor("w").tolist() == [1, 2, 3]

    def test_unknown_and_closed(self, tmp_path: Path) -> None:
        file = GGUFFile(write_gguf(tmp_path / "m.gguf", tiny_model()))
        with pytest.raises(LoadError, match="no tensor 'nope'"):
            file.tensor("nope")
        file.close()
        with pytest.raises(LoadError, match="closed"):
            file.raw("output.weight")


class TestRefusals:
    def test_things_that_are_not_gguf(self, tmp_path: Path) -> None:
        path = tmp_path / "model.gguf"
        assert "cannot be opened" in refusal(path)
        assert "cannot be opened" in refusal(tmp_path)
        path.write_bytes(b"")
        assert "empty" in refusal(path)
        path.write_bytes(b"PK\x03\x04" + bytes(100))
        assert "not a GGUF file" in refusal(path)
        path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
        assert "big-endian" in refusal(path)
        for version in (0, 1, 4):
            path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
            assert f"version {version};" in refusal(path)

    @pytest.mark.parametrize("count", [2**60, 2**64 - 1, 2**24 + 1, 100])
    def test_absurd_counts_do_not_allocate(self, tmp_path: Path, count: int) -> None:
        start = time.perf_counter()
        assert "number of tensors" in refusal(file_of(tmp_path, counts=(count, 0)))
        assert "metadata entries" in refusal(file_of(tmp_path, counts=(0, count)))
        refusal(file_of(tmp_path, pairs=[struct.pack("<Q", count) + b"key"]))
        for kind in (0, U32, STRING, ARRAY, 12):
            refusal(file_of(tmp_path, pairs=[pair("x", ARRAY, struct.pack("<IQ", kind, count))]))
        refusal(file_of(tmp_path, pairs=[pair("x", ARRAY, struct.pack("<IQQ", STRING, 1, count) + b"text")]))
        refusal(file_of(tmp_path, entries=[entry("w", [count * 32], 0, 0)] if count < 2**58 else [b""], counts=(1, 0)))
        assert time.perf_counter() - start < 10

    def test_deep_nesting(self, tmp_path: Path) -> None:
        deep = struct.pack("<IQ", ARRAY, 1) * 5000
        assert "nested" in refusal(file_of(tmp_path, pairs=[pair("x", ARRAY, deep)]))

    @pytest.mark.parametrize(
        ("pairs", "problem"),
        [
            ([pair("a", 0, b"\1"), pair("a", 0, b"\1")], "appears twice"),
            ([pair("a", 13, b"\1")], "unknown type 13"),
            ([pair("a", ARRAY, struct.pack("<IQ", 13, 1) + bytes(8))], "unknown type 13"),
            ([pair("a", STRING, struct.pack("<Q", 2) + b"\xff\xfe")], "UTF-8"),
            ([pair("a", ARRAY, struct.pack("<IQQ", STRING, 1, 2) + b"\xff\xfe")], "UTF-8"),
            ([struct.pack("<Q", 2) + b"\xff\xfe" + bytes(32)], "UTF-8"),
            ([pair("general.alignment", U32, struct.pack("<I", 0))], "power of two"),
            ([pair("general.alignment", U32, struct.pack("<I", 48))], "power of two"),
            ([pair("general.alignment", STRING, text("32"))], "power of two"),
            ([pair("split.count", STRING, text("2"))], "split.count"),
        ],
    )
    def test_metadata(self, tmp_path: Path, pairs: list[bytes], problem: str) -> None:
        assert problem in refusal(file_of(tmp_path, pairs=pairs))

    @pytest.mark.parametrize(
        ("entries", "problem"),
        [
            ([entry("w", [32], 0, 0), entry("w", [32], 0, 128)], "appears twice"),
            ([entry("v", [32], 0, 0), entry("w", [32], 0, 96)], "overlaps"),
            ([entry("w", [32], 0, 8)], "multiple of 32"),
            ([entry("w", [32], 5, 0)], "unknown format 5"),
            ([entry("w", [33], 3, 0)], "cannot be stored as Q4_1"),
            ([entry("w", [0, 4], 0, 0)], "cannot be stored as F32"),
            ([entry("w", [1, 1, 1, 1, 1], 0, 0)], "5 dimensions"),
            ([entry("w", [2**63, 2**63], 0, 0)], "beyond the file's end"),
            ([entry("w", [32], 0, 2**63)], "beyond the file's end"),
            ([entry("w", [65], 0, 0)], "beyond the file's end"),
        ],
    )
    def test_tensor_table(self, tmp_path: Path, entries: list[bytes], problem: str) -> None:
        assert problem in refusal(file_of(tmp_path, entries=entries, data=bytes(256)))

    def test_a_format_that_is_not_read(self, tmp_path: Path) -> None:
        path = file_of(tmp_path, entries=[entry("blk.0.w", [256], 17, 0)], data=bytes(96))
        file = GGUFFile(path)
        with pytest.raises(LoadError, match=r"blk\.0\.w.* is stored as IQ2_XS, which .*reads F32, .*Q6_K"):
            file.tensor("blk.0.w")


def small_file() -> bytes:
    tensors = [entry("blk.0.weight", [64, 2], 3, 0), entry("norm", [4], 0, 96)]
    pairs = [
        pair("general.architecture", STRING, text("llama")),
        pair("general.alignment", U32, struct.pack("<I", 32)),
        pair("words", ARRAY, struct.pack("<IQ", STRING, 3) + text("é") + text("b") + text("")),
        pair("numbers", ARRAY, struct.pack("<IQ3i", 5, 3, 1, 2, 3)),
        pair("split.count", 2, struct.pack("<H", 1)),
    ]
    body = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs) + b"".join(tensors)
    return body + bytes(-len(body) % 32) + bytes(range(80)) + bytes(16) + bytes(16)


class TestDamage:
    """A damaged file is refused, or read as something else that is well formed; no other exception escapes."""

    def load(self, path: Path, content: bytes) -> GGUFFile | None:
        path.write_bytes(content)
        try:
            file = GGUFFile(path)
        except LoadError as error:
            message = str(error)
        else:
            for name, tensor in file.tensors.items():
                if tensor.fmt.readable:
                    assert tuple(file.tensor(name).shape) == tensor.shape
            return file
        assert "\n" not in message
        return None

    def test_the_whole_file_loads(self, tmp_path: Path) -> None:
        file = self.load(tmp_path / "m.gguf", small_file())
        assert file is not None
        assert file.metadata["words"] == ["é", "b", ""]
        assert file.tensor("norm").shape == (4,)

    def test_every_truncation_is_refused(self, tmp_path: Path) -> None:
        content = small_file()
        for size in range(len(content)):
            assert self.load(tmp_path / "m.gguf", content[:size]) is None, size

    def test_every_byte_of_the_header_changed(self, tmp_path: Path) -> None:
        content = small_file()
        for position in range(len(content) - 112):
            for value in (0, 1, 0x7F, 0x80, 0xFF, content[position] ^ 1):
                self.load(tmp_path / "m.gguf", content[:position] + bytes([value]) + content[position + 1 :])

    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, len(small_file()) - 1), st.integers(0, 255)), min_size=1, max_size=6))
    def test_random_changes(self, tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]) -> None:
        content = bytearray(small_file())
        for position, value in changes:
            content[position] = value
        self.load(tmp_path_factory.getbasetemp() / "changed.gguf", bytes(content))


class TestSplit:
    def test_any_part_opens_the_whole_model(self, tmp_path: Path) -> None:
        model = tiny_model()
        whole = GGUFFile(write_gguf(tmp_path / "whole.gguf", model, formats="Q8_0"))
        first = write_gguf(tmp_path / "m.gguf", model, formats="Q8_0", per_part=5)
        parts = sorted(tmp_path.glob("m-*.gguf"))
        assert len(parts) == 5
        for part in parts:
            file = GGUFFile(part)
            assert file.path == first
            assert file.metadata["general.architecture"] == "llama"
            assert list(file.tensors) == list(whole.tensors)
            assert all(torch.equal(file.tensor(name), whole.tensor(name)) for name in whole.tensors)

    def test_a_missing_part(self, tmp_path: Path) -> None:
        first = write_gguf(tmp_path / "m.gguf", tiny_model(), per_part=11)
        second = tmp_path / "m-00002-of-00002.gguf"
        second.unlink()
        with pytest.raises(LoadError, match=r"m-00002-of-00002\.gguf: this part .* is missing"):
            GGUFFile(first)

    def test_a_renamed_part(self, tmp_path: Path) -> None:
        first = write_gguf(tmp_path / "m.gguf", tiny_model(), per_part=11)
        with pytest.raises(LoadError, match="must be named like model-00001-of-00002"):
            GGUFFile(first.rename(tmp_path / "renamed.gguf"))

    def test_too_few_tensors(self, tmp_path: Path) -> None:
        first = write_gguf(tmp_path / "m.gguf", tiny_model(), per_part=11)
        content = bytearray(first.read_bytes())
        key = b"split.tensors.count"
        content[content.index(key) + len(key) + 4] += 1
        first.write_bytes(content)
        with pytest.raises(LoadError, match="should have 22 tensors, its parts have 21"):
            GGUFFile(first)

    def test_parts_in_the_wrong_places(self, tmp_path: Path) -> None:
        first = write_gguf(tmp_path / "m.gguf", tiny_model(), per_part=11)
        (tmp_path / "m-00002-of-00002.gguf").write_bytes(first.read_bytes())
        with pytest.raises(LoadError, match="part 2 of 2"):
            GGUFFile(first)


@pytest.mark.slow
def test_the_default_model_opens_fast(default_model_path: Path) -> None:
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        file = GGUFFile(default_model_path)
        seconds.append(time.perf_counter() - start)
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
    assert min(seconds) < 0.15
    assert file.tensor("token_embd.weight").shape == (49152, 576)
