"""`read_checkpoint`: any EAGLE 3 or 3.1 checkpoint in native terms, its config and which tensor is which.

Everything that can be refused is refused here, by headers alone, before a weight is loaded or a byte is written.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import vocab
from ..configuration import BASE_NAMES, FIELDS, HUB_OPTIONS, Eagle31Config
from ..json_file import show
from ..names import nearest, refuse_unknown
from . import keys, layer_ids
from .files import FLOATS, SIDE_FILES, CheckpointFiles, StoredTensor, check_dtype, open_files, unpickle
from .infer import build_config, check_computable, foreign_config
from .knobs import read_knobs
from .producers import NATIVE, identify
from .sharing import reads_one_state
from .tensors import MASK, Shapes, expected_tensors, layer_count, native_names, refuse_other_graphs

# Options that hold for the weights a config points to as well; `revision` and `subfolder` are of the repository with
# the config.
LINK_OPTIONS = tuple(name for name in HUB_OPTIONS if name not in ("revision", "subfolder"))
NOT_OVERRIDES = (
    "model_type", "architectures", "weights_from", "transformers_version", "dtype", "torch_dtype", "auto_map",
)  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """A drafter's checkpoint in native terms.

    `tensors`: native name -> where it is stored. `made`: tensors that the files lack, or hold in a form that is not
    trusted. `reasons` say why the checkpoint was read as it was, `notes` what the user may want to know; both are
    sentences without a full stop.
    """

    source: str
    files: CheckpointFiles
    format: str
    config: Eagle31Config
    tensors: dict[str, StoredTensor]
    made: dict[str, Tensor] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)  # name on disk -> why it is not needed
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    knobs: dict[str, Any] = field(default_factory=dict)  # of generation_config.json, where the checkpoint is native

    @property
    def folder(self) -> Path:
        return self.files.folder

    @property
    def num_parameters(self) -> int:
        """The number of values in its tensors, vocabulary maps not counted."""
        return sum(prod(stored.shape) for name, stored in self.tensors.items() if name not in vocab.MAPS)

    @property
    def is_native(self) -> bool:
        """True where the files are a native checkpoint as they are."""
        renamed = any(name != stored.name for name, stored in self.tensors.items())
        return self.format == NATIVE and not renamed and not self.dropped and not self.made.keys() - {*vocab.MAPS}

    @property
    def key_mapping(self) -> dict[str, str] | None:
        """Names on disk -> native names, as transformers' `from_pretrained` takes them; None where all are native."""
        mapping = {f"^{re.escape(stored.name)}$": name for name, stored in self.tensors.items() if stored.name != name}
        return mapping or None


@reads_one_state("source")
def read_checkpoint(
    source: str, overrides: Mapping[str, Any] | None = None, aux_layer_convention: str | None = None, **hub: Any
) -> Checkpoint:
    """Reads the config and the tensors' headers of a folder or Hub repository, in whatever EAGLE 3 or 3.1 format.

    `overrides` are fields of `Eagle31Config` that win over the checkpoint's; `aux_layer_convention`, "boundary" or
    "output", says how it counts the target's layers where it does not say so itself. `hub`: revision, token, cache_dir
    and the like. Raises OSError where something is not there, ValueError where the checkpoint is unsound, is not an
    EAGLE 3 drafter's, or may mean two things.
    """
    if aux_layer_convention not in (None, *layer_ids.CONVENTIONS):
        found = f"aux_layer_convention is {aux_layer_convention!r}"
        raise ValueError(f"{found}; expected one of {tuple(layer_ids.CONVENTIONS)} or None.")
    overrides = dict(overrides or {})
    refuse_unknown(overrides, FIELDS, f"fields of Eagle31Config, or {', '.join(HUB_OPTIONS)}")
    files = open_files(str(source), **hub)
    if files.config.get("weights_from") is not None and not files.tensors:
        files, overrides = _follow(files, overrides, hub)
    return _understand(str(source), files, overrides, aux_layer_convention)


