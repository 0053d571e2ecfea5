"""PEFT adapter folders: `adapter_config.json` beside `adapter_model.safetensors`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from scute_compile.diagnostics import Code, Findings, ScuteError, fail
from scute_compile.formats.artifact import MANIFEST, is_artifact
from scute_compile.formats.base_checkpoint import CONFIG as MODEL_CONFIG
from scute_compile.formats.hub import Repository, find_repository, looks_like_id
from scute_compile.formats.reading import CONFIG_LIMIT, Identity, exists, identity_of, names_in, read_object
from scute_compile.formats.safetensors import TensorEntry, read_header

if TYPE_CHECKING:
    from hashlib import _Hash

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"

_RESEMBLES = (
    ({"lora_parameters"}, "MLX"),
    ({"fine_tune_type"}, "MLX"),
    ({"swift_type"}, "ModelScope Swift"),
    ({"config", "model_class"}, "the `adapters` library"),
    ({"r", "target_modules"}, "PEFT with its `peft_type` lost"),
)
"""Keys that identify the program that wrote a file of the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFolder:
    """An opened adapter: its configuration and the header of its weights, without tensor values."""

    source: str
    """The path or the Hub id that it was opened by."""
    path: Path
    name: str
    """The folder's name, or the repository's without its owner."""
    config: Mapping[str, object]
    tensors: Mapping[str, TensorEntry]
    """By key, in the order of the file's bytes."""
    weights: Path
    """The safetensors file."""
    config_sha256: str
    """The hash of the configuration's bytes as they were read."""
    header_sha256: str
    """The hash of the bytes before the first tensor as they were read."""
    identities: Mapping[Path, Identity]
    """Both files, before they were read."""

    @property
    def base_model(self) -> str | None:
        """The base that the configuration names, a Hub id or a path (`base_model_name_or_path`); None without one."""
        named = self.config.get("base_model_name_or_path")
        return named if isinstance(named, str) and named else None


def open_adapter(source: str) -> AdapterFolder:
    """Open an adapter folder or, when no such path exists, the adapter in a Hub repository.

    Args:
        source: A folder or `owner/name`.

    Raises:
        ScuteError: SC101 (not found), SC102 (a pickle), SC103 to SC105 (damaged weights), SC106 (no tensors), SC107
            (a file is missing), SC108 (unreadable JSON), SC109 (unreadable file), SC201 (not a PEFT configuration).
            Faults of the configuration and of the weights are reported together.
    """
    path = Path(source)
    if source and path.is_dir():  # an empty path means the working directory
        _check_files(source, names_in(path), subfolders_with_config(path))
        return _read_folder(source, path, path.resolve().name or "adapter")
    if source and exists(path):
        fail(
            Code.SC101,
            where=source,
            found="a file",
            expected=f"a folder that holds {CONFIG} and {WEIGHTS}",
            next=f"pass the folder {path.parent}" if path.name in {CONFIG, WEIGHTS, PICKLE} else "pass a folder",
        )
    if "/" not in source or not looks_like_id(source):
        fail(
            Code.SC101,
            where=source,
            found="no folder of that name, and not the name of a repository",
            expected="an adapter's folder, or a repository as owner/name",
            next="check the path",
        )
    repository = find_repository(source, Code.SC101, (CONFIG, WEIGHTS))
    _check_files(source, repository.files, _subfolders_in(repository))
    return _read_folder(source, repository.download((CONFIG, WEIGHTS)), source.rpartition("/")[2])


def subfolders_with_config(folder: Path) -> tuple[str, ...]:
    """Return the names of subfolders with a configuration: PEFT saves every adapter but the default in one."""
    return tuple(name for name in names_in(folder) if exists(folder / name / CONFIG))


def _subfolders_in(repository: Repository) -> tuple[str, ...]:
    inner = (name.rpartition("/") for name in repository.files)
    return tuple(folder for folder, _, name in inner if name == CONFIG and folder)


