"""Drafters on the Hub: the model card, a folder's upload, and pull requests that convert somebody's repository."""

import json
import os
import re
import shlex
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCardData, constants
from huggingface_hub.errors import (
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from .checkpoints import EXPORT_FORMATS, Checkpoint, convert_checkpoint, launch_line, read_checkpoint
from .checkpoints.export import refusal
from .checkpoints.files import STAGED
from .checkpoints.headers import read_headers
from .checkpoints.keys import FLAGS
from .checkpoints.knobs import KNOBS_FILE
from .checkpoints.read import linked_weights, stated_fields
from .checkpoints.sharing import stamps, unchanged
from .checkpoints.sources import HUB_ERRORS, HubError, first_line
from .config_rules import is_mla
from .configuration import HUB_OPTIONS, Eagle31Config
from .json_file import read_json
from .markdown import code, inert, table
from .printable import one_line
from .storage.folders import json_text, read_text

CARD = "README.md"
REPORT = "report.md"  # as `eagle31 drift` and `eagle31 bench acceptance` write it
# around a report in a card, so that a later one takes its place
REPORT_BEGINS = "<!-- eagle31_hf report -->"
REPORT_ENDS = "<!-- end of eagle31_hf report -->"
OWN_REPORT = re.compile(rf"^{REPORT_BEGINS}\s*?$.*?^{REPORT_ENDS}(?=\s*?$)", re.MULTILINE | re.DOTALL)
# Errors of the Hub's client where an upload fails: those of a request, bad names, broken connections, offline mode.
UPLOAD_ERRORS = (*HUB_ERRORS, HFValidationError, RuntimeError, OfflineModeIsEnabled)
TAG_OF = {"EAGLE 3.1": "eagle3.1", "P-EAGLE": "p-eagle"}
TAGS = ["eagle31_hf", "speculative-decoding", "draft-model"]


@dataclass
class CardFacts:
    """Facts for a model card that neither config nor weights tell. Empty ones are left out.

    `training`: names of facts -> their words. `acceptance`: a dict for each measurement, `{"data", "depth",
    "mean_accepted_length", "accepted_per_position", "drafted_per_position"}` as in `AcceptanceStats`. `report`:
    the Markdown of a report on the drafter (`report.md`), for the end of the card. `license`, `datasets`, `language`
    and `tags` are as the Hub spells them.
    """

    license: str | None = None
    datasets: list[str] = field(default_factory=list)
    language: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    training: dict[str, str] = field(default_factory=dict)
    acceptance: list[dict[str, Any]] = field(default_factory=list)
    report: str | None = None


def kind(config: Eagle31Config) -> str:
    """Returns the generation of EAGLE that a drafter's masks and norms show, as its card and `eagle31 info` call it."""
    if config.is_parallel:
        return "P-EAGLE"
    if config.is_eagle31 or (config.norm_before_fc and config.norm_output):
        return "EAGLE 3.1"
    return "EAGLE 3" if not (config.fc_norm or config.norm_output) else "between EAGLE 3 and 3.1"


def render_card(config: Eagle31Config, facts: CardFacts | None = None, repo_id: str = "OWNER/NAME") -> str:
    """Returns the model card of a native drafter: metadata for the Hub, use, config, training and acceptance."""
    facts = facts or CardFacts()
    # a local folder is no base model on the Hub
    named = config.target_model if re.fullmatch(r"[\w.-]+/[\w.-]+", config.target_model or "") else None
    data = ModelCardData(
        base_model=named,
        base_model_relation="adapter" if named else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        license=facts.license,
        language=facts.language or None,
        datasets=facts.datasets or None,
        tags=[TAG_OF.get(kind(config), "eagle3"), *TAGS, *facts.tags],
    )
    parts = [f"---\n{data.to_yaml()}\n---", _usage(config, repo_id)]
    parts.append("## What it is\n\n" + table(("", ""), described(config)))
    if facts.training:
        parts.append("## Training\n\n" + table(("", ""), facts.training.items()))
    if facts.acceptance:
        parts.append("## Acceptance\n\n" + _acceptance(facts.acceptance))
    card = "\n\n".join(parts) + "\n"
    return card if facts.report is None else with_report(card, facts.report)


def with_report(card: str, report: str) -> str:
    """Returns a card with a report at its end, or in place of the one that it has, between lines of their own: no name
    in the card makes such a line."""
    part = f"{REPORT_BEGINS}\n{report.strip()}\n{REPORT_ENDS}"
    if OWN_REPORT.search(card):
        return OWN_REPORT.sub(lambda found: part, card, count=1)
    return f"{card.rstrip()}\n\n{part}\n"


def _usage(config: Eagle31Config, repo_id: str) -> str:
    target = _literal(config.target_model or "TARGET")
    return f"""# {kind(config)} drafter for {inert(config.target_model or "a target it does not name")}

Drafts several tokens ahead; the target verifies them in one forward, and the text stays exactly the target's own.

```python
import eagle31_hf
from transformers import AutoModelForCausalLM, AutoTokenizer

target = AutoModelForCausalLM.from_pretrained({target}, dtype="auto", device_map="auto")
drafter = eagle31_hf.Eagle31DrafterModel.from_pretrained({_literal(repo_id)}, dtype=target.dtype).to(target.device)
inputs = AutoTokenizer.from_pretrained({target})("Why is the sky blue?", return_tensors="pt").to(target.device)
output = target.generate(**inputs, assistant_model=drafter, max_new_tokens=256)
```{_serving(config, repo_id)}"""


def _serving(config: Eagle31Config, repo_id: str) -> str:
    """Returns how engines that can run a drafter serve it; vLLM's plug-in follows no config to weights elsewhere."""
    formats = [name for name in ("vllm", "sglang") if refusal(config, name) is None]
    if not formats:
        return ""
    engines = " or ".join(EXPORT_FORMATS[name].engine for name in formats)
    export = code(f"eagle31 export {shlex.quote(repo_id)} FOLDER --format {formats[0]}")
    copy = f"\n\nA copy for {engines} alone is written by {export}{' (or `sglang`)' if len(formats) > 1 else ''}."
    if "vllm" not in formats or config.weights_from is not None:
        return copy
    line = one_line(launch_line(config, repo_id, "vllm"))
    return f"\n\nIn vLLM, with `eagle31_hf` installed beside it:\n\n```bash\n{line}\n```{copy}"


def _literal(name: str) -> str:
    """Returns a name as Python code has it, in one line."""
    return one_line(json.dumps(name, ensure_ascii=False))


def described(config: Eagle31Config) -> list[tuple[str, str]]:
    """Returns what a drafter is, row by row, as its card and `eagle31 info` say it."""
    c = config
    sizes = f"{c.num_attention_heads} heads, MLA latent {c.kv_lora_rank}"
    if not is_mla(c):
        norm = ", q/k norm" if c.qk_norm else ""
        sizes = f"{c.num_attention_heads} heads over {c.num_key_value_heads} of {c.head_dim}{norm}"
    shared = c.share_target_embeddings, c.share_target_head
    embedding, head = ("the target" if is_shared else "own" for is_shared in shared)
    states = c.aux_hidden_state_layer_ids or "[2, L // 2, L - 3]"
    return [
        ("captured target states", f"`hidden_states` {states}, {c.target_hidden_size} wide"),
        *((name, str(getattr(c, name)).lower()) for name in FLAGS),
        ("layers", f"{c.num_hidden_layers}, {c.hidden_size} wide, MLP {c.intermediate_size}, {sizes}"),
        ("vocabulary", f"proposes {c.draft_vocab_size:,} of {c.vocab_size:,} ids"),
        ("embedding, head", f"{embedding}, {head}"),
        ("stored as", str(c.dtype or "float32").removeprefix("torch.")),
    ]


def _acceptance(measurements: list[dict[str, Any]]) -> str:
    rows = list[tuple[str, ...]]()
    for m in measurements:
        pairs = zip(m["accepted_per_position"], m["drafted_per_position"], strict=True)
        counts = " ".join(f"{accepted}/{drafted}" for accepted, drafted in pairs)
        rows.append((str(m.get("data", "")), str(m["depth"]), f"{m['mean_accepted_length']:.2f}", counts))
    note = "Accepted length: tokens per target forward, the target's own included, the prompt's forward excluded."
    return table(("data", "depth", "accepted length", "accepted/drafted by position"), rows) + f"\n\n{note}"


def publish(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    report: str | Path | None = None,
) -> str:
    """Uploads a native checkpoint, or a config that points to its weights, in one commit. Returns the commit's URL.

    The revision of weights that a config points to is pinned to their present commit. A card is written where the
    folder has none; one that the repository has is kept. `report`: a report's folder, or its Markdown, which is
    uploaded, too, and put at the end of the card, in place of an earlier one. Files that an interrupted upload has
    sent are not sent again. Raises ValueError for a folder that is neither, is half converted or holds links that lead
    out of it, or whose config points to no drafter, OSError where the folder changes meanwhile or the Hub refuses.
    """
    folder, api = Path(folder), HfApi(token=token)
    _check_repo_id(repo_id)
    measured = None if report is None else read_report(report)
    if not (folder / "config.json").is_file():
        found = "holds no config.json" if folder.is_dir() else "is no folder"
        expected = "the folder of a native checkpoint, or of a config with weights_from"
        raise OSError(f"{folder}: {found}; expected {expected}.")
    before = stamps(folder)
    values = read_json(folder / "config.json")
    if values.get("model_type") != Eagle31Config.model_type:
        found = f"{folder}: config.json says model_type {values.get('model_type')!r}"
        raise ValueError(f"{found}; expected 'eagle31'. Convert it first.")
    with unchanged(before, folder):
        files = _files_of(api, folder, values, repo_id)
    if measured is not None:
        files[REPORT] = measured.encode()
    settled = unchanged(before, folder)
    options: dict[str, Any] = {"private": private, "revision": revision, "create_pr": create_pr}
    return commit(api, repo_id, files, settled, commit_message=commit_message, **options)


def read_report(source: str | Path) -> str:
    """Returns the Markdown of a report, of its folder or the file. Raises OSError where there is none, ValueError for
    a file that is no text in UTF-8, or an empty one."""
    path = Path(source) / REPORT if Path(source).is_dir() else Path(source)
    if path.suffix != Path(REPORT).suffix:
        raise ValueError(f"{path}: is no Markdown; expected a report's folder, or its {REPORT}.")
    text = read_text(path)
    if not text.strip():
        raise ValueError(f"{path}: is empty; expected a report's Markdown.")
    return text


def _files_of(api: HfApi, folder: Path, values: dict[str, Any], repo_id: str) -> dict[str, Path | bytes]:
    """Returns the files of a folder that are to be uploaded: name -> path of weights, bytes of others.

    `values` are those of its config.json.
    """
    names: list[str] = []
    if values.get("weights_from") is None or any(folder.glob("*.safetensors")):
        checkpoint = read_checkpoint(str(folder))
        if not checkpoint.is_native or values.get("transformers_weights") == STAGED:
            raise ValueError(f"{folder}: is not the native format yet; run `eagle31 convert {folder}` first.")
        config = checkpoint.config
        names = [*(file.name for file in checkpoint.files.weight_files), KNOBS_FILE]
    else:
        config = _of_linked(api, values, folder)
        values["weights_from"] = config.weights_from
    _own_file(folder, "config.json")
    paths = {name: _own_file(folder, name) for name in (*names, CARD) if (folder / name).is_file()}
    files = {name: path.read_bytes() if name.endswith((".json", ".md")) else path for name, path in paths.items()}
    return {CARD: render_card(config, None, repo_id).encode(), **files, "config.json": json_text(values).encode()}


def _own_file(folder: Path, name: str) -> Path:
    """Returns the path of a file of the folder, links resolved; in a snapshot of the Hub's cache files are links.

    Raises ValueError for a link to any other place: the file there may be private, and the folder may be a stranger's.
    """
    home, file = folder.resolve(), (folder / name).resolve()
    snapshots = next((parent for parent in home.parents if parent.name == "snapshots"), None)
    blobs = None if snapshots is None else snapshots.parent / "blobs"
    if home not in file.parents and file.parent != blobs:
        found = f"{folder / name}: is a link to {file}, outside the folder"
        raise ValueError(f"{found}; expected a file. Copy it there to publish it.")
    return file


def _check_repo_id(repo_id: str) -> None:
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"repo_id is {repo_id!r}; expected OWNER/NAME ({' '.join(str(error).split())})") from None


