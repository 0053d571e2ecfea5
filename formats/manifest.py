"""The manifest of an artifact as typed records, described for implementers in `docs/format.md`.

Records are frozen and refuse unknown fields. Consistency within the manifest is checked here, and consistency with the
files in `scute_compile.formats.artifact`.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from scute_compile.formats.reading import parse_object
from scute_compile.ir.dtypes import DType
from scute_compile.ir.expressions import Ranges, width
from scute_compile.ir.linear import Split
from scute_compile.ir.method import Method
from scute_compile.ir.program import RotationKind
from scute_compile.ir.target import LoraSharding

FORMAT: Literal["scute.artifact"] = "scute.artifact"
"""The field `format` of every manifest. It distinguishes the file from other programs' files of the same name."""
MAJOR, MINOR = 2, 0
SCHEMA_VERSION = f"{MAJOR}.{MINOR}"

LARGEST = 2**63 - 1
"""The largest whole number in a manifest."""
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Positive = Annotated[int, Field(ge=1, le=LARGEST)]
Range = tuple[Count, Count]
RankRanges = Annotated[tuple[Range, ...], Field(min_length=1)]


class Record(BaseModel):
    """The base class of all records: frozen, strict, no undeclared fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class BaseIdentity(Record):
    """The base model that the artifact was compiled for."""

    name: str | None
    """A Hub id, or the last component of a local path; for display."""
    model_type: str
    structure: Sha256
    """`fingerprint.structure_hash`: of configuration fields, tensor names and shapes."""
    content: Sha256 | None
    """`fingerprint.content_hash`: of sampled weights; null when only a configuration was given."""


class WorkloadRecord(Record):
    """The decode step that routes were chosen for. Units: bytes, seconds."""

    tenants: Positive
    tokens: Positive
    bandwidth: Annotated[float, Field(gt=0)]
    launch: Annotated[float, Field(ge=0)]
    activation_bytes: Positive


class RotationRecord(Record):
    """The slot R of a site; the tensor `dR` holds `R - I`."""

    kind: RotationKind
    block: Positive
    """Width of one block; 1 for a diagonal."""
    blocks: Positive
    """Blocks stored for the whole site. Kind `blocks`: 1 means one block that repeats along the input. Kind `diagonal`:
    the site's input width."""


class SharedWindow(Record):
    """A shared factor of the store: the site uses its first `features` columns, and a rank its ranges of these."""

    factor: Sha256
    features: Positive


class TermRecord(Record):
    """One low-rank term. A factor that is null here is not shared: its tensor is in the rank files."""

    rank: Positive
    a: SharedWindow | None
    b: SharedWindow | None
    d: bool
    e: bool
    rows: tuple[Range, ...] | None
    """Fully sharded, column site: per rank, the interval of the term's rank that A and d have on it; may be empty."""
    columns: tuple[Range, ...] | None
    """Fully sharded, row site: per rank, the interval of the outputs that B and e have on it; may be empty."""


class LiveSlot(Record):
    """A slot that is computed at every step, with the route chosen for the workload."""

    slot: str
    route: str
    candidates: tuple[tuple[str, Count], ...]
    """Each route with the bytes that it moves per step."""


class SiteRecord(Record):
    """One linear layer that the adapter touches."""

    name: str
    in_features: Positive
    out_features: Positive
    gemm: str
    split: Split
    inputs: tuple[RankRanges, ...]
    """Per rank, its ranges of the input."""
    outputs: tuple[RankRanges, ...]
    """Per rank, its ranges of the output."""
    rotation: RotationRecord | None
    scale: bool
    """Whether a tensor `ds` exists."""
    shift: bool
    """Whether a tensor `b` exists."""
    shift_rank: Annotated[int, Field(ge=-1)]
    """On row sites, the one rank that adds `b` to its partial sum; on other sites -1: every rank adds it."""
    terms: tuple[TermRecord, ...]
    live: tuple[LiveSlot, ...]

    @model_validator(mode="after")
    def _is_consistent(self) -> SiteRecord:
        _check_cut(self)
        _check_rotation(self)
        for number, term in enumerate(self.terms):
            for window, features in ((term.a, self.in_features), (term.b, self.out_features)):
                if window is not None and window.features != features:
                    message = f"term {number} of `{self.name}` takes {window.features} features of {features}"
                    raise ValueError(message)
            _check_term(self, number, term)
        return self


class FactorFile(Record):
    """A shared factor of the store: tensor `factor` of shape `(rank, features)` in `factors/HASH.safetensors`."""

    hash: Sha256
    rank: Positive
    features: Positive
    dtype: DType
    bytes: Count


class RankFile(Record):
    """The tensors of one rank."""

    file: str
    sha256: Sha256
    bytes: Count


