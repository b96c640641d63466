"""A drafter read from its config and headers, and whether it fits a target; from the Hub no weights are downloaded if it can be avoided."""

import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import get_hf_file_metadata, get_session, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers
from torch import Tensor
from transformers.utils import cached_file
from transformers.utils.hub import extract_commit_hash

from .. import vocab
from ..checkpoints.files import MAX_JSON_BYTES, SIDE_FILES, WEIGHTS, WEIGHTS_INDEX, check_file_name, read_index, read_json
from ..checkpoints.read import Checkpoint, read_checkpoint
from ..checkpoints.sources import check_name
from ..configuration import Eagle31Config
from ..hub import kind
from ..modeling import Eagle31DrafterModel
from .source import TargetSource

MAPS = ("d2t", "t2d")  # the only tensors whose values are read


class RangeError(Exception):
    """The Hub does not serve a part of this file."""


@dataclass(frozen=True)
class Finding:
    """One line on how a drafter fits its target. `fits` is None where the line does not decide that."""

    name: str
    fits: bool | None
    text: str


@dataclass(frozen=True)
class DrafterReport:
    """What a drafter is and whether it fits. `config` is None where its checkpoint could not be read, as `findings` then say."""

    name: str
    config: Eagle31Config | None = None
    num_parameters: int | None = None
    num_bytes: int | None = None
    findings: list[Finding] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return all(finding.fits is not False for finding in self.findings)


def check_drafter(
    drafter: Any,
    source: TargetSource,
    overrides: Mapping[str, Any] | None = None,
    convention: str | None = None,
    revision: str | None = None,
) -> DrafterReport:
    """What the drafter is, and every way in which it fits the target or does not.

    `drafter`: a folder, a Hub repository, or an `Eagle31DrafterModel`. A checkpoint that cannot be read or is ambiguous gives a
    finding, not an error.
    Raises OSError where there is no drafter, ValueError for `overrides` that are no fields of Eagle31Config.
    """
    unknown = sorted((overrides or {}).keys() - Eagle31Config.__annotations__.keys())
    if unknown:
        raise ValueError(f"got {', '.join(unknown)}; expected fields of Eagle31Config.")
    if isinstance(drafter, Eagle31DrafterModel):
        parameters, config = list(drafter.parameters()), drafter.config
        assert isinstance(config, Eagle31Config)
        report = DrafterReport(
            drafter.name_or_path or type(drafter).__name__, config, sum(p.numel() for p in parameters),
            sum(p.numel() * p.element_size() for p in parameters),
        )  # fmt: skip
        return replace(report, findings=_findings(config, source, drafter.draft_to_target_ids()))
    name = str(drafter)
    check_name(name)
    try:
        checkpoint = read_headers(name, overrides, convention, revision)
    except ValueError as error:
        return DrafterReport(name, findings=[Finding("format", False, " ".join(str(error).split()))])
    sizes = {key: prod(stored.shape) for key, stored in checkpoint.tensors.items() if key not in MAPS}
    num_bytes = sum(stored.nbytes for stored in checkpoint.tensors.values())
    about = "; ".join(checkpoint.reasons)
    d2t = checkpoint.made.get("d2t")
    findings = [
        Finding("format", True, f"{kind(checkpoint.config)}, {'native' if checkpoint.is_native else 'converted while loading'}: {about}"),
        *(Finding("note", None, note) for note in checkpoint.notes),
        *_findings(checkpoint.config, source, None if d2t is None else vocab.target_ids(d2t)),
    ]
    return DrafterReport(name, checkpoint.config, sum(sizes.values()), num_bytes, findings)


def _findings(config: Eagle31Config, source: TargetSource, draft_ids: Tensor | None) -> list[Finding]:
    if source.config is None:
        return []
    return [
        _made_for(config, source), _width(config, source.decoder), _layers(config, source.decoder), _vocabulary(config, source.decoder),
        _ends(config, source, draft_ids), _shared(config), _positions(config, source.decoder),
    ]  # fmt: skip


def _made_for(config: Eagle31Config, source: TargetSource) -> Finding:
    named, given = config.target_model, source.name
    if named is None:
        return Finding("made for", None, "a target it does not name")
    folder = Path(given).parent if given.endswith(".json") else Path(given)
    if Path(named).name.lower() == folder.name.lower():
        return Finding("made for", True, named)
    return Finding("made for", None, f"{named}; this is {given}: with another model's weights fewer drafts are accepted")


def _width(config: Eagle31Config, decoder: Any) -> Finding:
    reads, has = config.target_hidden_size, decoder.hidden_size
    if reads != has:
        return Finding("width", False, f"reads states of width {reads}, the target's are {has} wide: pass the target it was made for")
    own = "" if config.hidden_size == has else f", its own is {config.hidden_size}"
    return Finding("width", True, f"reads {config.num_aux_states} states of width {reads}{own}")


def _layers(config: Eagle31Config, decoder: Any) -> Finding:
    num_layers = decoder.num_hidden_layers
    try:
        ids = config.resolve_layer_ids(num_layers)
    except ValueError as error:
        return Finding("layers", False, str(error))
    said = "" if config.aux_hidden_state_layer_ids else ", the default: it names none"
    return Finding("layers", True, f"reads hidden_states {ids} of the target's 0 to {num_layers}{said}")


def _vocabulary(config: Eagle31Config, decoder: Any) -> Finding:
    if not vocab.same_vocabulary(config.vocab_size, decoder.vocab_size):
        text = f"made for {config.vocab_size:,} ids, the target has {decoder.vocab_size:,}, more than padding apart: another tokenizer"
        return Finding("vocabulary", False, text)
    share = config.draft_vocab_size / decoder.vocab_size
    return Finding("vocabulary", True, f"proposes {config.draft_vocab_size:,} of {decoder.vocab_size:,} ids ({min(share, 1.0):.0%})")