def complete_config(values: Mapping[str, Any], given: Mapping[str, Any]) -> Eagle31Config:
    """Returns the whole config of a drafter whose config.json, `values`, only points to its weights.

    Fields that config.json states win over those of the weights. `given` are keyword arguments of a `from_pretrained`:
    fields of `Eagle31Config`, which win over both, and options of the Hub, of which LINK_OPTIONS hold for the weights
    too. Raises OSError and ValueError as `read_checkpoint` does.
    """
    overrides = {name: value for name, value in given.items() if name in FIELDS}
    files, stated = _follow(CheckpointFiles("config.json with weights_from", Path(), dict(values)), overrides, given)
    return _understand(files.source, files, stated, None).config


Eagle31Config.complete = staticmethod(complete_config)  # type: ignore[assignment]


def _understand(
    source: str, files: CheckpointFiles, overrides: dict[str, Any], aux_layer_convention: str | None
) -> Checkpoint:
    """Returns the checkpoint that the files are. Raises ValueError as `read_checkpoint` does."""
    if not files.tensors:
        found = f"{source}: config.json without weights"
        raise ValueError(f"{found}; expected model.safetensors or pytorch_model.bin beside it, or weights_from in it.")
    producer, sign = identify(files)
    reasons = [f"{producer.name}: {sign}"]
    names, dropped = native_names(files.tensors, files.source)
    tensors = {names[name]: stored for name, stored in files.tensors.items() if name in names}
    shapes = {name: stored.shape for name, stored in tensors.items()}
    notes: list[str] = []
    keys.refuse_other_graphs(files.config, files.source)
    knobs: dict[str, Any] = {}
    if producer.name == NATIVE:
        for name in sorted(files.config.keys() - FIELDS - BASE_NAMES):
            if meant := nearest(name, FIELDS):
                notes.append(f"config.json has {show(name)}, which is no field and not read: is {meant} meant")
        # beside weights of its own, it points to no others
        config = build_config(files.config | overrides | {"weights_from": None}, files.source)
        knobs = read_knobs(files.weight_files[0].parent)  # a conversion in place stages them beside the weights
    else:
        refuse_other_graphs(shapes, files.source, files.config.get("model_type"))
        config = foreign_config(files, producer, shapes, overrides, aux_layer_convention, reasons, notes)
    checkpoint = Checkpoint(source, files, producer.name, config, tensors, {}, dropped, reasons, notes, knobs)
    _complete(checkpoint)
    return checkpoint


def _follow(
    files: CheckpointFiles, overrides: dict[str, Any], hub: Mapping[str, Any]
) -> tuple[CheckpointFiles, dict[str, Any]]:
    """Returns the files to which a Hub-hosted config points, and the fields it states, over which `overrides` win."""
    where = f"{files.source}: config.json: weights_from"
    repo_id, revision = linked_weights(files.config["weights_from"], where)
    if repo_id == files.source:
        raise ValueError(f"{where} names the repository itself, {repo_id}; expected the one that holds the weights.")
    options = {name: hub[name] for name in LINK_OPTIONS if name in hub}
    stated = stated_fields(files.config, files.source)
    base = open_files(repo_id, revision=revision, **options)
    if base.config.get("weights_from") is not None:
        found = f"{where} names {repo_id}, which holds no weights but points on"
        raise ValueError(f"{found}; expected the repository that holds them.")
    return base, stated | overrides


