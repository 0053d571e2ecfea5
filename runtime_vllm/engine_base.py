"""The engine's base model as the compiler opens it, to check artifacts against it and compile PEFT folders for it."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch

from scute_compile.diagnostics import ScuteError
from scute_compile.driver.artifact_checks import other_base
from scute_compile.driver.bases import OpenBase, open_model
from scute_compile.driver.packing import compile_planned
from scute_compile.formats.artifact import Artifact, is_artifact, open_artifact
from scute_compile.formats.fingerprint import content_hash
from scute_compile.formats.lock import locked
from scute_compile.formats.peft_folder import CONFIG, WEIGHTS
from scute_compile.formats.reading import sha256_of
from scute_compile.ir.dtypes import DType
from scute_compile.ir.target import Target
from scute_compile.pipeline import plan

logger = logging.getLogger("vllm.scute")


@dataclass(kw_only=True)
class EngineBase:
    """The model that an engine serves."""

    source: str
    """A folder, or a Hub id."""
    revision: str | None = None
    quantized: bool = False
    _checked: set[tuple[str, str | None]] = field(default_factory=set)

    @cached_property
    def folder(self) -> str:
        """The folder that vLLM read the model from."""
        if Path(self.source).is_dir():
            return self.source
        from huggingface_hub import snapshot_download

        return str(snapshot_download(self.source, revision=self.revision, local_files_only=True))

    @cached_property
    def opened(self) -> OpenBase:
        """The base with its structure, opened without reading weights. Raises what `open_model` raises."""
        return open_model(self.folder, weights=False)

    def check(self, artifact: Artifact) -> None:
        """Refuse an artifact that was compiled for another base.

        A quantized checkpoint has other tensors than the base that adapters were trained on. For such a base only names
        and sizes of layers are compared, when the artifact is read, and a warning is logged.

        Raises:
            ScuteError: SC608.
        """
        if self.quantized:
            logger.warning("scute: %s is quantized; its fingerprint can't be compared with the artifact's", self.source)
            return
        identity = artifact.manifest.base.structure, artifact.manifest.base.content
        if identity in self._checked:
            return
        differences = other_base(artifact, self.opened)
        if differences:
            raise ScuteError(differences)
        self._checked.add(identity)

    def compile_folder(self, adapter: Path, *, tp: int, dtype: torch.dtype, store: Path) -> Artifact:
        """Compile a PEFT folder for the engine, or open the artifact of an earlier compile of the same content.

        Every rank calls this. The first to take the store's lock compiles; the others wait and open the result. An
        artifact is kept under the hashes of the bytes that were packed, so that files which change meanwhile don't
        leave an artifact under the hashes of their older content.

        Args:
            adapter: The PEFT folder.
            tp: The engine's number of ranks.
            dtype: The pool's dtype.
            store: Where compiled folders are kept.

        Raises:
            ScuteError: What the compiler refuses.
        """
        target = Target(tp=tp, dtype=DType(str(dtype).removeprefix("torch.")))
        with locked(_lock(store)):
            sources = {file: sha256_of(adapter / file) for file in (CONFIG, WEIGHTS) if (adapter / file).is_file()}
            base = open_model(self.folder, weights=True)
            known = store / _artifact_name(adapter, sources, base, target)
            if is_artifact(known):
                try:
                    artifact = open_artifact(known)
                except ScuteError:  # damaged, or of an older format: compile it again
                    pass
                else:
                    if artifact.manifest.sources == sources:
                        return artifact
            planned = plan(str(adapter), base, target, hash_files=True)
            if planned.scan is None or planned.refused:
                raise ScuteError(planned.findings)
            planned = replace(planned, name=_artifact_name(adapter, planned.scan.sha256, base, target))
            (result,) = compile_planned((planned,), base, store, lambda *_: None)
        if isinstance(result, ScuteError):
            raise result
        return open_artifact(result)


def _artifact_name(adapter: Path, sources: Mapping[str, str], base: OpenBase, target: Target) -> str:
    """Return a name that differs for other bytes of the adapter, another base, number of ranks or dtype."""
    identity = [sorted(sources.items()), base.structure_hash(), content_hash(base.checkpoint)]
    digest = hashlib.sha256(json.dumps([*identity, base.checkpoint.source, target.tp, target.dtype]).encode())
    return f"{adapter.name.lstrip('.') or 'adapter'}-{digest.hexdigest()[:16]}"


def _lock(store: Path) -> Path:
    """Return a folder to lock; the store's own lock is taken when an artifact is written."""
    folder = store / ".compiling"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
