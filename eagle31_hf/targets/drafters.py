"""A drafter read from its config and headers, and whether it fits a target; from the Hub no weights are downloaded if it can be avoided."""

import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import get_hf_file_metadata, get_session, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers
from torch import Tensor
from transformers.utils.hub import extract_commit_hash

from .. import vocab
from ..checkpoints.files import SIDE_FILES, WEIGHTS, WEIGHTS_INDEX, check_file_name, read_index
from ..checkpoints.read import FIELDS, Checkpoint, read_checkpoint
from ..checkpoints.sources import HUB_ERRORS, HubError, check_name, fetch, find_config, first_line
from ..configuration import Eagle31Config
from ..hub import kind
from ..json_file import MAX_BYTES as MAX_JSON_BYTES
from ..json_file import parse_json, read_json
from ..modeling import Eagle31DrafterModel
from ..names import refuse_unknown
from .source import TargetSource


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
    """Returns what the drafter is, and every way in which it fits the target or does not; nothing of that where transformers has no model
    for the target.

    `drafter`: a folder, a Hub repository, or an `Eagle31DrafterModel`. A checkpoint that cannot be read or is ambiguous gives a
    finding, not an error.
    Raises OSError where there is no drafter, ValueError for `overrides` that are no fields of Eagle31Config.
    """
    refuse_unknown(overrides or {}, FIELDS, "fields of Eagle31Config")
    if isinstance(drafter, Eagle31DrafterModel):
        parameters, config = list(drafter.parameters()), drafter.config
        assert isinstance(config, Eagle31Config)
        report = DrafterReport(
            drafter.name_or_path or type(drafter).__name__, config, sum(p.numel() for p in parameters),
            sum(p.numel() * p.element_size() for p in parameters),
        )  # fmt: skip
        return replace(report, findings=_findings(config, source, drafter.draft_to_target_ids()))
    name = os.path.expanduser(str(drafter))
    check_name(name)
    try:
        checkpoint = read_headers(name, overrides, convention, revision)
    except ValueError as error:
        return DrafterReport(name, findings=[Finding("format", False, " ".join(str(error).split()))])
    num_bytes = sum(stored.nbytes for stored in checkpoint.tensors.values())
    about = "; ".join(checkpoint.reasons)
    d2t = checkpoint.made.get("d2t")
    findings = [
        Finding("format", True, f"{kind(checkpoint.config)}, {'native' if checkpoint.is_native else 'converted while loading'}: {about}"),
        *(Finding("note", None, note) for note in checkpoint.notes),
        *_findings(checkpoint.config, source, None if d2t is None else vocab.target_ids(d2t)),
    ]
    return DrafterReport(name, checkpoint.config, checkpoint.num_parameters, num_bytes, findings)


def _findings(config: Eagle31Config, source: TargetSource, draft_ids: Tensor | None) -> list[Finding]:
    """Lines on how the drafter's config fits the target's. Configs of transformers need not have the fields that are compared."""
    if source.model_class is None:
        return []
    decoder = source.decoder
    return [
        _made_for(config, source), _width(config, decoder), _layers(config, decoder), _vocabulary(config, decoder),
        _ends(config, decoder, draft_ids), _shared(config), _positions(config, decoder),
    ]  # fmt: skip


def _size(decoder: Any, name: str) -> int | None:
    """A size that the target's config states, or None."""
    value = getattr(decoder, name, None)
    return value if type(value) is int else None


def _unstated(name: str, what: str, field: str) -> Finding:
    """A line that decides nothing, as the target's config does not state `field`."""
    return Finding(name, None, f"{what}; the target's config does not state its {field}")


def _made_for(config: Eagle31Config, source: TargetSource) -> Finding:
    """The line on the target that the drafter names: the same name is a good sign, another decides nothing."""
    named, given = config.target_model, source.name
    if named is None:
        return Finding("made for", None, "a target it does not name")
    folder = Path(given).parent if given.endswith(".json") else Path(given)
    if Path(named).name.lower() == folder.name.lower():
        return Finding("made for", True, named)
    return Finding("made for", None, f"{named}; this is {given}: with another model's weights fewer drafts are accepted")


def _width(config: Eagle31Config, decoder: Any) -> Finding:
    """The line on the width of the states that the drafter reads."""
    reads, has = config.target_hidden_size, _size(decoder, "hidden_size")
    if has is None:
        return _unstated("width", f"reads states of width {reads}", "hidden_size")
    if reads != has:
        return Finding("width", False, f"reads states of width {reads}, the target's are {has} wide: pass the target it was made for")
    own = "" if config.hidden_size == has else f", its own is {config.hidden_size}"
    return Finding("width", True, f"reads {config.num_aux_states} states of width {reads}{own}")


def _layers(config: Eagle31Config, decoder: Any) -> Finding:
    """The line on the layers whose states the drafter reads."""
    num_layers = _size(decoder, "num_hidden_layers")
    if num_layers is None:
        return _unstated("layers", f"reads hidden_states {config.aux_hidden_state_layer_ids or 'by default'}", "num_hidden_layers")
    try:
        ids = config.resolve_layer_ids(num_layers)
    except ValueError as error:
        return Finding("layers", False, str(error))
    said = "" if config.aux_hidden_state_layer_ids else ", the default: it names none"
    return Finding("layers", True, f"reads hidden_states {ids} of the target's 0 to {num_layers}{said}")