def _check_files(source: str, names: tuple[str, ...], subfolders: tuple[str, ...]) -> None:
    """Report the files that a folder lacks, by their names."""
    if CONFIG in names and WEIGHTS in names:
        return
    seen = f"the folder holds {_listed(names)}" if names else "the folder is empty"
    if CONFIG not in names and subfolders:
        fail(
            Code.SC107,
            where=source,
            found=f"no {CONFIG}, but subfolders with one: {_listed(subfolders)}",
            expected=f"{CONFIG} and {WEIGHTS} in the folder itself",
            next="PEFT saves an adapter with a name in a subfolder: "
            + (
                "pass " + " or ".join(f"{source.rstrip('/')}/{name}" for name in subfolders[:4])
                if Path(source).is_dir()
                else "download the repository and pass that subfolder"
            ),
        )
    _refuse_other_kinds(source, names)
    findings = Findings()
    if CONFIG not in names:
        findings.error(
            Code.SC107,
            where=source,
            found=f"no {CONFIG}; {seen}",
            expected=f"{CONFIG} beside the weights",
            next="pass the folder that PEFT's `save_pretrained` wrote",
        )
    if WEIGHTS not in names and PICKLE in names:
        findings.error(
            Code.SC102,
            where=source,
            found=f"{PICKLE} is a pickle, which can run code while it loads; it was not opened",
            expected=WEIGHTS,
        )
    elif WEIGHTS not in names:
        findings.error(
            Code.SC107,
            where=source,
            found=f"no {WEIGHTS}; {seen}",
            expected=f"{WEIGHTS} beside {CONFIG}",
            next="pass the folder that PEFT's `save_pretrained` wrote, or save the adapter again",
        )
    if CONFIG in names and (Path(source) / CONFIG).is_file():
        _read_config(Path(source) / CONFIG, findings)
    findings.raise_if_errors()


def _refuse_other_kinds(source: str, names: tuple[str, ...]) -> None:
    """Refuse an artifact, a store of artifacts and a base model, with what was found."""
    if {CONFIG, WEIGHTS, PICKLE} & set(names):
        return
    artifacts = tuple(name for name in names if is_artifact(Path(source) / name))
    if MANIFEST in names:
        found, way = "an artifact, which is compiled already", "pass the PEFT folder that it was compiled from"
    elif artifacts:
        found = f"a store with the artifacts {_listed(artifacts)}"
        way = f"pass an adapter's folder, or one artifact to a command that takes them: {Path(source) / artifacts[0]}"
    elif MODEL_CONFIG in names:
        found, way = (
            f"a model's {MODEL_CONFIG} and no {CONFIG}",
            "pass the adapter's folder here, and the model with --base",
        )
    else:
        return
    fail(Code.SC107, where=source, found=found, expected=f"{CONFIG} and {WEIGHTS}", next=way)


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _read_folder(source: str, path: Path, name: str) -> AdapterFolder:
    findings = Findings()
    identities = {path / name: identity_of(path / name) for name in (CONFIG, WEIGHTS)}
    config_bytes, header_bytes = hashlib.sha256(), hashlib.sha256()
    config = _read_config(path / CONFIG, findings, config_bytes)
    tensors: Mapping[str, TensorEntry] = {}
    try:
        tensors = read_header(path / WEIGHTS, header_bytes)
    except ScuteError as error:
        findings.diagnostics.extend(error.diagnostics)
    else:
        if not tensors:
            findings.error(
                Code.SC106,
                where=str(path / WEIGHTS),
                found=f"no tensors in a file of {(path / WEIGHTS).stat().st_size} bytes",
                expected="the adapter's tensors",
            )
    findings.raise_if_errors()
    return AdapterFolder(
        source=source,
        path=path,
        name=name,
        config=config,
        tensors=tensors,
        weights=path / WEIGHTS,
        config_sha256=config_bytes.hexdigest(),
        header_sha256=header_bytes.hexdigest(),
        identities=identities,
    )


def _read_config(path: Path, findings: Findings, digest: _Hash | None = None) -> Mapping[str, object]:
    try:
        config = read_object(path, digest, CONFIG_LIMIT)
    except ScuteError as error:
        findings.diagnostics.extend(error.diagnostics)
        return {}
    method = config.get("peft_type")
    if not isinstance(method, str) or not method:
        keys = ", ".join(sorted(config)[:8]) or "no keys"
        program = next((name for signs, name in _RESEMBLES if signs <= config.keys()), "")
        findings.error(
            Code.SC201,
            where=str(path),
            found=("no peft_type" if method is None else f"the peft_type {method!r:.60}")
            + f" (it has {keys}{'; this resembles a file of ' + program if program else ''})",
            expected="a PEFT configuration, whose peft_type names the method",
        )
    return MappingProxyType(config)
