"""Compares an artifact with a request: its base, its target, and the adapter that it was compiled from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scute_compile.diagnostics import Code, Diagnostic, Findings, ScuteError
from scute_compile.driver.bases import OpenBase, open_model
from scute_compile.formats.artifact import Artifact, open_artifact
from scute_compile.formats.peft_folder import AdapterFolder
from scute_compile.ir.target import LoraSharding, Target, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Requested:
    """The target that a call asks for, field by field; None where the call leaves it open.

    Adapters are planned for it, with defaults for open fields. An artifact must agree with the other fields.
    """

    tp: int | None = None
    """Tensor-parallel ranks; 1 by default."""
    lora_sharding: LoraSharding | None = None
    tenants: int | None = None
    """Distinct adapters in a decode step, for routes."""
    tokens: int | None = None
    """Rows in a decode step, for routes."""

    @property
    def target(self) -> Target:
        """The target that adapters are planned for."""
        default = Workload()
        return Target(
            tp=self.tp or 1,
            lora_sharding=self.lora_sharding or LoraSharding.DEFAULT,
            workload=Workload(tenants=self.tenants or default.tenants, tokens=self.tokens or default.tokens),
        )


def open_requested(source: str, base: str | None, requested: Requested) -> Artifact:
    """Open an artifact that must agree with the request.

    Args:
        source: The artifact's folder.
        base: The base that it must have been compiled for, a folder or a Hub id; None: any.
        requested: The target that it must have been compiled for.

    Raises:
        ScuteError: SC6xx for a damaged artifact, SC608 for another base, SC801 and SC703 for another target.
    """
    artifact = open_artifact(source)
    findings = other_target(artifact, requested)
    if base is not None:
        findings += other_base(artifact, open_model(base, weights=False))
    if findings:
        raise ScuteError(findings)
    return artifact


def other_target(artifact: Artifact, requested: Requested) -> tuple[Diagnostic, ...]:
    """Return an error for each field of the request that the artifact was not compiled with: SC801, SC703."""
    manifest, findings = artifact.manifest, Findings()
    workload = manifest.workload
    for code, wanted, compiled, option in (
        (Code.SC801, requested.tp, manifest.tp, "--tp"),
        (Code.SC801, requested.lora_sharding, manifest.lora_sharding, "--lora-sharding"),
        (Code.SC703, requested.tenants, workload.tenants, "--tenants"),
        (Code.SC703, requested.tokens, workload.tokens, "--tokens"),
    ):
        if wanted is not None and wanted != compiled:
            findings.error(
                code,
                where=manifest.name,
                found=f"an artifact compiled with {option} {compiled}",
                expected=f"{option} {wanted}, as requested",
                next=f"compile the adapter again with {option} {wanted}",
            )
    return tuple(findings)


def other_base(artifact: Artifact, base: OpenBase) -> tuple[Diagnostic, ...]:
    """Return SC608 when an artifact was compiled for another base, by the hashes of structure and sampled weights."""
    from scute_compile.formats.fingerprint import content_hash

    findings = Findings()
    recorded = artifact.manifest.base
    hashes = [("structure", recorded.structure, base.structure_hash())]
    if recorded.content and base.checkpoint.has_weights and base.checkpoint.path is not None:
        hashes.append(("content", recorded.content, content_hash(base.checkpoint) or recorded.content))
    for part, expected, found in hashes:
        if expected != found:
            findings.error(
                Code.SC608,
                where=artifact.manifest.name,
                found=f"{part} hash {found[:12]} of {base.checkpoint.source}",
                expected=f"{expected[:12]}, recorded for a {recorded.model_type}",
            )
            break
    return tuple(findings)


def other_sources(artifact: Artifact, adapter: AdapterFolder) -> tuple[Diagnostic, ...]:
    """Return SC609, a note, when the adapter's files differ from those that the artifact was compiled from."""
    from scute_compile.formats.reading import sha256_of

    recorded = artifact.manifest.sources
    current = {name: sha256_of(path) for name in recorded if (path := _file(adapter, name)).is_file()}
    changed = [name for name, digest in recorded.items() if current.get(name) != digest]
    findings = Findings()
    if changed:
        findings.note(
            Code.SC609,
            where=artifact.manifest.name,
            found=f"other bytes in {', '.join(changed)} of {adapter.path}",
            expected="the files that the artifact was compiled from",
            next="compile the adapter again, or pass the folder that it was compiled from",
        )
    return tuple(findings)


def _file(adapter: AdapterFolder, name: str) -> Path:
    return adapter.weights if name == adapter.weights.name else adapter.path / Path(name).name
