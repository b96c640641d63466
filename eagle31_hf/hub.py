"""Drafters on the Hub: the model card, a folder's upload, and pull requests that convert somebody's repository."""

import json
import re
import shlex
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCardData
from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from .checkpoints import Checkpoint, convert_checkpoint, launch_line, read_checkpoint
from .checkpoints.files import STAGED
from .checkpoints.keys import FLAGS
from .checkpoints.read import linked_weights
from .checkpoints.sharing import stamps, unchanged
from .checkpoints.sources import HUB_ERRORS, HubError, first_line
from .configuration import Eagle31Config
from .json_file import read_json
from .markdown import code, inert, table
from .printable import one_line
from .storage.folders import read_text, write_json

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
    parts = [_front_matter(config, facts), _usage(config, repo_id)]
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


def _front_matter(config: Eagle31Config, facts: CardFacts) -> str:
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
    return f"---\n{data.to_yaml()}\n---"


def _usage(config: Eagle31Config, repo_id: str) -> str:
    target = _literal(config.target_model or "TARGET")
    export = code(f"eagle31 export {shlex.quote(repo_id)} FOLDER --format vllm")
    return f"""# {kind(config)} drafter for {inert(config.target_model or "a target it does not name")}

Drafts several tokens ahead; the target verifies them in one forward, and the text stays exactly the target's own.

```python
import eagle31_hf
from transformers import AutoModelForCausalLM, AutoTokenizer

target = AutoModelForCausalLM.from_pretrained({target}, dtype="auto", device_map="auto")
drafter = eagle31_hf.Eagle31DrafterModel.from_pretrained({_literal(repo_id)}, dtype=target.dtype).to(target.device)
inputs = AutoTokenizer.from_pretrained({target})("Why is the sky blue?", return_tensors="pt").to(target.device)
output = target.generate(**inputs, assistant_model=drafter, max_new_tokens=256)
```

In vLLM, with `eagle31_hf` installed beside it:

```bash
{one_line(launch_line(config, repo_id, "vllm"))}
```

Without it, and for SGLang, {export} (or `sglang`) writes what they read."""


def _literal(name: str) -> str:
    """Returns a name as Python code has it, in one line."""
    return one_line(json.dumps(name, ensure_ascii=False))


def described(config: Eagle31Config) -> list[tuple[str, str]]:
    """Returns what a drafter is, row by row, as its card and `eagle31 info` say it."""
    c = config
    sizes = f"{c.num_attention_heads} heads, MLA latent {c.kv_lora_rank}"
    if c.kv_lora_rank is None:
        norm = ", q/k norm" if c.qk_norm else ""
        sizes = f"{c.num_attention_heads} heads over {c.num_key_value_heads} of {c.head_dim}{norm}"
    states = c.aux_hidden_state_layer_ids or "[2, L // 2, L - 3]"
    return [
        ("captured target states", f"`hidden_states` {states}, {c.target_hidden_size} wide"),
        *((name, str(getattr(c, name)).lower()) for name in FLAGS),
        ("layers", f"{c.num_hidden_layers}, {c.hidden_size} wide, MLP {c.intermediate_size}, {sizes}"),
        ("vocabulary", f"proposes {c.draft_vocab_size:,} of {c.vocab_size:,} ids"),
        (
            "embedding, head",
            f"{'the target' if c.share_target_embeddings else 'own'}, {'the target' if c.share_target_head else 'own'}",
        ),
        ("stored as", str(c.dtype or "float32").removeprefix("torch.")),
    ]