def stated_fields(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Returns the fields that a config.json which points to its weights states itself. Raises ValueError for a key that
    is no field."""
    stated = {name: value for name, value in values.items() if name not in NOT_OVERRIDES and not name.startswith("_")}
    expected = "fields of Eagle31Config, which win over those of the weights"
    refuse_unknown(stated, FIELDS, expected, f"{source}: config.json: ")
    return stated


def linked_weights(link: Any, where: str) -> tuple[str, str | None]:
    """Returns repository and revision of a `weights_from`, which stands at `where`. Raises ValueError for what is
    none, and for what names no repository of the Hub."""
    repo_id, revision = (link.get("repo_id"), link.get("revision")) if isinstance(link, dict) else (None, None)
    if not isinstance(repo_id, str) or not isinstance(revision, str | None):
        raise ValueError(f'{where} is {link!r}; expected {{"repo_id": "owner/name", "revision": "commit"}}.')
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repo_id) or Path(repo_id).exists():
        found = f"{where} names {repo_id!r}, which is a local path or no owner/name"
        raise ValueError(f"{found}; expected a Hub repository.")
    return repo_id, revision


def _complete(checkpoint: Checkpoint) -> None:
    """Adds the tensors that are made to a checkpoint, and takes those out that are not needed.

    Raises ValueError unless the tensors are then exactly those that the config asks for, and for one that nothing can
    be built from.
    """
    source, config = checkpoint.files.source, checkpoint.config
    tensors, dropped = checkpoint.tensors, checkpoint.dropped
    names = {stored.name: name for name, stored in tensors.items()}
    if config.aux_hidden_state_layer_ids is not None:
        layer_ids.check(config.aux_hidden_state_layer_ids, f"{source}: config.json: aux_hidden_state_layer_ids")
    check_computable(config, source)
    layers = layer_count(tensors)
    if config.num_hidden_layers != layers:  # before that many are built
        raise keys.contradicted(source, "num_hidden_layers", config.num_hidden_layers, layers, "as many")
    try:
        expected = expected_tensors(config)
    except (ArithmeticError, RuntimeError) as error:
        raise ValueError(f"{source}: config.json: {error}; expected the sizes and the rope of a drafter.") from error
    if "d2t" in expected:
        checkpoint.made.update(_vocabulary_map(checkpoint))
    else:
        for name in vocab.MAPS:
            if name in tensors:
                _check_trivial(tensors[name], source)
                dropped[tensors.pop(name).name] = "the draft vocabulary is the target's"
    for name in expected.keys() - tensors.keys():
        if name.endswith("self_attn.o_proj.bias") and checkpoint.format != NATIVE:
            dtype = getattr(torch, str(config.dtype).removeprefix("torch."))
            checkpoint.made[name] = torch.zeros(expected[name], dtype=dtype)
    if MASK in tensors and tensors[MASK].shape != expected.get(MASK):
        sizes = tuple(size for size in tensors[MASK].shape if size != 1)
        if sizes == expected.get(MASK):
            checkpoint.made[MASK] = tensors[MASK].load().reshape(sizes)
    for flag, name in (("share_target_embeddings", "embed_tokens.weight"), ("share_target_head", "lm_head.weight")):
        if checkpoint.format != NATIVE and getattr(config, flag) and name in tensors:
            dropped[tensors.pop(name).name] = f"{flag} is on: the target's is used"
    _compare(checkpoint, expected, names)


def _compare(checkpoint: Checkpoint, expected: Shapes, names: dict[str, str]) -> None:
    """Raises ValueError where tensors and config disagree. `names`: on disk -> native, for the message."""
    tensors, made = checkpoint.tensors, checkpoint.made
    source = checkpoint.files.source
    missing, extra = sorted(expected.keys() - tensors.keys() - made.keys()), sorted(tensors.keys() - expected.keys())
    if missing or extra:
        on_disk = f" In the file: {_some(names)}." if any(old != new for old, new in names.items()) else ""
        raise ValueError(
            f"{source}: tensors and config disagree: missing {_some(missing)}, unexpected {_some(extra)}. Expected"
            " exactly the tensors its config.json describes; check the flags there (fc_norm, norm_before_fc,"
            f" share_target_head, ...).{on_disk}"
        )
    for name, stored in sorted(tensors.items()):
        if name not in made and stored.shape != expected[name]:
            found = f"{stored.file}: {stored.name} has shape {stored.shape}"
            raise ValueError(f"{found}; expected {expected[name]}, as config.json describes. Check the sizes there.")
        if name not in vocab.MAPS:
            check_dtype(stored.file, stored.name, stored.dtype, FLOATS)


def _some(names: Collection[str]) -> str:
    """Returns the first forty of the names, for a message."""
    listed = str(sorted(names)[:40]) if names else "none"
    return listed if len(names) <= 40 else f"{listed} and {len(names) - 40} more"


def _vocabulary_map(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Returns `d2t` (Vd,) int64 and `t2d` (V,) bool; the second is always rebuilt from the first.

    Raises ValueError for maps that are none, or of another size.
    """
    config, tensors = checkpoint.config, checkpoint.tensors
    if "d2t" in tensors:
        d2t, where = _load_map(tensors["d2t"]), f"{tensors['d2t'].file}: "
    else:
        d2t, where = _side_map(checkpoint), f"{checkpoint.files.source}: "
    if d2t.shape != (config.draft_vocab_size,):
        found = f"{where}d2t has shape {tuple(d2t.shape)}"
        raise ValueError(f"{found}; expected ({config.draft_vocab_size},), one entry a row of lm_head.")
    try:
        vocab.check_mapping(d2t, config.vocab_size)
    except ValueError as error:
        raise ValueError(f"{where}{error}") from None
    t2d = vocab.membership(vocab.target_ids(d2t), config.vocab_size)
    if "t2d" in tensors:
        stored = _load_map(tensors["t2d"]).bool().flatten()
        if not torch.equal(stored, t2d):
            found = f"t2d marks {int(stored.sum())} ids and is not what d2t says ({int(t2d.sum())} ids)"
            checkpoint.notes.append(f"{found}: rebuilt from d2t")
    return {"d2t": d2t, "t2d": t2d}


def _load_map(stored: StoredTensor) -> Tensor:
    if stored.dtype in FLOATS or (stored.dtype == "BOOL" and not stored.name.endswith("t2d")) or len(stored.shape) != 1:
        found = f"{stored.file}: {stored.name} is {stored.dtype} of shape {stored.shape}"
        raise ValueError(f"{found}; expected integers in one dimension.")
    tensor = stored.load()
    return tensor if tensor.dtype == torch.bool else tensor.long()


def _side_map(checkpoint: Checkpoint) -> Tensor:
    """Returns the draft vocabulary of older checkpoints of NeMo, which keep its absolute ids in a file of their own.

    Raises ValueError where there is no such file.
    """
    config = checkpoint.config
    for name in SIDE_FILES:
        if (checkpoint.folder / name).is_file():
            ids = unpickle(checkpoint.folder / name).get("selected_token_ids")
            ids = torch.tensor(ids) if isinstance(ids, list) and all(type(i) is int for i in ids) else ids
            if isinstance(ids, Tensor) and ids.dim() == 1 and not ids.is_floating_point():
                checkpoint.notes.append(f"the draft vocabulary is from {name}: the weights have no d2t")
                return vocab.offsets(ids)
    raise ValueError(
        f"{checkpoint.files.source}: lm_head.weight has {config.draft_vocab_size} rows for a vocabulary of"
        f" {config.vocab_size}, and there is no d2t to say which ids they are (engines would take the first ones);"
        " expected d2t. Ask the drafter's author for it."
    )


def _check_trivial(stored: StoredTensor, source: str) -> None:
    values = _load_map(stored)
    if bool(values.logical_not().any() if stored.name.endswith("t2d") else values.any()):
        raise ValueError(
            f"{source}: the draft vocabulary is as large as the target's, yet {stored.name} reorders or leaves out ids;"
            " expected zeros in d2t and true in t2d, or neither."
        )
