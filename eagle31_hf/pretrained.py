"""Drafters are loaded from every EAGLE 3 and 3.1 format, and saved and published in the native one."""

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import HfApi
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from .checkpoints.convert import open_to_others, remove_stale_weights
from .checkpoints.knobs import check_knobs
from .checkpoints.read import Checkpoint, read_checkpoint
from .checkpoints.sharing import folder_lock, reads_one_state
from .configuration import FIELDS, HUB_OPTIONS, Eagle31Config
from .hub import CARD, REPORT, CardFacts, commit, render_card
from .quantized import check_state, quantize, refuse_quantized, refuse_quantized_state
from .vocab import MAPS

logger = logging.get_logger(__name__)


class Eagle31PreTrainedModel(PreTrainedModel):
    """Base class of `Eagle31DrafterModel`, which adds the network: loads, quantizes, saves and publishes a drafter."""

    config_class = Eagle31Config
    base_model_prefix = "model"
    # transformers is to warn of no tensor: headers are compared with the config before anything is loaded, and tensors
    # of these names that no file holds are in Checkpoint.made.
    _keys_to_ignore_on_load_missing = [*(f"^{name}$" for name in MAPS), r"o_proj\.bias$"]
    _keys_to_ignore_on_load_unexpected = [r".*"]

    def __init__(self, config: Eagle31Config):
        super().__init__(config)
        # for a checkpoint that sets no knobs: the library chooses how far to draft
        self.generation_config = GenerationConfig(num_assistant_tokens="auto", assistant_confidence_threshold=0.0)
        self.checkpoint: Checkpoint | None = None  # what it was loaded from
        self.card_facts = CardFacts()

    @classmethod
    @reads_one_state("pretrained_model_name_or_path")
    def from_pretrained(
        cls,
        pretrained_model_name_or_path,
        *args,
        config=None,
        aux_layer_convention=None,
        output_loading_info: bool = False,
        **kwargs,
    ):
        """Loads a drafter in any EAGLE 3 or 3.1 format from a folder or Hub repository, or by a config that points to
        its weights.

        Arguments are those of `PreTrainedModel.from_pretrained`, and fields of `Eagle31Config`. Fields given as
        keywords, or by `config` (one, or the folder or repository of one), win over the checkpoint's.
        `aux_layer_convention`, "boundary" or "output", says how a checkpoint counts the target's layers where it does
        not say so itself. `drafter.checkpoint` keeps how it was read. A folder that is converted meanwhile is read as
        before or as after the conversion. Raises OSError where something is not there; ValueError where tensors are
        missing, extra, misshapen or not finite, or the checkpoint is no EAGLE 3 drafter's or is ambiguous (the message
        names the argument that decides).
        """
        if pretrained_model_name_or_path is None:  # weights are in kwargs["state_dict"]
            refuse_quantized_state(kwargs.get("state_dict"))
            return super().from_pretrained(
                None, *args, config=config, output_loading_info=output_loading_info, **kwargs
            )
        checkpoint = _read_as_asked(pretrained_model_name_or_path, config, aux_layer_convention, kwargs)
        config = deepcopy(checkpoint.config)
        # by this transformers finds weights under another file name
        config.transformers_weights = checkpoint.files.config.get("transformers_weights")
        options = {name: value for name, value in kwargs.items() if name not in (*HUB_OPTIONS, *FIELDS)}
        options["ignore_mismatched_sizes"] = True  # shapes were compared before, except that of t2d, which is rebuilt
        options |= {"key_mapping": checkpoint.key_mapping, "output_loading_info": True}
        loaded: Any = super().from_pretrained(str(checkpoint.folder), *args, config=config, **options)
        model, info = loaded
        del model.config.transformers_weights
        model.config.name_or_path = str(pretrained_model_name_or_path)
        fill_in(model, checkpoint)
        check_finite(model, checkpoint)
        if checkpoint.knobs:
            model.generation_config = GenerationConfig.from_dict(dict(checkpoint.knobs))
        model.checkpoint = checkpoint
        info["missing_keys"] = set(info["missing_keys"]) - checkpoint.made.keys()
        info["unexpected_keys"] = set(info["unexpected_keys"]) - checkpoint.dropped.keys()
        return (model, info) if output_loading_info else model

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Loads the drafter's own tensors; torch calls this before it loads those of its modules. Raises ValueError
        for a state of another kind of weights, before any tensor is copied."""
        check_state(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def quantize(self, kind: str) -> "Eagle31PreTrainedModel":
        """Holds the weights of the drafter's own linear layers in 8 bits, "int8" or "fp8" (e4m3), with one scale a row;
        returns the drafter.

        A draft step then reads half the bytes of bf16. The text stays the target's; fewer drafts may be accepted.
        Embeddings, norms and what is the target's are left as they are, and of latent attention `kv_b_proj`, which is
        read as it is. Nothing can undo it: a quantized drafter drafts, and is not saved, exported, upgraded or trained.
        Raises ValueError for another kind, for a drafter that has been quantized to the other one, and for weights that
        are not finite, not loaded, or not plain ones; then nothing is changed.
        """
        quantize(self, kind)
        return self

    def save_pretrained(
        self,
        save_directory,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        push_to_hub: bool = False,
        **kwargs,
    ):
        """Writes the drafter in the native format, whatever format it was loaded from.

        That is the config, the weights under their native names, the drafting knobs, and a model card where the folder
        has none; `drafter.card_facts` adds license, data, training and acceptance to it. Arguments are those of
        `PreTrainedModel.save_pretrained`. Processes that save into one folder take turns, so that it holds one drafter
        whole; of a distributed run only the first writes. Raises ValueError, before anything is written, for a
        quantized drafter, and for knobs that no drafter could be loaded with.
        """
        refuse_quantized(self, "saved")
        check_knobs(self.generation_config)
        names = ("repo_id", "commit_message", "commit_description", "private", "create_pr", "revision", "tags")
        hub = {name: kwargs.pop(name) for name in names if name in kwargs}
        refuse_variant(kwargs)
        folder = Path(save_directory)
        repo_id, tags = hub.pop("repo_id", folder.resolve().name), hub.pop("tags", None) or []
        writes = self.should_save_on_this_rank(is_main_process)
        folder.mkdir(parents=True, exist_ok=True)
        # processes that do not write still take part in gathering the weights, and must not wait for the lock
        with folder_lock(folder, required=False) if writes else nullcontext():
            state = None if state_dict is None else dict(state_dict)  # transformers takes its tensors out of it
            super().save_pretrained(folder, is_main_process, state, **kwargs | {"save_original_format": False})
            if writes:
                if not (kwargs.get("distributed_checkpoint") or self._hf_peft_config_loaded):
                    remove_stale_weights(folder)
                self.generation_config.save_pretrained(folder)
                open_to_others(folder)
                if not (folder / CARD).exists():
                    facts = replace(self.card_facts, tags=[*self.card_facts.tags, *tags])
                    config: Any = self.config
                    (folder / CARD).write_text(render_card(config, facts, repo_id), encoding="utf-8")
        if push_to_hub:
            # for the upload, processes have no folder in common
            saving = {name: value for name, value in kwargs.items() if name != "distributed_checkpoint"}
            saving |= {"is_main_process": is_main_process, "state_dict": state_dict, "tags": tags}
            self._push(repo_id, saving, kwargs.get("token"), **hub)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str = "50GB",
        tags: list[str] | None = None,
    ) -> str:
        """Saves the drafter and uploads it in one commit, with a card unless the repository has one; a report in
        `card_facts` is uploaded, too, and put into either card.

        Returns the commit's URL; of a distributed run only the first process uploads, and others return "". Raises
        OSError where the Hub refuses; files that an interrupted upload has sent are not sent again.
        """
        said = {"commit_message": commit_message, "commit_description": commit_description}
        saving = {"max_shard_size": max_shard_size, "tags": tags}
        return self._push(repo_id, saving, token, private=private, revision=revision, create_pr=create_pr, **said)

    def _push(self, repo_id: str, saving: dict[str, Any], token: str | bool | None, **options: Any) -> str:
        """Saves the drafter by `save_pretrained`, whose arguments `saving` has, and uploads it: see `push_to_hub`.
        Processes that do not write still take part in gathering the weights."""
        with TemporaryDirectory() as name:
            folder = Path(name)
            self.save_pretrained(folder, repo_id=repo_id, **saving)
            if not self.should_save_on_this_rank(saving.get("is_main_process", True)):
                return ""
            files: dict[str, Path | bytes] = {path.name: path for path in folder.iterdir()}
            if self.card_facts.report is not None:
                files[REPORT] = self.card_facts.report.encode()
            given = {"private": None, "revision": None, "create_pr": False, "commit_message": None} | options
            return commit(HfApi(token=token), repo_id, files, **given)


def refuse_variant(options: dict[str, Any]) -> None:
    """Raises ValueError for the `variant` of a `from_pretrained` or a `save_pretrained`, if one is given: a checkpoint
    has one set of weights, whose headers are read before they are loaded."""
    if options.get("variant") is not None:
        raise ValueError(
            f"variant is {options['variant']!r}; expected none: a drafter has one set of weights. Use a folder or a"
            " revision for each."
        )


def _read_as_asked(source: Any, config: Any, convention: str | None, kwargs: dict[str, Any]) -> Checkpoint:
    """Reads a checkpoint from its headers, with the options of the Hub and the fields among the arguments of a
    `from_pretrained`, and logs its notes. Raises ValueError for a `config` that is none, and names none."""
    refuse_variant(kwargs)
    hub = {name: kwargs[name] for name in HUB_OPTIONS if name in kwargs}
    overrides = {name: kwargs[name] for name in FIELDS if name in kwargs}
    if isinstance(config, str | PathLike):
        config = Eagle31Config.from_pretrained(config, **hub)
    if config is not None:
        if not isinstance(config, Eagle31Config):
            raise ValueError(
                f"config is a {type(config).__name__}; expected an Eagle31Config, or the folder or Hub repository of"
                " one."
            )
        overrides = {name: getattr(config, name) for name in FIELDS} | overrides
    with torch.device("cpu"):  # not the caller's default device: "meta" is for transformers to refuse
        checkpoint = read_checkpoint(source, overrides, convention, **hub)
    for note in checkpoint.notes:
        logger.warning("%s: %s.", checkpoint.source, note)
    return checkpoint


@torch.no_grad()
def fill_in(model: Eagle31PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Writes the tensors that the files lack, or hold in a form that is not trusted, into the loaded model."""
    for name, value in checkpoint.made.items():
        tensor = model.get_buffer(name) if name in MAPS else model.get_parameter(name)
        if tensor.device.type != "meta":
            tensor.copy_(value)


def check_finite(model: Eagle31PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Raises ValueError naming the first parameter with a NaN or an infinity in it."""
    for name, tensor in model.named_parameters():
        if tensor.is_floating_point() and tensor.device.type != "meta" and not tensor.isfinite().all():
            copied = {"embed_tokens.weight": "embedding", "lm_head.weight": "head"}.get(name)
            hint = "save or download it again"
            if copied is not None:
                hint = f"speculators writes NaN where the verifier's {copied} was never copied into it"
            raise ValueError(
                f"{checkpoint.source}: {name} holds NaN or infinite values; expected finite weights: {hint}."
            )
