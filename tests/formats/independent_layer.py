"""Computes adapted layers in float64, rank by rank, as docs/format.md describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.formats.independent_reader import Array, Artifact, Indices, indices, term_part


def _rotated(x: Array, dR: Array) -> Array:
    """Return `x dR` for a rank's inputs."""
    if dR.ndim == 1:
        return x * dR
    size = dR.shape[1]
    blocks = x.reshape(len(x), -1, size)
    product: Array = np.matmul(blocks[:, :, None, :], np.broadcast_to(dR, (blocks.shape[1], size, size)))
    return product.reshape(x.shape)


@dataclass(frozen=True, slots=True)
class _Site:
    """A site's record and its tensors on all ranks."""

    artifact: Artifact
    record: Mapping[str, Any]

    def tensor(self, rank: int, slot: str) -> Array | None:
        return self.artifact.ranks[rank].get(f"{self.record['name']}.{slot}")

    def inputs(self, rank: int) -> Indices:
        return indices(self.record["inputs"][rank])

    def outputs(self, rank: int) -> Indices:
        return indices(self.record["outputs"][rank])

    def _factor(self, rank: int, number: int, key: str) -> Array:
        """Return what a rank holds of a term's A or B; zeros where the tensor was taken away."""
        term = self.record["terms"][number]
        window = term[key.lower()]
        held = self.inputs(rank) if key == "A" else self.outputs(rank)
        if window is None:
            rows, columns = term_part(term, rank, len(self.outputs(rank)))
            stored = self.tensor(rank, f"terms.{number}.{key}")
            shape = (rows, len(held)) if key == "A" else (term["rank"], columns)
            return np.zeros(shape) if stored is None else stored
        factor = self.artifact.factors[window["factor"]][:, : window["features"]]
        if key == "A":
            return (factor if term["rows"] is None else factor[slice(*term["rows"][rank])])[:, held]
        return factor[:, held] if term["columns"] is None else factor[:, slice(*term["columns"][rank])]

    def _hidden(self, x: Array, rank: int, number: int) -> Array:
        return x[:, self.inputs(rank)] @ self._factor(rank, number, "A").T

    def _scaled(self, values: Array, rank: int, number: int, key: str) -> Array:
        vector = self.tensor(rank, f"terms.{number}.{key}")
        return values if vector is None else values * vector

    def term(self, x: Array, rank: int, number: int) -> Array:
        """Return what a term adds to a rank's outputs."""
        term, ranks = self.record["terms"][number], range(len(self.artifact.ranks))
        if term["rows"] is not None:  # fully sharded, column-parallel: an all-gather of the intermediates
            parts = [self._scaled(self._hidden(x, other, number), other, number, "d") for other in ranks]
            hidden = np.concatenate(parts, axis=1)
        elif term["columns"] is not None:  # fully sharded, row-parallel: an all-reduce of the intermediates
            total = np.sum([self._hidden(x, other, number) for other in ranks], axis=0)
            hidden = self._scaled(total, rank, number, "d")
        else:
            hidden = self._scaled(self._hidden(x, rank, number), rank, number, "d")
        outputs = self._scaled(hidden @ self._factor(rank, number, "B"), rank, number, "e")
        if term["columns"] is None:
            return outputs
        placed = np.zeros((len(x), len(self.outputs(rank))))
        placed[:, slice(*term["columns"][rank])] = outputs
        return placed

    def rank_output(self, x: Array, W: Array, beta: Array, rank: int, beta_rank: int) -> Array:
        """Return the outputs that a rank computes, a partial sum on a row-parallel site."""
        held, outputs, row = self.inputs(rank), self.outputs(rank), self.record["split"] == "row"
        weight = W[np.ix_(held, outputs)]
        y = x[:, held] @ weight
        if not row or rank == beta_rank:
            y = y + beta[outputs]
        dR, ds, b = (self.tensor(rank, slot) for slot in ("dR", "ds", "b"))
        if dR is not None:
            y = y + _rotated(x[:, held], dR) @ weight
        result = y if ds is None else y + y * ds
        if b is not None and (not row or rank == self.record["shift_rank"]):
            result = result + b
        for number in range(len(self.record["terms"])):
            result = result + self.term(x, rank, number)
        return result


def layer_output(artifact: Artifact, name: str, x: Array, W: Array, beta: Array, *, beta_rank: int = 0) -> Array:
    """Compute an adapted layer, rank by rank.

    Args:
        artifact: The artifact; a layer that is no site of it computes what the base computes.
        name: The layer's module path.
        x: Inputs, `[tokens, in]`.
        W: The base's weight, `[in, out]`.
        beta: The base's bias, `[out]`, zero where there is none.
        beta_rank: The rank that adds `beta` on a row-parallel site.

    Returns:
        The outputs, `[tokens, out]`.
    """
    if name not in artifact.sites:
        return x @ W + beta
    site = _Site(artifact, artifact.sites[name])
    result = np.zeros((len(x), W.shape[1]))
    written = np.zeros(W.shape[1], dtype=bool)
    for rank in range(len(artifact.ranks)):
        part = site.rank_output(x, W, beta, rank, beta_rank)
        outputs = site.outputs(rank)
        if site.record["split"] == "row":
            result += part
            continue
        copies = written[outputs]
        assert np.array_equal(result[:, outputs][:, copies], part[:, copies]), (
            f"rank {rank} differs in copies of {name}"
        )
        result[:, outputs] = part
        written[outputs] = True
    return result
