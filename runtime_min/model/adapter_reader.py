"""Reading artifacts into the packed adapters of one served model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakValueDictionary

from scute_compile.formats.artifact import Artifact, open_artifact
from scute_compile.runtime_min.model.checks import check_adapter, check_structure
from scute_compile.runtime_min.model.rank_part import RankPart
from scute_compile.runtime_min.pool.packed_adapter import PackedAdapter, PackedFactor
from scute_compile.runtime_min.pool.reading import named_as_in, read_adapter
from scute_compile.runtime_min.pool.resident_pool import ResidentPool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdapterReader:
    """Reads this rank's file of an artifact into a packed adapter."""

    pool: ResidentPool
    part: RankPart
    convert: bool
    """Whether artifacts of another dtype are rounded to the pool's."""
    base_structure: str | None
    """The structure hash that artifacts must name; None accepts any."""
    factors: WeakValueDictionary[str, PackedFactor] = field(default_factory=WeakValueDictionary)
    """Shared factors of the adapters in host memory, by key."""

    def read(self, source: Artifact | Path | str, name: str) -> PackedAdapter:
        """Return an adapter, checked for this model.

        Raises:
            ScuteError: What `ServedModel.load_adapter` raises for an artifact.
        """
        check_adapter(name, source)
        artifact = source if isinstance(source, Artifact) else open_artifact(source, verify_hashes=False)
        check_structure(name, artifact.manifest.base, self.base_structure)
        entries = named_as_in(artifact, self.pool.sites)
        paths = {named.name: entry.name for named, entry in zip(entries, self.pool.sites, strict=True)}
        self.part.check(artifact, name, paths)
        return read_adapter(
            artifact,
            entries,
            self.pool.dtype,
            name=name,
            factors=self.factors,
            tp=self.part.ranks.size,
            rank=self.part.ranks.rank,
            sharding=self.part.lora_sharding,
            convert=self.convert,
            pin=self.pool.memory.pin,
        )
