"""Statistics of a resident pool, as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scute_compile.runtime_min.pool.device_memory import DeviceMemory
from scute_compile.runtime_min.pool.directory import PAGE_BYTES
from scute_compile.runtime_min.pool.packed_adapter import PackedAdapter, host_bytes
from scute_compile.runtime_min.pool.pages import PageCounts
from scute_compile.runtime_min.pool.residents import Residents


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """A pool at one moment. Units: bytes, and pages of 2048 bytes."""

    pages: PageCounts
    max_adapters: int
    indices_in_use: int
    """Adapter indices in use. A replaced adapter keeps its index while a running step reads it."""
    adapters: Mapping[str, int]
    """Bytes of the pages of each resident adapter, without shared factors; those of a replaced adapter that a running
    step reads are added to its successor's."""
    factors: Mapping[str, int]
    """Bytes of the pages of each shared factor on the device, by key."""
    host: int
    """Bytes of all adapters in host memory."""
    host_adapters: int
    map_entries: int
    map_in_use: int
    map_moved: int
    """Entries of the page map, 4 bytes each, that were rewritten to close gaps."""
    shared_pages: int
    """Pages for shared factors, in use or not."""
    shared_moved: int
    """Pages of shared factors that were copied again to close gaps."""

    def to_json(self) -> dict[str, object]:
        """Return plain JSON values."""
        pages = self.pages
        return {
            "page_bytes": PAGE_BYTES,
            "pages": {"total": pages.total, "in_use": pages.in_use, "free": pages.free},
            "bytes": {
                "total": pages.total * PAGE_BYTES,
                "payload": pages.payload,
                "wasted": pages.wasted,
                "host": self.host,
            },
            "waste_ratio": pages.waste_ratio,
            "max_adapters": self.max_adapters,
            "indices_in_use": self.indices_in_use,
            "map": {"total": self.map_entries, "in_use": self.map_in_use, "moved": self.map_moved},
            "shared": {
                "bytes": self.shared_pages * PAGE_BYTES,
                "in_use": sum(self.factors.values()),
                "moved_pages": self.shared_moved,
            },
            "adapters": dict(self.adapters),
            "factors": dict(self.factors),
            "host_adapters": self.host_adapters,
        }

    def __str__(self) -> str:
        pages, shared = self.pages, self.shared_pages * PAGE_BYTES
        rows = [
            f"{'pages of 2 KiB':<24}{pages.total:>12}",
            f"{'  in use':<24}{pages.in_use:>12}   {pages.in_use * PAGE_BYTES:>16} bytes",
            f"{'  free':<24}{pages.free:>12}   {pages.free * PAGE_BYTES:>16} bytes",
            f"{'waste':<24}{pages.waste_ratio:>12.2%}   {pages.wasted:>16} bytes",
            f"{'adapters resident':<24}{len(self.adapters):>12}   {sum(self.adapters.values()):>16} bytes",
            f"{'shared factors':<24}{len(self.factors):>12}   {sum(self.factors.values()):>16} bytes of {shared}",
            f"{'adapter indices in use':<24}{self.indices_in_use:>12}   of {self.max_adapters}",
            f"{'adapters in host memory':<24}{self.host_adapters:>12}   {self.host:>16} bytes",
        ]
        return "\n".join(rows)


def stats_of(
    pages: PageCounts, memory: DeviceMemory, residents: Residents, host: Mapping[str, PackedAdapter]
) -> PoolStats:
    """Return the statistics of a pool from its parts."""
    max_adapters, entries = len(memory.directory), len(memory.page_map)
    return PoolStats(
        pages=pages,
        max_adapters=max_adapters,
        indices_in_use=max_adapters - residents.free_indices,
        adapters=residents.bytes_by_adapter,
        factors={factor.key: factor.pages * PAGE_BYTES for factor in residents.factors},
        host=host_bytes(host.values()),
        host_adapters=len(host),
        map_entries=entries,
        map_in_use=entries - residents.map_free,
        map_moved=residents.map_moved,
        shared_pages=len(memory.shared),
        shared_moved=residents.shared_moved,
    )
