"""A transformers model that serves an adapter per row of a batch; adapters are added and removed between calls.

The model's linear layers are replaced. On a GPU they run the kernels, on a CPU the reference through the same operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from scute_compile.formats.artifact import Artifact
from scute_compile.ir.target import LoraSharding
from scute_compile.runtime_min.layers import linear_layers, put_layer, weight_and_bias
from scute_compile.runtime_min.model.adapter_reader import AdapterReader
from scute_compile.runtime_min.model.checks import (
    allocating,
    check_counts,
    check_options,
    check_tokens,
    check_unwrapped,
    check_usable,
    names_per_row,
    names_per_token,
    shape_of,
    weight_of,
)
from scute_compile.runtime_min.model.rank_part import RankPart, cut_for_rank
from scute_compile.runtime_min.model.sizes import bytes_of
from scute_compile.runtime_min.pool.admission import check_known, check_new, check_size
from scute_compile.runtime_min.pool.directory import DirectoryEntry, pages_of
from scute_compile.runtime_min.pool.equal_pages import with_equal_pages
from scute_compile.runtime_min.pool.packed_adapter import PackedAdapter
from scute_compile.runtime_min.pool.resident_pool import ResidentPool
from scute_compile.runtime_min.ranks.exchange import TermExchange
from scute_compile.runtime_min.ranks.group import RankGroup
from scute_compile.runtime_min.step.arguments import PoolTensors
from scute_compile.runtime_min.step.layer import LoadedFacts, ServedLinear, StepState
from scute_compile.runtime_min.step.writer import StepLimits, StepWriter

AdapterNames = Sequence[str | None]
"""A list or tuple with the adapter of each row of a batch; None or `"__base__"` for the base alone."""


class ServedModel:
    """Serves many adapters on one model.

    Calls come from one thread. A step whose adapters don't fit raises before anything runs, and leaves the pool and the
    loaded adapters as they were.

    Args:
        model: A transformers causal LM on one device. Its linear layers are replaced until `remove`, except the
            output head: the module that `get_output_embeddings` returns. (The compiler, which sees only names in files,
            finds it by a table of names.)
        max_adapters: Largest number of adapters on the device at once, and so in one batch.
        pool_bytes: Device memory for adapters: bytes, or text such as `"128MiB"`; rounded up to pages of 2 KiB.
        shared_bytes: Device memory for factors that adapters share, in the same form. The default holds two pairs of
            rank 256 and 14336 features in bfloat16.
        dtype: The pool's dtype; None for that of the model's layers, which a GPU requires.
        max_num_batched_tokens: Largest number of tokens of a step: rows times the longest prompt.
        max_num_seqs: Largest number of tokens of a decode step.
        max_lora_rank: The largest rank that the step's buffers hold from the start. They grow when an adapter of a
            larger rank is loaded, but graphs that were captured before then are lost.
        base_structure: The structure hash of the base; artifacts that were compiled for another are refused.
        convert: Whether artifacts of another dtype are rounded to the pool's; they are refused otherwise.
        fixed: Whether every step launches the same kernels, whatever its adapters, as CUDA graphs and `torch.compile`
            need.
        rank_part: This rank's part of a model that several ranks share; `for_rank` passes it.

    Raises:
        ScuteError: SC402 when the model has no linear layer; SC703 when its layers lie on several devices or are
            already served, when `dtype` is not theirs on a GPU, or for a size of another form or below one; SC814 when
            the pool doesn't fit into memory.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        max_adapters: int = 8,
        pool_bytes: int | str = "128MiB",
        shared_bytes: int | str = "32MiB",
        dtype: torch.dtype | None = None,
        max_num_batched_tokens: int = 4096,
        max_num_seqs: int = 64,
        max_lora_rank: int = 0,
        base_structure: str | None = None,
        convert: bool = False,
        fixed: bool = False,
        rank_part: RankPart | None = None,
    ) -> None:
        check_unwrapped(model)
        check_counts(
            1, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs, max_adapters=max_adapters
        )
        check_counts(0, max_lora_rank=max_lora_rank)
        head = getattr(model, "get_output_embeddings", lambda: None)()
        linears = {path: layer for path, layer in linear_layers(model).items() if layer is not head}
        self.model = model
        self._part = part = RankPart() if rank_part is None else rank_part
        self.pool = _pool(
            linears,
            part,
            dtype=dtype,
            max_adapters=max_adapters,
            pool_bytes=bytes_of(pool_bytes, name="pool_bytes", least=1),
            shared_bytes=bytes_of(shared_bytes, name="shared_bytes", least=0),
        )
        self._reader = AdapterReader(pool=self.pool, part=part, convert=convert, base_structure=base_structure)
        # until the first step is written, any int32 tensor can be the buffer
        self._step = StepState(tables=PoolTensors.of(self.pool.memory), buffer=self.pool.memory.page_map)
        limits = StepLimits(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_lora_rank=max_lora_rank,
            fixed=fixed,
            shares=part.shares,
        )
        self._writer = StepWriter(self.pool, limits)
        self._layers = _served_layers(linears, self._step, part.exchanges)
        for layer in self._layers:
            put_layer(model, layer.name, layer)
        self._loaded: dict[str, LoadedFacts] = {}
        self._call: Callable[..., Any] = model
        self._removed = self._running = False

    @classmethod
    def for_rank(
        cls,
        model: torch.nn.Module,
        *,
        group: dist.ProcessGroup | None = None,
        lora_sharding: LoraSharding | str = LoraSharding.DEFAULT,
        **options: Any,  # noqa: ANN401 - the constructor's
    ) -> Self:
        """Cut a model for this rank, in place, and serve adapters on it; the whole weights are not kept.

        All ranks make the same calls in the same order. An adapter is loaded on all ranks or on none (SC815), and takes
        equally many pages on each, so that all ranks evict and refuse the same adapters. Row-parallel layers round each
        rank's partial sums to the model's dtype and add them up in it, as engines do.

        Args:
            model: The whole transformers model, the same on every rank, on the rank's device.
            group: The ranks' process group, gloo on CPUs and NCCL on GPUs; None for the default group, or for one rank
                when `torch.distributed` isn't initialised.
            lora_sharding: The layout of low-rank terms that the artifacts were compiled with, `"default"` or `"full"`.
            options: As for `ServedModel`, without `rank_part`.

        Raises:
            ScuteError: SC501 when a layer doesn't divide over the ranks, or has fewer outputs than there are ranks;
                SC703 for an unknown layout; what `ServedModel` raises.
        """
        part = cut_for_rank(model, RankGroup(group), lora_sharding)
        served = cls(model, rank_part=part, **options)
        part.connect(served.layers)
        return served

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded adapters."""
        return self.pool.names

    @property
    def loaded(self) -> Mapping[str, LoadedFacts]:
        """Facts about each loaded adapter; a replacement has a new object."""
        return self._loaded

    @property
    def ranks(self) -> RankGroup:
        """The ranks that share the model; a group of one where only this process serves it."""
        return self._part.ranks

    @property
    def max_num_batched_tokens(self) -> int:
        """Largest number of tokens of a step."""
        return self._writer.max_tokens

    @property
    def layers(self) -> Mapping[str, ServedLinear]:
        """The layers that replace the model's, by path."""
        return {layer.name: layer for layer in self._layers}

    def load_adapter(self, source: Artifact | Path | str, *, adapter_name: str) -> None:
        """Add an adapter in host memory; it moves to the device with the first batch that uses it.

        Args:
            source: An opened artifact, or the folder of one.
            adapter_name: The name that batches use.

        Raises:
            ScuteError: SC801 (another tp or dtype), SC812 (the other layout of terms), SC608 or SC402 (another base),
                SC803 (terms that aren't served), SC805 (larger than the pool), SC806 (the name is taken), SC703 (no
                name, or no artifact), SC815 (another rank refused it), and an artifact's faults (SC6xx). The adapters
                that are loaded stay.
        """
        packed = self._read(source, adapter_name, lambda: check_new(adapter_name, self.pool.packed_adapters))
        self.pool.add(adapter_name, packed)
        self._loaded[adapter_name] = LoadedFacts.of(packed)

    def replace_adapter(self, source: Artifact | Path | str, *, adapter_name: str) -> None:
        """Replace a loaded adapter by another artifact.

        Args:
            source: An opened artifact, or the folder of one.
            adapter_name: The name of the loaded adapter.

        Raises:
            ScuteError: SC802 (no such adapter), SC804 (no room beside the running step), and as `load_adapter`. The old
                adapter then stays.
        """
        packed = self._read(source, adapter_name, lambda: check_known([adapter_name], self._loaded))
        self.pool.replace(adapter_name, packed)
        self._loaded[adapter_name] = LoadedFacts.of(packed)

    def delete_adapter(self, adapter_name: str) -> None:
        """Remove an adapter from the device and from host memory. Raises SC802 when it isn't loaded."""
        self.pool.remove(adapter_name)
        del self._loaded[adapter_name]

    def forward(self, input_ids: torch.Tensor | None = None, *, adapter_names: AdapterNames, **options: Any) -> Any:  # noqa: ANN401 - transformers' own
        """Run the model once.

        Args:
            input_ids: `(batch, tokens)`; or pass `inputs_embeds`.
            adapter_names: The adapter of each row, None or `"__base__"` for the base.
            options: Arguments of the model's own forward.

        Raises:
            ScuteError: SC802 (a name that isn't loaded), SC804 (more adapters or tokens than fit), SC703 (another
                number of names than rows, no token, a token outside the vocabulary, a step inside another, or a call
                after `remove`).
        """
        shape = shape_of(input_ids, options.get("inputs_embeds"))
        names = names_per_row(adapter_names, shape[0])
        check_tokens(input_ids, self.model)
        with torch.no_grad(), self._leased(names):
            self._write(names, shape)
            return self._call(input_ids=input_ids, **options)

    __call__ = forward

    def generate(self, input_ids: torch.Tensor, *, adapter_names: AdapterNames, **options: Any) -> torch.Tensor:  # noqa: ANN401 - transformers' own
        """Run transformers' `generate` on one batch.

        Args:
            input_ids: `(batch, tokens)`; pad on the left, and pass `attention_mask`.
            adapter_names: The adapter of each row; beams and samples of a row use the row's.
            options: Arguments of `generate`. On several ranks `max_time` is refused, and sampling needs the same seed
                on all of them.

        Raises:
            ScuteError: As `forward`, and SC703 for options that don't work here.
        """
        model: Any = self.model
        inner = model.prepare_inputs_for_generation

        @wraps(inner)
        def prepare(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - transformers' own method, unannotated
            inputs = inner(*args, **kwargs)
            self._write(names, shape_of(inputs.get("input_ids"), inputs.get("inputs_embeds")))
            return inputs

        names = names_per_row(adapter_names, shape_of(input_ids, None)[0])
        check_tokens(input_ids, self.model)
        check_options(names, options, tp=self.ranks.size)
        with torch.no_grad(), self._leased(names):
            model.prepare_inputs_for_generation = prepare
            try:
                out: torch.Tensor = model.generate(input_ids, **options)
            finally:
                del model.prepare_inputs_for_generation
        return out

    @contextmanager
    def step(self, adapter_names: AdapterNames, tokens: Sequence[int]) -> Iterator[None]:
        """Set the adapters for calls of the model inside the block, for callers that drive the model themselves.

        Args:
            adapter_names: The adapter of each sequence.
            tokens: How many tokens of the flattened batch belong to each sequence, in order.

        Raises:
            ScuteError: As `forward`.
        """
        names = names_per_token(adapter_names, tokens)
        with self._leased(names):
            self._write_tokens(names)
            yield

    def compile(self, **options: Any) -> None:  # noqa: ANN401 - torch.compile's own
        """Run the model through `torch.compile` in `forward`; without `fixed`, every new mix of adapters recompiles."""
        self._call = torch.compile(self.model, **options)

    def remove(self) -> None:
        """Put the model's own layers back, on several ranks this rank's parts; further steps are refused (SC703)."""
        if self._removed:
            return
        check_usable(removed=False, running=self._running)
        self._removed = True
        for layer in self._layers:
            put_layer(self.model, layer.name, layer.plain[0])
        self._part.connect({layer.name: layer.plain[0] for layer in self._layers})
        self._call = self.model

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    @contextmanager
    def _leased(self, adapter_names: AdapterNames) -> Iterator[None]:
        """Hold the batch's adapters on the device, and activate the layers that they touch."""
        check_usable(removed=self._removed, running=self._running)
        names = tuple(dict.fromkeys(name for name in adapter_names if name is not None))
        fixed = self._writer.limits.fixed
        with self._exclusive(), ExitStack() as stack:
            if names or fixed:
                self._writer.hold(names)
                stack.callback(self._writer.release)
                stack.callback(self._activate, ())  # direct calls of the model run the base
                self._activate(tuple(self._loaded) if fixed else names)
            yield

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
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

    def _write(self, adapter_names: AdapterNames, shape: tuple[int, int]) -> None:
        """Write the step of one call, which may have several adjacent rows per name, such as beams."""
        rows, length = shape
        tokens = rows // len(adapter_names) * length
        self._write_tokens([name for name in adapter_names for _ in range(tokens)])

    def _write_tokens(self, names: AdapterNames) -> None:
        """Write a step with an adapter per token; without adapters no layer reads one."""
        self._step.tokens = len(names)
        if self._writer.held:
            self._writer.write(names)
            self._step.set_launch(*self._writer.arguments())

    def _read(self, source: Artifact | Path | str, name: str, check: Callable[[], None]) -> PackedAdapter:
        """Read an adapter on all ranks or on none, with equally many pages on each, and fit the step's buffers."""
        memory = self.pool.memory
        all_or_none = partial(self.ranks.all_or_none, name, memory.pages.device)
        with all_or_none():
            check_usable(removed=self._removed, running=False)
            check()
            packed = self._reader.read(source, name)
        self.ranks.check_same(name, packed.digest, memory.pages.device)
        with all_or_none():  # separate from reading, because ranks exchange sizes here
            if self.ranks.size > 1:
                packed = with_equal_pages(packed, self.ranks, memory.pages.device, self._reader.factors)
            check_size(packed, pages=len(memory.pages), shared=len(memory.shared))
            self._writer.fit(packed)
        return packed


def _pool(
    linears: Mapping[str, torch.nn.Module],
    part: RankPart,
    *,
    dtype: torch.dtype | None,
    max_adapters: int,
    pool_bytes: int,
    shared_bytes: int,
) -> ResidentPool:
    weight = weight_of(linears, dtype)
    with allocating(pool_bytes, shared_bytes):
        return ResidentPool(
            [entry for path, layer in linears.items() for entry in _entries(path, layer, part.exchanges.get(path))],
            num_pages=pages_of(pool_bytes),
            max_adapters=max_adapters,
            dtype=weight.dtype if dtype is None else dtype,
            device=weight.device,
            shared_pages=pages_of(shared_bytes),
        )


def _entries(path: str, layer: torch.nn.Module, exchange: TermExchange | None) -> list[DirectoryEntry]:
    outputs, inputs = weight_and_bias(layer)[0].shape
    return [
        DirectoryEntry(
            name=path,
            in_features=inputs,
            out_features=outputs if part is None else part[1] - part[0],
            gemm=path,
            part=part,
        )
        for part in (exchange.parts(outputs) if exchange else (None,))
    ]


def _served_layers(
    linears: Mapping[str, torch.nn.Module], state: StepState, exchanges: Mapping[str, TermExchange]
) -> list[ServedLinear]:
    """Return the replacements of the layers, with directory indices in the order of the pool's entries."""
    layers: list[ServedLinear] = []
    for path, layer in linears.items():
        first = layers[-1].sites.stop if layers else 0
        layers.append(ServedLinear(layer, first, path, state, exchanges.get(path)))
    return layers