def _of_linked(api: HfApi, values: dict[str, Any], folder: Path) -> Eagle31Config:
    """Returns the config of the drafter to which `values`, of a folder's config.json, point, with the fields they state
    and the commit that the link's revision names now. Raises OSError and ValueError as reading it does."""
    link = values["weights_from"]
    repo_id, revision = linked_weights(link, f"{folder}: config.json: weights_from")
    try:
        sha = str(api.model_info(repo_id, revision=revision).sha)
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise OSError(f"{folder}: weights_from {link}: the Hub does not have it ({first_line(error)}).") from None
    except UPLOAD_ERRORS as error:
        why = f"{constants.ENDPOINT} does not answer: {first_line(error)}"
        raise HubError(f"{folder}: weights_from {link}: {why}") from None
    config = read_headers(repo_id, stated_fields(values, str(folder)), revision=sha, token=api.token).config
    config.weights_from = {"repo_id": repo_id, "revision": sha}
    return config


def _text(data: Path | bytes) -> str:
    return (data if isinstance(data, bytes) else data.read_bytes()).decode()


def commit(
    api: HfApi,
    repo_id: str,
    files: dict[str, Path | bytes],
    settled: AbstractContextManager[Any] | None = None,
    *,
    private: bool | None,
    revision: str | None,
    create_pr: bool,
    **said: str | None,
) -> str:
    """Uploads files, by name, in one commit, except a card where the repository has one; this gets the report that is
    among the files.

    `settled` is the context in which weights are sent: it may refuse at its end, before anything is committed. `said`:
    commit_message and commit_description. Returns the URL of the commit, or of the pull request. Raises OSError where
    the Hub refuses.
    """
    try:
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not create_pr:
            api.create_branch(repo_id, branch=revision, exist_ok=True)  # a new one has the card that main has
        if api.file_exists(repo_id, CARD, revision=revision):
            del files[CARD]
            if REPORT in files:
                files[CARD] = Path(api.hf_hub_download(repo_id, CARD, revision=revision))
        if REPORT in files:
            files[CARD] = with_report(_text(files[CARD]), _text(files[REPORT])).encode()
        additions = [CommitOperationAdd(name, data) for name, data in files.items()]
        with settled or nullcontext():
            api.preupload_lfs_files(repo_id, additions, revision=revision, create_pr=create_pr)
        options: dict[str, Any] = said | {"revision": revision, "create_pr": create_pr}
        options["commit_message"] = said["commit_message"] or "Upload drafter with eagle31_hf"
        made = api.create_commit(repo_id, additions, **options)
    except UPLOAD_ERRORS as error:
        found = f"{repo_id}: the upload failed: {first_line(error)}"
        raise HubError(f"{found} Nothing was committed; run it again to resume.") from None
    return made.pr_url or made.commit_url


