"""Whether an artifact is what a command was asked about: its base, its ranks, its workload, the adapter's files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from scute_compile.diagnostics import Code, Diagnostic, Findings
from scute_compile.driver.bases import OpenBase
from scute_compile.formats.artifact import Artifact
from scute_compile.formats.peft_folder import AdapterFolder
from scute_compile.ir.target import LoraSharding, Target, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Options of a command; None where one was left out."""

    tp: int | None = None
    lora_sharding: LoraSharding | None = None
    tenants: int | None = None
    tokens: int | None = None

    @property
    def target(self) -> Target:
        """What an adapter is planned for, with the defaults of what was left out."""
        usual = Workload()
        return Target(
            tp=self.tp or 1,
            lora_sharding=self.lora_sharding or LoraSharding.DEFAULT,
            workload=Workload(tenants=self.tenants or usual.tenants, tokens=self.tokens or usual.tokens),
        )


def other_target(artifact: Artifact, asked: Asked) -> tuple[Diagnostic, ...]:
    """Return what says that an artifact was compiled for other ranks, or another workload, than were asked for."""
    manifest, findings = artifact.manifest, Findings()
    workload = manifest.workload
    for code, wanted, own, option in (
        (Code.SC801, asked.tp, manifest.tp, "--tp"),
        (Code.SC801, asked.lora_sharding, manifest.lora_sharding, "--lora-sharding"),
        (Code.SC703, asked.tenants, workload.tenants, "--tenants"),
        (Code.SC703, asked.tokens, workload.tokens, "--tokens"),
    ):
        if wanted is not None and wanted != own:
            findings.error(
                code,
                where=manifest.name,
                found=f"an artifact compiled with {option} {own}",
                expected=f"{option} {wanted}, as asked for",
                next=f"compile the adapter again with {option} {wanted}",
            )
    return tuple(findings)


def other_base(artifact: Artifact, base: OpenBase) -> tuple[Diagnostic, ...]:
    """Return what says that an artifact was compiled for another base: its structure, or sampled weights."""
    from scute_compile.formats.fingerprint import content_hash

    findings = Findings()
    recorded = artifact.manifest.base
    hashes = [("structure", recorded.structure, base.structure_hash())]
    if recorded.content and base.checkpoint.has_weights and base.checkpoint.path is not None:
        hashes.append(("content", recorded.content, content_hash(base.checkpoint) or recorded.content))
    for part, wanted, found in hashes:
        if wanted != found:
            findings.error(
                Code.SC608,
                where=artifact.manifest.name,
                found=f"{part} hash {found[:12]} of {base.checkpoint.source}",
                expected=f"{wanted[:12]}, recorded for a {recorded.model_type}",
                next="pass the base that it was compiled for, or compile the adapter again",
            )
            break
    return tuple(findings)


def other_sources(artifact: Artifact, adapter: AdapterFolder) -> tuple[Diagnostic, ...]:
    """Return a note when the adapter's files aren't those that the artifact was compiled from."""
    from scute_compile.formats.safetensors_writer import sha256_of

    recorded = artifact.manifest.sources
    now = {name: sha256_of(path) for name in recorded if (path := _file(adapter, name)).is_file()}
    changed = [name for name, digest in recorded.items() if now.get(name) != digest]
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
