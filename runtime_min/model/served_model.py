"""A transformers model that serves resident adapter_names: one per row of the batch, added and removed between calls.

The model is wrapped in place. On a GPU the layers run the kernels; on a CPU the same code runs the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import Any, Self
from weakref import WeakValueDictionary

import torch

from scute_compile.formats.artifact import Artifact, open_artifact
from scute_compile.ir.target import LoraSharding
from scute_compile.runtime_min.layers import linear_layers
from scute_compile.runtime_min.model.checks import (
    allocating,
    check_options,
    check_rows,
    check_sizes,
    check_source,
    check_step,
    check_structure,
    check_tokens,
    check_turn,
    check_unwrapped,
    shape_of,
    weight_of,
)
from scute_compile.runtime_min.pool.admission import check_known, check_new, check_size
from scute_compile.runtime_min.pool.directory import DirectoryEntry
from scute_compile.runtime_min.pool.equal_pages import with_equal_pages
from scute_compile.runtime_min.pool.fully_sharded import check_met
from scute_compile.runtime_min.pool.packed_adapter import PackedAdapter, PackedFactor
from scute_compile.runtime_min.pool.reading import named_as_in, read_adapter
from scute_compile.runtime_min.pool.resident_pool import ResidentPool
from scute_compile.runtime_min.ranks.exchange import TermExchange
from scute_compile.runtime_min.ranks.group import RankGroup
from scute_compile.runtime_min.step.arguments import PoolTensors
from scute_compile.runtime_min.step.layer import LoadedFacts, ServedLinear, StepState
from scute_compile.runtime_min.step.writer import StepLimits, StepWriter

Rows = Sequence[str | None]
"""The adapter of each row of a batch; None for the base alone."""


class ServedModel:
    """Serves many adapters on one model.

    Calls come from one thread. A step whose adapters don't fit raises before anything runs; the pool, the other
    adapters and later steps are as before.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        max_adapters: int,
        num_pages: int,
        dtype: torch.dtype | None = None,
        max_num_batched_tokens: int = 4096,
        max_num_seqs: int = 64,
        max_lora_rank: int = 0,
        base_structure: str | None = None,
        convert: bool = False,
        fixed: bool = False,
        shared_pages: int = 16384,
        tp: int = 1,
        rank: int = 0,
        exchanges: Mapping[str, TermExchange] | None = None,
        peers: RankGroup | None = None,
    ) -> None:
        """Wrap a model and make an empty pool.

        Args:
            model: A transformers causal LM on one device; its layers are replaced until `remove`.
            max_adapters: Most adapters on the device at once, and so most in one batch.
            num_pages: The pool's pages, of 2 KiB.
            dtype: The pool's dtype; None: that of the model's layers, which kernels need. On a CPU any.
            max_num_batched_tokens: Most tokens of a step: rows times the longest prompt.
            max_num_seqs: Most tokens of a decode step.
            max_lora_rank: Ranks that the step's buffers hold from the start; they grow when a larger adapter is loaded,
                but a graph that was captured before then is lost.
            base_structure: The structure hash of the base; artifacts that were compiled for another are refused.
            convert: Whether artifacts of another dtype are rounded to the pool's.
            fixed: Whether every step is launched alike, whatever its adapters: for CUDA graphs and `torch.compile`.
            shared_pages: Pages for shared factors.
            tp: Number of ranks that the model's layers were cut for; see `scute_compile.runtime_min.model.ranks`.
            rank: Which of them this is.
            exchanges: How these ranks complete the intermediates of fully sharded terms, by the path of a layer; None:
                terms are cut along one side, and ranks exchange none.
            peers: These ranks, which load an adapter together or not at all; None: this one is alone.

        Raises:
            ScuteError: SC402 when the model has no linear layer; SC703 when its layers lie on several devices or are
                served already, when `dtype` is not theirs on a GPU, or a size is below one.
        """
        self.model, self.base_structure = model, base_structure
        self._convert, self._tp, self._rank, self._peers = convert, tp, rank, peers
        self._sharding = LoraSharding.DEFAULT if exchanges is None else LoraSharding.FULL
        meeting = exchanges or {}
        heads = getattr(model, "get_output_embeddings", lambda: None)()
        linears = {name: layer for name, layer in linear_layers(model).items() if layer is not heads}
        self._factors: WeakValueDictionary[str, PackedFactor] = WeakValueDictionary()
        check_unwrapped(model)
        check_sizes(
            1,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            num_pages=num_pages,
            max_adapters=max_adapters,
        )
        check_sizes(0, max_lora_rank=max_lora_rank, shared_pages=shared_pages)
        weight = weight_of(linears, dtype)
        with allocating(num_pages, shared_pages):
            self.pool = ResidentPool(
                [site for name, layer in linears.items() for site in _sites(name, layer, meeting.get(name))],
                num_pages=num_pages,
                max_adapters=max_adapters,
                dtype=weight.dtype if dtype is None else dtype,
                device=weight.device,
                shared_pages=shared_pages,
                convert=convert,
                tp=tp,
                rank=rank,
            )
        self._step = StepState(tables=PoolTensors.of(self.pool.memory), buffer=self.pool.memory.page_map)
        limits = StepLimits(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_lora_rank=max_lora_rank,
            fixed=fixed,
            shares=1 if exchanges is None else tp,
        )
        self._writer = StepWriter(self.pool, limits)
        self._layers = _served(linears, self._step, meeting)
        for layer in self._layers:
            _put(model, layer.name, layer)
        self._loaded: dict[str, LoadedFacts] = {}
        self._call: Callable[..., Any] = model
        self._removed = self._running = False

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that batches may use."""
        return self.pool.names

    @property
    def loaded(self) -> Mapping[str, LoadedFacts]:
        """What is known of each of them; an adapter that was replaced has another object than before."""
        return self._loaded

    @property
    def ranks(self) -> int:
        """Number of ranks that share the model."""
        return self._tp

    @property
    def max_num_batched_tokens(self) -> int:
        """Most tokens of a step."""
        return self._writer.max_tokens

    @property
    def layers(self) -> Mapping[str, ServedLinear]:
        """The layers that stand in the model, by path."""
        return {layer.name: layer for layer in self._layers}

    def load_adapter(self, name: str, source: Artifact | Path | str) -> None:
        """Add an adapter from an artifact; it comes onto the device with the first batch that uses it.

        Raises:
            ScuteError: SC801 (another tp or dtype), SC608 or SC402 (another base), SC803 (terms that aren't served),
                SC805 (larger than the pool), SC806 (the name is taken), SC815 (another rank refused it), and an
                artifact's own faults (SC6xx). The adapters that are loaded serve on.
        """
        packed = self._read_together(name, source, lambda: check_new(name, self.pool.packed_adapters))
        self.pool.add(name, packed)
        self._loaded[name] = LoadedFacts.of(packed)

    def replace_adapter(self, name: str, source: Artifact | Path | str) -> None:
        """Put another artifact in an adapter's place. Raises SC802, and as `load`; the old one then serves on."""
        packed = self._read_together(name, source, lambda: check_known([name], self._loaded))
        self.pool.replace(name, packed)
        self._loaded[name] = LoadedFacts.of(packed)

    def delete_adapter(self, name: str) -> None:
        """Remove an adapter, on the device and in host memory. Raises SC802 when it isn't loaded."""
        self.pool.remove(name)
        del self._loaded[name]

    def forward(self, input_ids: torch.Tensor | None = None, *, adapter_names: Rows, **options: Any) -> Any:  # noqa: ANN401 - transformers' own
        """Run the model once with one adapter id, or None, per row of the batch.

        Args:
            input_ids: `(batch, tokens)`; or pass `inputs_embeds`.
            adapter_names: One per row.
            options: What the model's own forward takes.

        Raises:
            ScuteError: SC802 (an id that isn't loaded), SC804 (more than fits), SC703 (not one id per row, no token,
                one that the model doesn't have, a step inside another, or after `remove`).
        """
        shape = shape_of(input_ids, options.get("inputs_embeds"))
        check_rows(adapter_names, shape[0])
        check_tokens(input_ids, self.model)
        with torch.no_grad(), self._leased(adapter_names):
            self._prepare(adapter_names, shape)
            return self._call(input_ids=input_ids, **options)

    __call__ = forward

    def generate(self, input_ids: torch.Tensor, *, adapter_names: Rows, **options: Any) -> torch.Tensor:  # noqa: ANN401 - transformers' own
        """Run transformers' own `generate` on one batch, each row with its adapter.

        Args:
            input_ids: `(batch, tokens)`; pad on the left, and pass `attention_mask`.
            adapter_names: One per row; beams and samples of a row follow it.
            options: What `generate` takes; on several ranks no `max_time`, and for samples one seed on all of them.

        Raises:
            ScuteError: As `forward`.
        """
        model: Any = self.model
        inside = model.prepare_inputs_for_generation

        @wraps(inside)
        def prepare(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - transformers' own method, unannotated
            inputs = inside(*args, **kwargs)
            self._prepare(adapter_names, shape_of(inputs.get("input_ids"), inputs.get("inputs_embeds")))
            return inputs

        check_rows(adapter_names, shape_of(input_ids, None)[0])
        check_tokens(input_ids, self.model)
        check_options(adapter_names, options, ranks=self._tp)
        with torch.no_grad(), self._leased(adapter_names):
            model.prepare_inputs_for_generation = prepare
            try:
                out: torch.Tensor = model.generate(input_ids, **options)
            finally:
                del model.prepare_inputs_for_generation
        return out

    @contextmanager
    def step(self, adapter_names: Rows, tokens: Sequence[int]) -> Iterator[None]:
        """Set the adapters for calls of the model inside the block, for callers with a loop of their own.

        Args:
            adapter_names: One per sequence.
            tokens: How many tokens of the flattened batch belong to each sequence, in order.

        Raises:
            ScuteError: As `forward`.
        """
        check_step(adapter_names, tokens)
        with self._leased(adapter_names):
            self._write([name for name, count in zip(adapter_names, tokens, strict=True) for _ in range(count)])
            yield

    def compile(self, **options: Any) -> None:  # noqa: ANN401 - torch.compile's own
        """Let `forward` run the model through `torch.compile`; wants `fixed`, or every new mix compiles again."""
        self._call = torch.compile(self.model, **options)

    def remove(self) -> None:
        """Give the model back as it was; further steps are refused."""
        if self._removed:
            return
        check_turn(removed=False, running=self._running)
        self._removed = True
        for layer in self._layers:
            _put(self.model, layer.name, layer.plain[0])
        self._call = self.model

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @contextmanager
    def _leased(self, adapter_names: Rows) -> Iterator[None]:
        """Hold the batch's adapters on the device, and let the layers that they touch call the op."""
        check_turn(removed=self._removed, running=self._running)
        names = tuple(dict.fromkeys(name for name in adapter_names if name is not None))
        fixed = self._writer.limits.fixed
        with self._turn(), ExitStack() as stack:
            if names or fixed:
                self._writer.hold(names)
                stack.callback(self._writer.release)
                stack.callback(self._activate, ())  # calls of the model from elsewhere get the base
                self._activate(tuple(self._loaded) if fixed else names)
            yield

    @contextmanager
    def _turn(self) -> Iterator[None]:
        self._running = True
        try:
            yield
        finally:
            self._running = False

    def _activate(self, names: Sequence[str]) -> None:
        sites = frozenset[int]().union(*(self._loaded[name].sites for name in names))
        terms = frozenset[int]().union(*(self._loaded[name].terms for name in names))
        for layer in self._layers:
            layer.active = not sites.isdisjoint(layer.sites)
            layer.exchanges = not terms.isdisjoint(layer.sites)

    def _prepare(self, adapter_names: Rows, shape: tuple[int, int]) -> None:
        """Write the step of one call; the rows of a call may be several per adapter id, side by side, as beams are."""
        rows, length = shape
        each = rows // len(adapter_names) * length
        self._write([name for name in adapter_names for _ in range(each)])

    def _write(self, names: Rows) -> None:
        """Write one step, with an adapter per token, where any layer will read it."""
        self._step.tokens = len(names)
        if self._writer.held:
            self._writer.write(names)
            self._step.set_launch(*self._writer.arguments())

    def _read_together(self, name: str, source: Artifact | Path | str, check: Callable[[], None]) -> PackedAdapter:
        """Read an adapter on all ranks or on none, with as much room on each, and make the step's buffers fit it."""
        device = self.pool.memory.pages.device
        together = partial(self._peers.together, name, device) if self._peers else nullcontext
        with together():
            check_turn(removed=self._removed, running=False)
            check()
            packed = self._read(name, source)
        if self._peers:
            self._peers.check_same(name, packed.digest, device)
        with together():  # once all have read it: ranks exchange sizes, and one may have no memory for them
            packed = with_equal_pages(packed, self._peers, device, self._factors) if self._peers else packed
            check_size(packed, pages=len(self.pool.memory.pages), shared=len(self.pool.memory.shared))
            self._writer.fit(packed)
        return packed

    def _read(self, name: str, source: Artifact | Path | str) -> PackedAdapter:
        check_source(name, source)
        artifact = source if isinstance(source, Artifact) else open_artifact(source, verify_hashes=False)
        manifest = artifact.manifest
        check_structure(name, manifest.base, self.base_structure)
        sites = named_as_in(artifact, self.pool.sites)
        if self._sharding is manifest.lora_sharding is LoraSharding.FULL and manifest.tp == self._tp:
            met = {sites[layer.site].name: layer.exchange for layer in self._layers}
            check_met(name, manifest, self._rank, met)
        return read_adapter(
            artifact,
            sites,
            self.pool.dtype,
            name=name,
            factors=self._factors,
            tp=self._tp,
            rank=self._rank,
            sharding=self._sharding,
            convert=self._convert,
            pin=self.pool.memory.pin,
        )


def _served(
    linears: Mapping[str, torch.nn.Module], step: StepState, exchanges: Mapping[str, TermExchange]
) -> list[ServedLinear]:
    """Return what stands in the layers' places, each at the indices that follow those of the one before."""
    layers: list[ServedLinear] = []
    for name, layer in linears.items():
        first = layers[-1].sites.stop if layers else 0
        layers.append(ServedLinear(layer, first, name, step, exchanges.get(name)))
    return layers


def _put(model: torch.nn.Module, name: str, layer: torch.nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, layer)


def _sites(name: str, layer: torch.nn.Module, exchange: TermExchange | None) -> list[DirectoryEntry]:
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)  # noqa: S101 - narrows the type of a module's attribute
    first, second = weight.shape
    inputs, outputs = (second, first) if isinstance(layer, torch.nn.Linear) else (first, second)
    return [
        DirectoryEntry(
            name=name,
            in_features=inputs,
            out_features=outputs if part is None else part[1] - part[0],
            gemm=name,
            part=part,
        )
        for part in (exchange.parts(outputs) if exchange else (None,))
    ]
