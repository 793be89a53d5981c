"""Repositories of the Hugging Face Hub in place of local directories: OWNER/NAME or OWNER/NAME@REVISION.

A run stores the commit that a revision names, so that it can be repeated. Files are kept in the Hub's own cache, and
its environment variables apply: HF_HOME, HF_TOKEN, HF_ENDPOINT (a mirror), HF_HUB_OFFLINE. No JAX here.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from memsearcher_jax.config import RunConfig, settings, with_settings
from memsearcher_jax.data.benchmarks import BENCHMARKS
from memsearcher_jax.model.hf_config import TOKENIZER_FILES

RepoType = Literal["model", "dataset"]
MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja")  # also in subdirectories
OTHER_FORMATS = ("onnx/*", "openvino/*", "original/*")
REPOSITORIES: dict[str, tuple[RepoType, Sequence[str]]] = {
    "model.path": ("model", MODEL_FILES),
    "model.adapter": ("model", MODEL_FILES),
    "teacher.path": ("model", MODEL_FILES),
    "model.tokenizer": ("model", TOKENIZER_FILES),
    "retrieval.encoder": ("model", MODEL_FILES),
    "retrieval.index": ("dataset", ["*"]),
    "data.root": ("dataset", [f"{name}/*" for name in BENCHMARKS]),
}
"""Settings that take a repository: its type, and the files that are downloaded."""

CORPUS = "retrieval.corpus"
CORPUS_FILE = re.compile(r"hf://datasets/(?P<repo>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?/(?P<file>.+)")
COMMIT = re.compile(r"[0-9a-f]{40}")
REPOSITORY = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w./-]+))?")


def is_repository(name: str) -> bool:
    """Whether a value names a repository: two words with a slash, and no file or directory has that name."""
    return bool(REPOSITORY.fullmatch(name)) and not Path(name).exists()


def pinned(config: RunConfig, stored: RunConfig | None = None, flags: Mapping[str, str] | None = None) -> RunConfig:
    """The config with the commit of every repository, OWNER/NAME@COMMIT.

    Without a connection the commit comes from the cache. A run that is resumed, with the config `stored`, keeps the
    commits of its repositories. Raises OSError in one line for a repository that is missing, gated or unreachable,
    with its setting, or the one of `flags` that gave it.
    """
    kept = {reference.key: reference.value for reference in (_references(stored) if stored else [])}

    def pin(reference: _Reference) -> str:
        stored_value = kept.get(reference.key)
        if stored_value and not COMMIT.fullmatch(reference.revision or ""):
            return stored_value
        repo = f"{reference.repo}@{_commit(reference)}"
        return f"hf://datasets/{repo}/{reference.file}" if reference.file else repo

    return with_settings(config, {reference.setting: pin(reference) for reference in _references(config, flags)})


def local(config: RunConfig) -> RunConfig:
    """The config with local paths in place of repositories. Downloads what is not in the cache yet.

    Raises as `pinned` does. After an error, repeating the call continues: complete files are kept.
    """
    return with_settings(config, {reference.setting: _download(reference) for reference in _references(config)})


def local_root(root: str) -> str:
    """The local directory of `data.root`."""
    reference = _reference("data.root", root)
    return _download(reference) if reference else root


def local_file(name: str, flag: str) -> Path:
    """The path of a file, which may be hf://datasets/OWNER/NAME/FILE or hf://datasets/OWNER/NAME@REVISION/FILE."""
    reference = _reference(CORPUS, name, flag)
    return Path(_download(reference) if reference else name)


def small_files(model: str, flag: str, files: Sequence[str]) -> Path | None:
    """The local directory of a model, which `flag` names, with these files; None if it lacks the first of them."""
    reference = _reference("model.path", model, flag)
    if reference is None:
        return Path(model) if Path(model, files[0]).is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    reference = reference._replace(revision=_commit(reference))  # a download without a connection is repeated
    with _one_line_errors(reference), contextlib.suppress(EntryNotFoundError):
        hf_hub_download(reference.repo, files[0], revision=reference.revision)
        return Path(_download(reference, files))
    return None


class _Reference(NamedTuple):
    setting: str
    value: str
    flag: str  # which gave it, or the setting
    repo: str
    revision: str | None
    file: str | None = None  # None: the files of the setting's repositories

    @property
    def repo_type(self) -> RepoType:
        return "dataset" if self.file else REPOSITORIES[self.setting][0]

    @property
    def key(self) -> tuple[str, str, str | None]:
        """What it names, without the revision."""
        return self.setting, self.repo, self.file

    @property
    def download_options(self) -> dict[str, Any]:
        return {"repo_type": self.repo_type, "revision": self.revision}


def _reference(setting: str, value: str, flag: str = "") -> _Reference | None:
    """What a setting names of the Hub; None for a path. Raises FileNotFoundError for what a local folder lacks."""
    match = (CORPUS_FILE if setting == CORPUS else REPOSITORY).fullmatch(value)
    if match is None or Path(value).exists():
        return None
    if not match["revision"] and Path(value).parent.exists():
        raise FileNotFoundError(
            f"{flag or setting} {value}: {Path(value).parent}/ has nothing of that name; {value}@main is the Hub's"
        )
    return _Reference(setting, value, flag or setting, **match.groupdict())


def _references(config: RunConfig, flags: Mapping[str, str] | None = None) -> list[_Reference]:
    values = settings(config)
    found = []
    for name in (*REPOSITORIES, CORPUS):
        flag = (flags or {}).get(name, "")
        if reference := _reference(name, values[name], flag):
            found.append(reference)
    return found


def _commit(reference: _Reference) -> str:
    """The commit that a reference names, without a connection that of the cache."""
    if reference.revision and COMMIT.fullmatch(reference.revision):
        return reference.revision
    from huggingface_hub import HfApi

    with _one_line_errors(reference):
        return HfApi().resolve_revision(reference.repo, **reference.download_options).resolved


def _download(reference: _Reference, files: Sequence[str] = ()) -> str:
    from huggingface_hub import hf_hub_download, snapshot_download

    options = reference.download_options
    with _one_line_errors(reference):
        if reference.file:
            return hf_hub_download(reference.repo, reference.file, **options)
        _, default_files = REPOSITORIES[reference.setting]
        options |= {"allow_patterns": list(files or default_files), "ignore_patterns": list(OTHER_FORMATS)}
        return snapshot_download(reference.repo, **options)


@contextlib.contextmanager
def _one_line_errors(reference: _Reference) -> Iterator[None]:
    """Turns the library's errors, of many types, into OSError, in one line that names the flag and the way out."""
    from huggingface_hub import constants

    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        datasets = "datasets/" if reference.repo_type == "dataset" else ""
        page = f"{constants.ENDPOINT}/{datasets}{reference.repo}"
        raise OSError(
            f"{reference.flag} {reference.value}: there is no such path, and no download ({reason}): "
            f"see {page}; what is private or gated needs `hf auth login`; the command repeated continues"
        ) from error
