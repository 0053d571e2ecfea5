"""What a resident pool holds, for people and for programs."""

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
    """A pool at one moment. Units: bytes and pages of 2048 bytes."""

    pages: PageCounts
    slots: int
    slots_in_use: int
    adapters: Mapping[str, int]
    """Bytes of the pages of each resident adapter, without shared factors; a replaced one that a running step still
    reads counts with its successor."""
    factors: Mapping[str, int]
    """Bytes of the pages of each shared factor on the device, by key."""
    host: int
    """Bytes of all packed_adapters in host memory."""
    host_adapters: int
    map_entries: int
    map_in_use: int
    map_moved: int
    """Entries of the page map, 4 bytes each, that were rewritten to close gaps."""
    shared_pages: int
    """Pages for shared factors, in use or not."""
    shared_moved: int
    """Of these, pages that were copied in again to close gaps."""

    def to_json(self) -> dict[str, object]:
        """Return the numbers as plain JSON values."""
        pages = self.pages
        return {
            "page_bytes": PAGE_BYTES,
            "pages": {
                "total": pages.total,
                "in_use": pages.in_use,
                "lent": pages.lent,
                "free": pages.free,
                "moved": pages.moved,
            },
            "bytes": {
                "total": pages.total * PAGE_BYTES,
                "payload": pages.payload,
                "wasted": pages.wasted,
                "lent": pages.lent * PAGE_BYTES,
                "host": self.host,
            },
            "waste_ratio": pages.waste_ratio,
            "slots": {"total": self.slots, "in_use": self.slots_in_use},
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
            f"{'  lent':<24}{pages.lent:>12}   {pages.lent * PAGE_BYTES:>16} bytes",
            f"{'  free':<24}{pages.free:>12}   {pages.free * PAGE_BYTES:>16} bytes",
            f"{'  moved':<24}{pages.moved:>12}",
            f"{'waste':<24}{pages.waste_ratio:>12.2%}   {pages.wasted:>16} bytes",
            f"{'adapters resident':<24}{len(self.adapters):>12}   {sum(self.adapters.values()):>16} bytes",
            f"{'shared factors':<24}{len(self.factors):>12}   {sum(self.factors.values()):>16} bytes of {shared}",
            f"{'slots in use':<24}{self.slots_in_use:>12}   of {self.slots}",
            f"{'adapters in host memory':<24}{self.host_adapters:>12}   {self.host:>16} bytes",
        ]
        return "\n".join(rows)


def stats_of(
    pages: PageCounts, memory: DeviceMemory, residents: Residents, host: Mapping[str, PackedAdapter]
) -> PoolStats:
    """Return what the parts of a pool hold at this moment."""
    slots, entries = len(memory.directory), len(memory.page_map)
    return PoolStats(
        pages=pages,
        slots=slots,
        slots_in_use=slots - residents.free_slots,
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
