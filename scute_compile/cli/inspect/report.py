"""What `scute inspect` shows of an adapter folder or an artifact: sites, ranks, slots, owners, live slots, bytes.

An adapter is described by its plan. With a base, sizes are those that the artifact would have; without one, they follow
from the adapter's own tensors, and what only the base tells is 0: unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

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
from scute_compile.cli.outcomes import envelope
from scute_compile.formats.artifact import Artifact
from scute_compile.ir.dtypes import DType
from scute_compile.ir.method import Method
from scute_compile.ir.program import Stage
from scute_compile.ir.target import LoraSharding
from scute_compile.pack.manifest_records import finding_record

if TYPE_CHECKING:
    from rich.console import Console

    from scute_compile.pipeline import Planned


class Kind(StrEnum):
    """What was looked at."""

    ADAPTER = "adapter"
    ARTIFACT = "artifact"


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseView:
    """The base that it belongs to, as far as that is known."""

    name: str | None
    model_type: str | None = None
    structure: str | None = None
    content: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileView:
    """A rank's file of an artifact."""

    file: str
    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectReport:
    """Everything that is shown; `bytes` of sites are tensor bytes, `files` have headers too."""

    kind: Kind
    name: str
    path: str
    method: Method
    settings: tuple[tuple[str, str], ...]
    dtype: DType | None
    """None for an adapter: not chosen yet."""
    tp: int
    lora_sharding: LoraSharding
    base: BaseView
    planned_for_base: bool
    """Whether sizes, cuts and routes are the base's; False for an adapter looked at alone."""
    sites: tuple[SiteView, ...]
    shared: tuple[SharedView, ...]
    files: tuple[FileView, ...]
    findings: tuple[Mapping[str, object], ...]

    @property
    def rank_bytes(self) -> tuple[tuple[DType, tuple[int, ...]], ...]:
        """Per dtype the tensor bytes of each rank, shared factors apart; empty when one site's are unknown."""
        if not all(site.bytes for site in self.sites):
            return ()
        dtypes = (self.dtype,) if self.dtype is not None else PLANNED_DTYPES
        held = [dict(site.bytes) for site in self.sites]
        return tuple((x, tuple(sum(site[x][rank] for site in held) for rank in range(self.tp))) for x in dtypes)

    @property
    def groups(self) -> tuple[Group[SiteView], ...]:
        """Sites that are equal but for their layer's number."""
        return by_layers(self.sites, name=lambda site: site.name, key=_sameness)

    def to_json(self) -> dict[str, object]:
        """Return the report as plain JSON values, every site by itself."""
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
                    "factor": one.name,
                    "rank": one.rank,
                    "features": one.features,
                    "bytes": {dtype.value: held for dtype, held in one.bytes},
                    "sites": one.sites,
                }
                for one in self.shared
            ],
            files=[{"file": one.file, "sha256": one.sha256, "bytes": one.bytes} for one in self.files],
            findings=[dict(finding) for finding in self.findings],
        )

    def render(self, console: Console) -> None:
        """Print tables of sites, slots, shared factors and ranks."""
        from scute_compile.cli.inspect.tables import render

        render(self, console)


def inspect_program(planned: Planned) -> InspectReport:
    """Describe an adapter by its plan, which must not be refused."""
    program = planned.program
    if program is None:
        raise AssertionError(planned.name)
    said = planned.adapter.config.get("base_model_name_or_path") if planned.adapter else None
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
        base=BaseView(name=said if isinstance(said, str) and said else None),
        planned_for_base=routed,
        sites=tuple(planned_site(site) for site in program.sites),
        shared=tuple(planned_factors(program)),
        files=(),
        findings=tuple(finding_record(finding) for finding in planned.findings),
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


def _sameness(site: SiteView) -> SiteView:
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