def _ends(config: Eagle31Config, source: TargetSource, draft_ids: Tensor | None) -> Finding:
    ends = source.decoder.eos_token_id
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if draft_ids is None or not ends:
        return Finding("ends", None, "it can propose what ends a text" if ends else "the target's config names no token that ends a text")
    missing = [token for token in ends if token not in set(draft_ids.tolist())]
    if len(missing) == len(ends):
        return Finding("ends", None, f"it never proposes the target's end of text ({ends}): the last token of a text is the target's own")
    return Finding("ends", None, "it can propose what ends a text")


def _shared(config: Eagle31Config) -> Finding:
    parts = {"embedding": config.share_target_embeddings, "head": config.share_target_head}
    return Finding("weights", None, ", ".join(f"{part} {'of the target' if shared else 'of its own'}" for part, shared in parts.items()))


def _positions(config: Eagle31Config, decoder: Any) -> Finding:
    own, its = config.max_position_embeddings, getattr(decoder, "max_position_embeddings", None)
    text = f"made for texts of {own:,} tokens"
    if isinstance(its, int) and own < its:
        text += f", the target for {its:,}: past its own length it is accepted less, the text stays the target's"
    return Finding("positions", None, text)


def read_headers(
    name: str, overrides: Mapping[str, Any] | None = None, convention: str | None = None, revision: str | None = None
) -> Checkpoint:
    """`read_checkpoint`, but of a Hub repository with safetensors only the config, headers and draft vocabulary maps are downloaded.

    What is in the Hub's cache is read from there; pickles, and weights in another repository that the config names, are downloaded whole.
    """
    if Path(name).exists() or isinstance(try_to_load_from_cache(name, WEIGHTS, revision=revision), str):
        return read_checkpoint(name, overrides, convention, revision=revision)
    try:
        with headers_of(name, revision) as folder:
            try:
                return replace(read_checkpoint(str(folder), overrides, convention), source=name)
            except ValueError as error:
                raise ValueError(str(error).replace(str(folder), name)) from None
    except RangeError:
        return read_checkpoint(name, overrides, convention, revision=revision)


@contextmanager
def headers_of(name: str, revision: str | None) -> Iterator[Path]:
    """A temporary copy of a repository's folder, whose weight files are sparse: full length, but only headers and vocabulary maps.

    Raises RangeError where that cannot be made.
    """
    config = cached_file(name, "config.json", revision=revision)
    commit = extract_commit_hash(config, None) or revision
    if read_json(Path(str(config))).get("weights_from") is not None:
        raise RangeError
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "config.json").write_bytes(Path(str(config)).read_bytes())
        if not _fetch_header(name, WEIGHTS, commit, folder):
            index = cached_file(name, WEIGHTS_INDEX, revision=commit, _raise_exceptions_for_missing_entries=False)
            if index is None:
                raise RangeError
            (folder / WEIGHTS_INDEX).write_bytes(Path(index).read_bytes())
            for shard in sorted(set(read_index(folder / WEIGHTS_INDEX).values())):
                check_file_name(shard, folder / WEIGHTS_INDEX, "weight_map")
                if not _fetch_header(name, shard, commit, folder):
                    raise RangeError
        for side_file in SIDE_FILES:
            found = cached_file(name, side_file, revision=commit, _raise_exceptions_for_missing_entries=False)
            if found is not None:
                (folder / side_file).write_bytes(Path(found).read_bytes())
        yield folder


def _fetch_header(name: str, file: str, commit: str | None, folder: Path) -> bool:
    """Writes a sparse copy of the file. False where the repository has no such file; raises RangeError where no part of it is served."""
    url = hf_hub_url(name, file, revision=commit)
    try:
        size = get_hf_file_metadata(url).size
    except EntryNotFoundError:
        return False
    except (HfHubHTTPError, OfflineModeIsEnabled, OSError):
        raise RangeError from None
    (length,) = struct.unpack("<Q", _fetch(url, 0, 8))
    if size is None or not 0 < length <= min(size, MAX_JSON_BYTES):
        raise RangeError
    header = _fetch(url, 8, length)
    with open(folder / file, "wb") as copy:
        copy.write(struct.pack("<Q", length) + header)
        copy.truncate(size)
        for tensor, about in _entries(header):
            if tensor.split(".")[-1] in MAPS:
                start, end = about["data_offsets"]
                copy.seek(8 + length + start)
                copy.write(_fetch(url, 8 + length + start, end - start))
    return True


def _entries(header: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tensors of a safetensors header that have offsets."""
    try:
        for tensor, about in json.loads(header).items():
            if isinstance(about, dict) and isinstance(about.get("data_offsets"), list) and len(about["data_offsets"]) == 2:
                yield tensor, about
    except (ValueError, AttributeError):  # read_checkpoint says what is wrong with it
        return


def _fetch(url: str, start: int, count: int) -> bytes:
    """`count` bytes of a file on the Hub, from `start` on. Raises RangeError where it does not send exactly these."""
    if not 0 < count <= MAX_JSON_BYTES:
        raise RangeError
    headers = build_hf_headers() | {"Range": f"bytes={start}-{start + count - 1}"}
    with get_session().stream("GET", url, headers=headers, follow_redirects=True) as response:
        if response.status_code != 206:
            raise RangeError
        found = response.read()
    if len(found) != count:
        raise RangeError
    return found