def _vocabulary(config: Eagle31Config, decoder: Any) -> Finding:
    """The line on the two vocabularies, which are the same where they differ by padding only."""
    num_ids = _size(decoder, "vocab_size")
    if num_ids is None:
        return _unstated("vocabulary", f"made for {config.vocab_size:,} ids", "vocab_size")
    if not vocab.same_vocabulary(config.vocab_size, num_ids):
        text = f"made for {config.vocab_size:,} ids, the target has {num_ids:,}, more than padding apart: another tokenizer"
        return Finding("vocabulary", False, text)
    share = config.draft_vocab_size / max(num_ids, 1)
    return Finding("vocabulary", True, f"proposes {config.draft_vocab_size:,} of {num_ids:,} ids ({min(share, 1.0):.0%})")


def _ends(config: Eagle31Config, decoder: Any, draft_ids: Tensor | None) -> Finding:
    """The line on the tokens that end a text, which a pruned draft vocabulary may lack."""
    ends = getattr(decoder, "eos_token_id", None)
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if draft_ids is None or not ends:
        return Finding("ends", None, "it can propose what ends a text" if ends else "the target's config names no token that ends a text")
    missing = [token for token in ends if token not in set(draft_ids.tolist())]
    if len(missing) == len(ends):
        return Finding("ends", None, f"it never proposes the target's end of text ({ends}): the last token of a text is the target's own")
    return Finding("ends", None, "it can propose what ends a text")


def _shared(config: Eagle31Config) -> Finding:
    """The line on the weights that the drafter takes from the target."""
    parts = {"embedding": config.share_target_embeddings, "head": config.share_target_head}
    return Finding("weights", None, ", ".join(f"{part} {'of the target' if shared else 'of its own'}" for part, shared in parts.items()))


def _positions(config: Eagle31Config, decoder: Any) -> Finding:
    """The line on the lengths of texts that drafter and target are made for."""
    own, its = config.max_position_embeddings, _size(decoder, "max_position_embeddings")
    text = f"made for texts of {own:,} tokens"
    if its is not None and own < its:
        text += f", the target for {its:,}: past its own length it is accepted less, the text stays the target's"
    return Finding("positions", None, text)


def read_headers(
    name: str, overrides: Mapping[str, Any] | None = None, convention: str | None = None, revision: str | None = None
) -> Checkpoint:
    """Reads a checkpoint as `read_checkpoint` does, but of a Hub repository with safetensors downloads only the config, headers and draft
    vocabulary maps.

    What is in the Hub's cache is read from there; pickles, and weights in another repository that the config names, are downloaded whole.
    Raises OSError where something is not there or the Hub fails, ValueError for what is unsound.
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

    Raises RangeError where that cannot be made, OSError where the Hub fails.
    """
    config = Path(find_config(name, revision=revision))
    commit = extract_commit_hash(str(config), None) or revision
    if read_json(config).get("weights_from") is not None:
        raise RangeError
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "config.json").write_bytes(config.read_bytes())
        if not _fetch_header(name, WEIGHTS, commit, folder):
            if not _fetch_whole(name, WEIGHTS_INDEX, commit, folder):
                raise RangeError
            for shard in sorted(set(read_index(folder / WEIGHTS_INDEX).values())):
                check_file_name(shard, folder / WEIGHTS_INDEX, "weight_map")
                if not _fetch_header(name, shard, commit, folder):
                    raise RangeError
        for side_file in SIDE_FILES:
            _fetch_whole(name, side_file, commit, folder)
        yield folder


def _fetch_whole(name: str, file: str, commit: str | None, folder: Path) -> bool:
    """Writes a copy of the file. Returns False where the repository has no such file."""
    found = fetch(name, file, revision=commit)
    if found is not None:
        (folder / file).write_bytes(Path(found).read_bytes())
    return found is not None


def _fetch_header(name: str, file: str, commit: str | None, folder: Path) -> bool:
    """Writes a sparse copy of the file. Returns False where the repository has no such file.

    Raises RangeError where no part of it is served, HubError where the connection fails.
    """
    url = hf_hub_url(name, file, revision=commit)
    try:
        size = get_hf_file_metadata(url).size
        (length,) = struct.unpack("<Q", _fetch(url, 0, 8))
        if size is None or not 0 < length <= min(size - 8, MAX_JSON_BYTES):
            raise RangeError
        header = _fetch(url, 8, length)
        with open(folder / file, "wb") as copy:
            copy.write(struct.pack("<Q", length) + header)
            copy.truncate(size)
            for start, end in _maps(header, size - 8 - length):
                copy.seek(8 + length + start)
                copy.write(_fetch(url, 8 + length + start, end - start))
    except EntryNotFoundError:
        return False
    except (HfHubHTTPError, OfflineModeIsEnabled):  # what the Hub answers is said in plain words where the whole file is asked for
        raise RangeError from None
    except HUB_ERRORS as error:
        raise HubError(f"{name}: {file}: the connection to the Hub broke off ({first_line(error)}). Run it again.") from error
    return True


def _maps(header: bytes, num_bytes: int) -> Iterator[tuple[int, int]]:
    """First byte and end of every vocabulary map in a safetensors file of so many bytes after its header. What is unsound in the header,
    which may be a stranger's, is passed over here, and refused when the copy is read."""
    try:
        entries = parse_json(header, "")
    except ValueError:
        return
    for name, entry in entries.items():
        offsets = entry.get("data_offsets") if isinstance(entry, dict) and name.split(".")[-1] in vocab.MAPS else None
        if isinstance(offsets, list) and len(offsets) == 2 and all(type(offset) is int for offset in offsets):
            start, end = offsets
            if 0 <= start < end <= num_bytes:
                yield start, end


def _fetch(url: str, start: int, count: int) -> bytes:
    """Returns `count` bytes of a file on the Hub, from `start` on. Raises RangeError where it does not send exactly these."""
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