class ByteCounts(Record):
    """Total bytes of the rank files, and of the tensors of the shared factors in use."""

    ranks: Count
    shared: Count


class Manifest(Record):
    """`manifest.json`."""

    format: Literal["scute.artifact"]
    schema_version: Annotated[str, Field(pattern=r"^[0-9]{1,6}\.[0-9]{1,6}$")]
    tool: str
    name: str
    method: Method
    dtype: DType
    tp: Positive
    lora_sharding: LoraSharding
    """`default`: terms are cut along the axis on which the site is cut; `full`: both factors of each term are cut."""
    base: BaseIdentity
    sources: Mapping[str, Sha256]
    """By file name, the hashes of the adapter's files."""
    digest: Sha256
    """`manifest_digest` of the manifest."""
    settings: Mapping[str, str]
    renamed: Mapping[str, str]
    """Module path in the adapter's keys -> module path in the base, of re-rooted keys."""
    workload: WorkloadRecord
    sites: tuple[SiteRecord, ...]
    """Empty when every slot is the identity, as in an adapter that was never trained."""
    factors: tuple[FactorFile, ...]
    ranks: Annotated[tuple[RankFile, ...], Field(min_length=1)]
    bytes: ByteCounts
    notes: tuple[Mapping[str, JsonValue], ...]
    findings: tuple[Mapping[str, JsonValue], ...]

    @field_validator("notes", "findings")
    @classmethod
    def numbers_are_bounded(cls, records: tuple[Mapping[str, JsonValue], ...]) -> tuple[Mapping[str, JsonValue], ...]:
        pending: list[object] = list(records)
        while pending:
            value = pending.pop()
            if isinstance(value, int) and value > LARGEST:
                raise ValueError(f"a number above {LARGEST}")
            pending.extend(value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ())
        return records

    @model_validator(mode="after")
    def _is_consistent(self) -> Manifest:
        if len(self.ranks) != self.tp:
            raise ValueError(f"tp is {self.tp}, but there are {len(self.ranks)} rank files")
        for kind, names in (
            ("site", [site.name for site in self.sites]),
            ("rank file", [rank.file for rank in self.ranks]),
            ("factor", [factor.hash for factor in self.factors]),
        ):
            if double := next((name for name, times in Counter(names).items() if times > 1), None):
                raise ValueError(f"{kind} `{double}` is listed twice")
        factors = {factor.hash: factor for factor in self.factors}
        for site in self.sites:
            if len(site.inputs) != self.tp or len(site.outputs) != self.tp:
                found = f"{len(site.inputs)} input and {len(site.outputs)} output cuts"
                raise ValueError(f"`{site.name}` has {found} for {self.tp} ranks")
            _check_factors(site, factors)
            _check_sharding(site, self.lora_sharding)
        return self


def _check_factors(site: SiteRecord, factors: Mapping[str, FactorFile]) -> None:
    for term in site.terms:
        for window in (term.a, term.b):
            if window is None:
                continue
            if window.factor not in factors:
                raise ValueError(f"`{site.name}` uses factor {window.factor}, which `factors` doesn't list")
            factor = factors[window.factor]
            if factor.rank != term.rank or factor.features < window.features:
                found = f"{factor.rank}x{factor.features}"
                raise ValueError(f"`{site.name}` needs {term.rank}x{window.features} of a factor that is {found}")


def _check_cut(site: SiteRecord) -> None:
    """Check that ranges lie inside the layer, and that only the split's axis is cut and is covered."""
    if site.split is Split.UNKNOWN and len(site.inputs) > 1:
        raise ValueError(f"the split of `{site.name}` is unknown for {len(site.inputs)} ranks")
    for axis, features, cuts in (("input", site.in_features, site.inputs), ("output", site.out_features, site.outputs)):
        cut_axis = (axis == "input" and site.split is Split.ROW) or (axis == "output" and site.split is Split.COLUMN)
        for ranges in cuts:
            ordered = sorted(ranges)
            if any(start >= stop or stop > features for start, stop in ranges):
                raise ValueError(f"an {axis} range of `{site.name}` is empty or ends beyond {features}")
            if any(left[1] > right[0] for left, right in pairwise(ordered)):
                raise ValueError(f"the {axis} ranges of one rank of `{site.name}` overlap")
            if not cut_axis and ranges != ((0, features),):
                raise ValueError(f"the {axis} of `{site.name}` is cut, which a {site.split.value} site never is")
        if cut_axis and not _covers(cuts, features):
            raise ValueError(f"the ranks of `{site.name}` don't hold the whole {axis} of {features}")
    if site.split is Split.ROW and sum(map(width, site.inputs)) != site.in_features:
        raise ValueError(f"two ranks of `{site.name}` hold the same inputs and would add them twice")
    if (site.shift_rank >= 0) is not (site.split is Split.ROW) or site.shift_rank >= len(site.inputs):
        raise ValueError(f"rank {site.shift_rank} can't add the shift of the {site.split.value} site `{site.name}`")


