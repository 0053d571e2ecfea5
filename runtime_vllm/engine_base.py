"""The engine's base model as the compiler sees it: to refuse artifacts for another one, and to compile for this one."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from scute_compile.diagnostics import Diagnostic, ScuteError
from scute_compile.driver.artifact_checks import other_base
from scute_compile.driver.bases import OpenBase, open_model
from scute_compile.formats.artifact import Artifact

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
        """Return the folder that vLLM read the model from."""
        if Path(self.source).is_dir():
            return self.source
        from huggingface_hub import snapshot_download

        return str(snapshot_download(self.source, revision=self.revision, local_files_only=True))

    @cached_property
    def opened(self) -> OpenBase:
        """Return the base with its structure; weights stay unread. Raises what `open_model` raises."""
        return open_model(self.folder, weights=False)

    def check(self, artifact: Artifact) -> None:
        """Refuse an artifact that was compiled for another base.

        A quantized checkpoint has other tensors than the base that adapters were trained on, so there only names and
        sizes of layers are compared, when the artifact is read; the engine's log says so.

        Raises:
            ScuteError: SC608.
        """
        if self.quantized:
            logger.warning("scute: %s is quantized; its fingerprint can't be compared with the artifact's", self.source)
            return
        identity = artifact.manifest.base.structure, artifact.manifest.base.content
        if identity in self._checked:
            return
        wrong: tuple[Diagnostic, ...] = other_base(artifact, self.opened)
        if wrong:
            raise ScuteError(wrong)
        self._checked.add(identity)
