"""The report of `scute inspect`: sites, ranks, slots, owners, routes and bytes of an adapter or an artifact.

An adapter is described by its plan. With a base, sizes are those that the artifact would have. Without a base, they
follow from the adapter's tensors, and a size that only the base gives is 0: unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from scute_compile.cli.grouping import Group, by_layers, pattern
from scute_compile.cli.inspect.views import (
    PLANNED_DTYPES,
    SharedView,
    SiteView,
    planned_factors,
    planned_site,
    recorded_factors,
    recorded_site,
)
from scute_compile.driver.artifact_checks import Requested, open_requested
from scute_compile.driver.bases import open_model
from scute_compile.driver.planning import servable
from scute_compile.driver.reports import envelope
from scute_compile.formats.artifact import Artifact, is_artifact
from scute_compile.ir.dtypes import DType
from scute_compile.ir.method import Method
from scute_compile.ir.program import Stage
from scute_compile.ir.target import LoraSharding
from scute_compile.pipeline import Planned, plan


class Kind(StrEnum):
    """What a report describes."""

    ADAPTER = "adapter"
    ARTIFACT = "artifact"


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseView:
    """The base of an adapter or an artifact. An adapter gives only its name."""

    name: str | None
    model_type: str | None = None
    structure: str | None = None
    content: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileView:
    """A rank's file of an artifact."""

    file: str
    """The file's name."""
    sha256: str
    bytes: int
    """The file's size, header included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectReport:
    """The description of an adapter or an artifact."""

    kind: Kind
    name: str
    path: str
    """The path or Hub id of an adapter, as given; the folder of an artifact."""
    method: Method
    settings: tuple[tuple[str, str], ...]
    """Settings of the method that the artifact records, by name."""
    dtype: DType | None
    """The artifact's dtype; None for an adapter, whose dtype is not chosen yet."""
    tp: int
    lora_sharding: LoraSharding
    base: BaseView
    planned_for_base: bool
    """Whether sizes, cuts and routes are known; False for an adapter that was planned without its base."""
    sites: tuple[SiteView, ...]
    shared: tuple[SharedView, ...]
    """The factors that adapters of the store share."""
    files: tuple[FileView, ...]
    """One file per rank; empty for an adapter."""
    findings: tuple[Mapping[str, object], ...]
    """The notes of planning, as JSON."""

    @property
    def rank_bytes(self) -> tuple[tuple[DType, tuple[int, ...]], ...]:
        """Per dtype the tensor bytes of each rank, without shared factors; empty when those of a site are unknown."""
        if not all(site.bytes for site in self.sites):
            return ()
        dtypes = (self.dtype,) if self.dtype is not None else PLANNED_DTYPES
        sizes = [dict(site.bytes) for site in self.sites]
        return tuple(
            (dtype, tuple(sum(site[dtype][rank] for site in sizes) for rank in range(self.tp))) for dtype in dtypes
        )

    @property
    def groups(self) -> tuple[Group[SiteView], ...]:
        """Sites that differ only in the layer's number."""
        return by_layers(self.sites, name=lambda site: site.name, key=_key)

    def to_json(self) -> dict[str, object]:
        """Return the report as plain JSON values, with every site."""
        base = self.base
        return envelope(
            "inspect",
            kind=self.kind.value,
            name=self.name,
            path=self.path,
            method=self.method.value,
            settings=dict(self.settings),
            dtype=self.dtype.value if self.dtype else None,
            tp=self.tp,
            lora_sharding=self.lora_sharding.value,
            base={
                "name": base.name,
                "model_type": base.model_type,
                "structure": base.structure,
                "content": base.content,
            },
            planned_for_base=self.planned_for_base,
            sites=[_site_json(site) for site in self.sites],
            bytes_per_rank={dtype.value: list(ranks) for dtype, ranks in self.rank_bytes},
            shared=[
                {
                    "factor": factor.name,
                    "rank": factor.rank,
                    "features": factor.features,
                    "bytes": {dtype.value: size for dtype, size in factor.bytes},
                    "sites": factor.sites,
                }
                for factor in self.shared
            ],
            files=[{"file": file.file, "sha256": file.sha256, "bytes": file.bytes} for file in self.files],
            findings=[dict(finding) for finding in self.findings],
        )


def inspect_path(source: str, *, base: str | None, requested: Requested) -> InspectReport:
    """Describe an adapter or an artifact.

    Args:
        source: A PEFT folder, a Hub id or an artifact.
        base: A folder or a Hub id; None: an adapter is planned without its base.
        requested: What an adapter is planned for, and what an artifact must have been compiled for.

    Raises:
        ScuteError: the findings that refuse the adapter, and what opening the base or the artifact raises.
    """
    if is_artifact(source):
        return inspect_artifact(open_requested(source, base, requested))
    opened = None if base is None else open_model(base, weights=False)
    return inspect_program(servable(plan(source, opened, requested.target)))


def inspect_program(planned: Planned) -> InspectReport:
    """Describe an adapter by its plan, which must not be refused."""
    program = planned.program
    if program is None:
        raise AssertionError(planned.name)
    routed = program.stage is Stage.ROUTED
    return InspectReport(
        kind=Kind.ADAPTER,
        name=planned.name,
        path=planned.source,
        method=program.method,
        settings=program.settings,
        dtype=None,
        tp=program.target.tp if routed else 1,
        lora_sharding=program.target.lora_sharding if routed else LoraSharding.DEFAULT,
        base=BaseView(name=planned.adapter.base_model if planned.adapter else None),
        planned_for_base=routed,
        sites=tuple(planned_site(site) for site in program.sites),
        shared=tuple(planned_factors(program)),
        files=(),
        findings=tuple(finding.to_json() for finding in planned.findings),
    )


def inspect_artifact(artifact: Artifact) -> InspectReport:
    """Describe an opened artifact by its manifest."""
    manifest = artifact.manifest
    base = manifest.base
    return InspectReport(
        kind=Kind.ARTIFACT,
        name=manifest.name,
        path=str(artifact.path),
        method=Method(manifest.method),
        settings=tuple(manifest.settings.items()),
        dtype=manifest.dtype,
        tp=manifest.tp,
        lora_sharding=manifest.lora_sharding,
        base=BaseView(name=base.name, model_type=base.model_type, structure=base.structure, content=base.content),
        planned_for_base=True,
        sites=tuple(recorded_site(site, (manifest.dtype,)) for site in manifest.sites),
        shared=tuple(recorded_factors(manifest)),
        files=tuple(FileView(file=rank.file, sha256=rank.sha256, bytes=rank.bytes) for rank in manifest.ranks),
        findings=tuple(manifest.findings),
    )


def _key(site: SiteView) -> SiteView:
    return replace(site, name="", gemm=pattern(site.gemm)[0])


def _site_json(site: SiteView) -> dict[str, object]:
    return {
        "name": site.name,
        "gemm": site.gemm,
        "in_features": site.in_features,
        "out_features": site.out_features,
        "split": site.split.value,
        "rotation": site.rotation,
        "ranks": list(site.ranks),
        "slots": [
            {"slot": slot.slot, "owner": slot.owner.value, "route": slot.route, "shared": slot.shared}
            for slot in site.slots
        ],
        "bytes_per_rank": {dtype.value: list(ranks) for dtype, ranks in site.bytes},
    }