def _check_term(site: SiteRecord, number: int, term: TermRecord) -> None:
    """Check that ranks divide a fully sharded term in order, along the axis that the site's cut leaves whole."""
    for axis, split, features, held in (
        ("rows", Split.COLUMN, term.rank, term.rows),
        ("columns", Split.ROW, site.out_features, term.columns),
    ):
        if held is None:
            continue
        where = f"the {axis} of term {number} of `{site.name}`"
        if site.split is not split:
            raise ValueError(f"{where} are cut, which those of a {site.split.value} site never are")
        if len(held) != len(site.inputs):
            raise ValueError(f"{where} have {len(held)} cuts for {len(site.inputs)} ranks")
        edges = [0, *(stop for _, stop in held)]
        in_order = all(start == edge <= stop for (start, stop), edge in zip(held, edges[:-1], strict=True))
        if not in_order or edges[-1] != features:
            raise ValueError(f"{where} don't divide {features} among the ranks in their order")


def _check_sharding(site: SiteRecord, sharding: LoraSharding) -> None:
    """Check that all terms are cut as `lora_sharding` states."""
    full = sharding is LoraSharding.FULL and len(site.inputs) > 1
    for number, term in enumerate(site.terms):
        cut = (term.rows is not None, term.columns is not None)
        if cut != (full and site.split is Split.COLUMN, full and site.split is Split.ROW):
            raise ValueError(f"term {number} of `{site.name}` isn't cut as lora_sharding {sharding.value} requires")


def _covers(cuts: tuple[Ranges, ...], features: int) -> bool:
    reached = 0
    for start, stop in sorted(pair for ranges in cuts for pair in ranges):
        if start > reached:
            return False
        reached = max(reached, stop)
    return reached == features


def _check_rotation(site: SiteRecord) -> None:
    rotation = site.rotation
    if rotation is None:
        return
    whole = site.in_features // rotation.block
    fits = rotation.block == 1 and rotation.blocks == whole
    if rotation.kind is RotationKind.BLOCKS:
        fits = site.in_features % rotation.block == 0 and rotation.blocks in {1, whole}
    if not fits:
        found = f"{rotation.blocks} blocks of {rotation.block}"
        raise ValueError(f"`{site.name}` has {found} on {site.in_features} inputs")
    if any(edge % rotation.block for ranges in site.inputs for pair in ranges for edge in pair):
        raise ValueError(f"a block of {rotation.block} of `{site.name}` lies across a cut")


def manifest_digest(manifest: Mapping[str, JsonValue]) -> str:
    """Return the sha256 of the manifest's canonical JSON without the field `digest`.

    Canonical: keys sorted, no spaces, characters beyond ASCII escaped, numbers as Python's `json` writes them.

    >>> manifest_digest({"b": 1, "a": [1.5]}) == manifest_digest({"a": [1.5], "b": 1, "digest": "x"})
    True
    """
    content = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def rank_file_name(rank: int, tp: int, sha256: str) -> str:
    """Return the name of a rank's file with the content hash `sha256`.

    >>> rank_file_name(0, 2, 64 * "a")
    'rank-00000-of-00002.aaaaaaaaaaaaaaaa.safetensors'
    """
    return f"rank-{rank:05d}-of-{tp:05d}.{sha256[:16]}.safetensors"


def is_rank_file_name(name: str) -> bool:
    """Return whether a file has the name of a rank's file.

    >>> is_rank_file_name(rank_file_name(1, 2, 64 * "0")), is_rank_file_name("rank-0.safetensors")
    (True, False)
    """
    return re.fullmatch(r"rank-[0-9]{5,}-of-[0-9]{5,}\.[0-9a-f]{16}\.safetensors", name) is not None


def claims_format(raw: bytes) -> bool:
    """Return whether a `manifest.json` has the field `format` of artifacts. Damaged JSON is searched for the field.

    >>> [claims_format(raw) for raw in (b'{"format": "scute.artifact"}', b'{"format": "scute.artifact", "tp', b"{}")]
    [True, True, False]
    """
    try:
        return parse_object(raw).get("format") == FORMAT
    except ValueError:
        return re.search(rb'"format"\s*:\s*"' + re.escape(FORMAT.encode()) + rb'"', raw) is not None


def schema_text() -> str:
    """Return the JSON schema of the manifest, the content of `formats/manifest.schema.json`."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **Manifest.model_json_schema()}
    for definition in schema["$defs"].values():
        if "enum" in definition:
            definition.pop("description", None)  # describes the compiler's class
    return json.dumps(schema, indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    sys.stdout.write(schema_text())