def convert_on_hub(
    repo_id: str, *, token: str | bool | None = None, revision: str | None = None, **options: Any
) -> tuple[Checkpoint, str | None]:
    """Opens a pull request that replaces the weights and config of a Hub repository with the native ones.

    The originals stay in the history. `options` are those of `convert_checkpoint`. Returns the checkpoint and the pull
    request's URL, None where the repository is native already, as the options ask for. Raises OSError where the Hub
    refuses, ValueError for a local folder, and for a checkpoint that cannot be converted.
    """
    if os.path.isdir(repo_id):
        said = f"{repo_id}: is a local folder; expected a Hub repository"
        raise ValueError(f"{said}. Without a pull request it is converted.")
    _check_repo_id(repo_id)
    hub = {"token": token, "revision": revision} | {name: options.pop(name) for name in HUB_OPTIONS if name in options}
    overrides = dict(options)
    convention = overrides.pop("aux_layer_convention", None)
    found = read_checkpoint(repo_id, overrides, convention, **hub)
    if found.is_native and found.config.to_dict() == read_checkpoint(repo_id, **hub).config.to_dict():
        return found, None
    with TemporaryDirectory() as staging:
        folder, place = Path(staging, "native"), PurePosixPath(hub.get("subfolder") or "")
        checkpoint = convert_checkpoint(repo_id, folder, **hub, **options)
        added = {path.name: path for path in sorted(folder.iterdir())}
        is_linked = found.files.source != repo_id  # the weights are another repository's, which weights_from names
        old = [] if is_linked else [*found.files.weight_files, found.folder / KNOBS_FILE]
        replaced = {path.name for path in old if path.is_file()} - added.keys()
        operations: list[Any] = [CommitOperationAdd(str(place / name), path) for name, path in added.items()]
        operations += [CommitOperationDelete(str(place / name)) for name in sorted(replaced)]
        said = f"Read as {'; '.join(found.reasons)}. The tensors are the same, under their native names."
        try:
            made = HfApi(token=token).create_commit(
                repo_id,
                operations,
                commit_message="Convert to the native format of eagle31_hf",
                create_pr=True,
                revision=revision,
                commit_description=said,
            )
        except UPLOAD_ERRORS as error:
            raise HubError(f"{repo_id}: the pull request failed: {first_line(error)} Nothing was changed.") from None
    return checkpoint, made.pr_url