def _acceptance(measurements: list[dict[str, Any]]) -> str:
    rows = [
        (
            str(m.get("data", "")),
            str(m["depth"]),
            f"{m['mean_accepted_length']:.2f}",
            " ".join(f"{a}/{d}" for a, d in zip(m["accepted_per_position"], m["drafted_per_position"], strict=True)),
        )
        for m in measurements
    ]
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
    out of it, OSError where the folder changes meanwhile or the Hub refuses.
    """
    folder, api = Path(folder), HfApi(token=token)
    _check_repo_id(repo_id)
    measured = None if report is None else read_report(report)
    _check_folder(folder)
    before = stamps(folder)
    values = read_json(folder / "config.json")
    if values.get("model_type") != Eagle31Config.model_type:
        raise ValueError(
            f"{folder}: config.json says model_type {values.get('model_type')!r}; expected 'eagle31'. Convert it first."
        )
    with TemporaryDirectory() as staging:
        staged = Path(staging)
        with unchanged(before, folder):
            _stage(api, folder, values, staged, repo_id)
        if measured is not None:
            _report_into(staged / CARD, measured)
            (staged / REPORT).write_text(measured, encoding="utf-8")
        return upload(api, staged, repo_id, private, revision, create_pr, commit_message)


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


def _stage(api: HfApi, folder: Path, values: dict[str, Any], staged: Path, repo_id: str) -> None:
    """Puts the files of a folder that are to be uploaded into `staged`, weights as links, others as copies.

    `values` are those of its config.json.
    """
    if values.get("weights_from") is None or any(folder.glob("*.safetensors")):
        checkpoint = read_checkpoint(str(folder))
        if not checkpoint.is_native or values.get("transformers_weights") == STAGED:
            raise ValueError(f"{folder}: is not the native format yet; run `eagle31 convert {folder}` first.")
        config = checkpoint.config
        names = [*(file.name for file in checkpoint.files.weight_files), "generation_config.json"]
    else:
        values["weights_from"] = _pinned(api, values["weights_from"], folder)
        config = Eagle31Config.from_dict({name: value for name, value in values.items() if name != "weights_from"})
        names = []
    _own_file(folder, "config.json")
    write_json(staged / "config.json", values)
    for name in names:
        if (folder / name).is_file():
            (staged / name).symlink_to(_own_file(folder, name))
    if (folder / CARD).is_file():
        shutil.copyfile(_own_file(folder, CARD), staged / CARD)
    else:
        (staged / CARD).write_text(render_card(config, None, repo_id), encoding="utf-8")


def _own_file(folder: Path, name: str) -> Path:
    """Returns the path of a file of the folder, links resolved; in a snapshot of the Hub's cache files are links.

    Raises ValueError for a link to any other place: the file there may be private, and the folder may be a stranger's.
    """
    home, file = folder.resolve(), (folder / name).resolve()
    snapshots = next((parent for parent in home.parents if parent.name == "snapshots"), None)
    blobs = None if snapshots is None else snapshots.parent / "blobs"
    if home not in file.parents and file.parent != blobs:
        raise ValueError(
            f"{folder / name}: is a link to {file}, outside the folder; expected a file. Copy it there to publish it."
        )
    return file


def _check_folder(folder: Path) -> None:
    """Raises OSError for what is no folder, or has no config.json."""
    if not folder.is_dir():
        found = "is a file" if folder.exists() else "there is no such folder"
        raise OSError(
            f"{folder}: {found}; expected the folder of a native checkpoint, or of a config with weights_from."
        )
    if not (folder / "config.json").is_file():
        raise OSError(
            f"{folder}: holds no config.json; expected that of a native checkpoint, or one with weights_from."
        )


def _check_repo_id(repo_id: str) -> None:
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"repo_id is {repo_id!r}; expected OWNER/NAME ({' '.join(str(error).split())})") from None


def _pinned(api: HfApi, link: Any, folder: Path) -> dict[str, str]:
    """Returns `weights_from` with the commit that its revision names now."""
    repo_id, revision = linked_weights(link, f"{folder}: config.json: weights_from")
    try:
        commit = api.model_info(repo_id, revision=revision).sha
    except UPLOAD_ERRORS as error:
        raise OSError(f"{folder}: weights_from {link}: the Hub does not have it ({first_line(error)}).") from None
    return {"repo_id": repo_id, "revision": str(commit)}


def _report_into(card: Path, report: str) -> None:
    """Puts a report into the file of a card."""
    card.write_text(with_report(card.read_text(encoding="utf-8"), report), encoding="utf-8")


def upload(
    api: HfApi,
    folder: Path,
    repo_id: str,
    private: bool | None,
    revision: str | None,
    create_pr: bool,
    commit_message: str | None,
    commit_description: str | None = None,
) -> str:
    """Uploads everything in `folder` in one commit, except a card where the repository has one; this gets the report
    that is among the files.

    Returns the URL of the commit, or of the pull request. Raises OSError where the Hub refuses.
    """
    try:
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        has_card = api.file_exists(repo_id, CARD, revision=revision)
        if revision is not None and not create_pr:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        if has_card and (folder / REPORT).exists():
            shutil.copyfile(api.hf_hub_download(repo_id, CARD, revision=revision), folder / CARD)
            _report_into(folder / CARD, (folder / REPORT).read_text("utf-8"))
            has_card = False  # it is to be replaced
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message=commit_message or "Upload drafter with eagle31_hf",
            revision=revision,
            create_pr=create_pr,
            commit_description=commit_description,
            ignore_patterns=[CARD] if has_card else None,
        )
    except UPLOAD_ERRORS as error:
        raise HubError(
            f"{repo_id}: the upload failed: {first_line(error)} Nothing was committed; run it again to resume."
        ) from None
    return commit.pr_url or commit.commit_url


def convert_on_hub(
    repo_id: str, *, token: str | bool | None = None, revision: str | None = None, **options: Any
) -> tuple[Checkpoint, str | None]:
    """Opens a pull request that replaces the weights and config of a Hub repository with the native ones.

    The originals stay in the history. `options` are those of `convert_checkpoint`. Returns the checkpoint and the pull
    request's URL, None where the repository is native already. Raises OSError where the Hub refuses, ValueError for a
    checkpoint that cannot be converted.
    """
    api = HfApi(token=token)
    hub: dict[str, Any] = {"token": token, "revision": revision}
    overrides = dict(options)
    convention = overrides.pop("aux_layer_convention", None)
    found = read_checkpoint(repo_id, overrides, convention, **hub)
    if found.is_native:
        return found, None
    with TemporaryDirectory() as staging:
        folder = Path(staging, "native")
        checkpoint = convert_checkpoint(repo_id, folder, **hub, **options)
        added = {path.name: path for path in sorted(folder.iterdir())}
        is_linked = found.files.source != repo_id  # the weights are another repository's, which weights_from names
        replaced = [] if is_linked else sorted({file.name for file in found.files.weight_files} - added.keys())
        operations: list[Any] = [CommitOperationAdd(name, path) for name, path in added.items()]
        operations += [CommitOperationDelete(name) for name in replaced]
        try:
            commit = api.create_commit(
                repo_id,
                operations,
                commit_message="Convert to the native format of eagle31_hf",
                create_pr=True,
                revision=revision,
                commit_description=(
                    f"Read as {'; '.join(found.reasons)}. The tensors are the same, under their native names."
                ),
            )
        except UPLOAD_ERRORS as error:
            raise HubError(f"{repo_id}: the pull request failed: {first_line(error)} Nothing was changed.") from None
    return checkpoint, commit.pr_url
