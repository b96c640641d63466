"""Tensor files are those safetensors writes, whatever the dtype and however the bytes come; sealed ones know damage."""

from hashlib import sha256

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle31_hf.storage import sealed
from eagle31_hf.storage.sealed import open_sealed, write_sealed
from eagle31_hf.storage.tensor_file import CHUNK_BYTES, DTYPES, Entry, header_of, tensor_chunks, write_tensor_file


def tensors() -> dict[str, torch.Tensor]:
    """Returns two tensors of every dtype, in another order by name, one larger than a chunk, and an empty one."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for number, dtype in enumerate(reversed(DTYPES.values())):
        for shape in ((3, 5), (7,)):
            values = torch.randint(0, 2, shape, generator=generator).to(dtype)
            made[f"{number}.{'a' if len(shape) == 1 else 'é'}"] = values
    made["large"] = torch.randint(0, 256, (CHUNK_BYTES + 3,), generator=generator).to(torch.uint8)
    made["empty"] = torch.zeros(0, 4)
    return made


def test_a_file_is_the_one_that_safetensors_writes(tmp_path):
    save_file(tensors(), tmp_path / "theirs", {"format": "pt"})
    entries = {name: Entry.of_tensor(tensor) for name, tensor in tensors().items()}
    write_tensor_file(tmp_path / "ours", entries)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_pieces_and_views_make_the_same_file(tmp_path):
    whole = tensors()
    write_tensor_file(tmp_path / "whole", {name: Entry.of_tensor(tensor) for name, tensor in whole.items()})
    pieces = {
        name: Entry.of_pieces(tensor.dtype, tuple(tensor.shape), tensor.t().contiguous().t().split(2))
        for name, tensor in whole.items()
        if tensor.ndim == 2
    }
    rest = {name: Entry.of_tensor(tensor) for name, tensor in whole.items() if tensor.ndim == 1}
    write_tensor_file(tmp_path / "pieces", dict(reversed([*pieces.items(), *rest.items()])))
    assert (tmp_path / "pieces").read_bytes() == (tmp_path / "whole").read_bytes()


def test_every_chunk_is_checked_before_it_is_written(tmp_path):
    path, entries = tmp_path / "file", {"large": Entry.of_tensor(tensors()["large"])}
    seen = []

    def check(name, entry, chunk):
        seen.append((name, entry.dtype, len(chunk)))
        if len(seen) == 2:
            raise ValueError("the second")

    with pytest.raises(ValueError, match="the second"):
        write_tensor_file(path, entries, check=check)
    assert seen == [("large", "U8", CHUNK_BYTES), ("large", "U8", 3)]
    assert path.stat().st_size == 8 + len(header_of(entries, {})) + CHUNK_BYTES


def test_a_sealed_file_is_replaced_and_read_with_its_facts(tmp_path):
    path = tmp_path / "file.safetensors"
    leftover = tmp_path / "file.safetensors.0abc.partial"
    leftover.touch()
    for count in (1, 2):
        entries = {name: Entry.of_tensor(tensor[:count]) for name, tensor in tensors().items()}
        write_sealed(path, entries, {"rows": str(count)})
    with open_sealed(path, verify=True) as file:
        assert file.metadata()["rows"] == "2"
    for name, tensor in load_file(path).items():
        expected = tensors()[name][:2]
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
        assert tensor.view(torch.uint8).equal(expected.view(torch.uint8))
    assert [*tmp_path.iterdir()] == [path]


def test_of_several_that_write_a_file_at_once_the_first_to_finish_has_written_it(tmp_path):
    path, ids = tmp_path / "file.safetensors", torch.arange(4)

    def chunks():
        yield from tensor_chunks(ids[:2])
        write_sealed(path, {"ids": Entry.of_tensor(ids)}, {})  # another, meanwhile
        yield from tensor_chunks(ids[2:])

    write_sealed(path, {"ids": Entry("I64", (4,), chunks)}, {})
    with open_sealed(path, verify=True) as file:
        assert file.get_tensor("ids").equal(ids)
    assert [*tmp_path.iterdir()] == [path]


def test_a_file_is_verified_once_as_long_as_it_is_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(sealed, "MARKED_BYTES", 0)
    checksum, read = sealed._checksum, []
    monkeypatch.setattr(sealed, "_checksum", lambda path, digest: read.append(path) or checksum(path, digest))
    path = tmp_path / "file.safetensors"
    for count in (1, 2):
        write_sealed(path, {"ids": Entry.of_tensor(torch.arange(count))}, {"rows": str(count)})
        for _ in range(3):
            with open_sealed(path, verify=True) as file:
                assert file.metadata()["rows"] == str(count)
        assert len(read) == count
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for _ in range(2):
        with pytest.raises(ValueError, match="its checksum differs"), open_sealed(path, verify=True):
            pass


def test_a_sealed_file_of_the_first_release_is_read(tmp_path):
    """Its header had spaces after commas and colons, and tensors of one size by name."""
    tensor = torch.arange(3)
    write_sealed(tmp_path / "ours", {"ids": Entry.of_tensor(tensor)}, {"rows": "3"})
    data = (tmp_path / "ours").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip()
    with open_sealed(tmp_path / "ours", verify=False) as file:
        digest = file.metadata()["sha256"].encode()
    header = header.replace(b":", b": ").replace(b",", b", ")
    header += b" " * (-len(header) % 8)
    old = sha256(header.replace(digest, b"0" * 64) + data[8 + length :]).hexdigest().encode()
    (tmp_path / "old").write_bytes(len(header).to_bytes(8, "little") + header.replace(digest, old) + data[8 + length :])
    with open_sealed(tmp_path / "old", verify=True) as file:
        assert file.get_tensor("ids").equal(tensor)
