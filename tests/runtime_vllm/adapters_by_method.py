"""Makes adapters and their artifacts, and compares the engine's answers with PEFT's."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel, get_peft_model

import scute_compile as scute
from scute_compile.ir.dtypes import DType
from scute_compile.ir.target import Target
from tests.runtime_vllm.engine import Adapter, Answer, Engine, Row
from tests.support.adapters import LARGE_DRAWS, RECIPES, SMALL_DRAWS, Config, draw, lora, oft, vera
from tests.support.bases import ATTENTION, BASES, Sites, made_once

BOUND = 1e-4
"""Largest difference of a log-probability from PEFT's, both in float32."""
EXTRA_RECIPES = {
    "rsdora-attention": lora(use_dora=True, use_rslora=True, target_modules=list(ATTENTION)),
    "lora-rank-32": lora(r=32),
    "lora-rank-128": lora(r=128),
    "lora-head": lora(r=8, target_modules=["q_proj", "down_proj", "lm_head"]),
    "lora-only-head": lora(r=3, target_modules=["lm_head"]),
}
"""Recipes of these tests alone."""
NINE = ("lora", "rslora", "dora", "rsdora-attention", "ia3", "vera", "vera-twin", "oft", "oft-shared")
SERVED = (None, *NINE)
"""The base's row and those of nine adapters. `NAME-twin...` is the recipe NAME with other random values."""
REAL: Mapping[str, Config] = {
    "lora": lora(r=8, lora_alpha=12),
    "rslora": lora(r=9, lora_alpha=4, use_rslora=True),
    "dora": lora(r=8, lora_alpha=12, use_dora=True),
    "rsdora-attention": EXTRA_RECIPES["rsdora-attention"],
    "ia3": RECIPES["ia3"].config,
    "vera": vera(target_modules=["v_proj", "down_proj"]).config,
    "vera-twin": vera(target_modules=["v_proj", "down_proj"]).config,
    "oft": oft(oft_block_size=32).config,
    "oft-shared": oft(oft_block_size=32, block_share=True).config,
}
"""The configurations of the same nine adapters for a base of real size."""


def _tiny_config(name: str, base: str) -> object:
    sites = BASES[base].sites
    recipe = name.partition("-twin")[0]
    return EXTRA_RECIPES[recipe](sites) if recipe in EXTRA_RECIPES else RECIPES[recipe].config(sites)


def prompt_of(seed: int, length: int | None = None) -> tuple[int, ...]:
    """Return random tokens; without a length, it follows from the seed."""
    generator = torch.Generator().manual_seed(seed)
    count = length or 5 + seed % 9
    return tuple(torch.randint(3, 128, (count,), generator=generator).tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The difference between an answer and PEFT's."""

    worst: float
    """The largest difference of a log-probability."""
    greedy: bool
    """Whether every token is the most likely one by PEFT."""

    @property
    def none(self) -> bool:
        """Whether the answer equals PEFT's within `BOUND`."""
        return self.greedy and self.worst <= BOUND


@dataclass(kw_only=True)
class Tenants:
    """The adapters of one base, made once per session in `root`."""

    base: Path
    root: Path
    tiny: str = ""
    """The name of a tiny base; empty for a real one."""
    _models: dict[Path | None, Any] = field(default_factory=dict)

    @cached_property
    def _lora_ids(self) -> dict[tuple[str, str], int]:
        return {}

    def folder(self, name: str) -> Path:
        """Return the folder of an adapter as PEFT saves it."""
        return made_once(self.root / "adapters" / name, lambda folder: self._save(name, folder))

    def _save(self, name: str, folder: Path) -> None:
        seed = sum(name.encode())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT's advice on options that the tests choose on purpose
            config = _tiny_config(name, self.tiny) if self.tiny else REAL[name](Sites())
            model = get_peft_model(self._load(), config)
            draw(model, seed, LARGE_DRAWS if self.tiny else SMALL_DRAWS)
            model.save_pretrained(folder)

    def artifact(self, name: str, *, tp: int = 1, store: str = "store") -> Path:
        """Return the artifact of an adapter for `tp` ranks, compiled in float32."""
        folder = self.root / f"{store}-{tp}"
        if not (folder / name).is_dir():
            self.compiled(self.folder(name), folder, name=name, tp=tp)
        return folder / name

    def compiled(self, folder: Path, store: Path, *, name: str, tp: int = 1) -> Path:
        """Compile an adapter's folder into a store; an artifact of that name is replaced."""
        target = Target(tp=tp, dtype=DType.FLOAT32)
        report = scute.compile(folder, base=self.base, target=target, store=store, name=name)
        assert (store / name / "manifest.json").is_file(), report
        return store / name

    def request(self, path: Path, *, name: str = "", in_place: bool = False) -> Adapter:
        """Return the adapter of a request; equal names and paths get equal ids."""
        key = (name or path.name, str(path))
        lora_id = self._lora_ids.setdefault(key, len(self._lora_ids) + 1)
        return Adapter(name=key[0], lora_id=lora_id, path=key[1], in_place=in_place)

    def row(self, name: str | None, seed: int, *, tp: int = 1) -> Row:
        """Return a request for the artifact of an adapter, or for the base."""
        adapter = None if name is None else self.request(self.artifact(name, tp=tp))
        return Row(prompt=prompt_of(seed), adapter=adapter)

    def _load(self) -> Any:  # noqa: ANN401 - transformers' class, unannotated
        return transformers.AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32).eval()

    def _model(self, name: str | None) -> Callable[..., Any]:
        folder = self.folder(name) if name else None
        if folder not in self._models:
            if not self.tiny:
                self._models.clear()  # each holds the whole base
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._models[folder] = PeftModel.from_pretrained(self._load(), str(folder)) if folder else self._load()
        model: Callable[..., Any] = self._models[folder]
        return model

    def logprobs(self, name: str | None, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> torch.Tensor:
        """Return PEFT's log-probabilities for every new token, `(tokens, vocabulary)`."""
        with torch.no_grad():
            logits = self._model(name)(input_ids=torch.tensor([prompt + tokens])).logits[0]
        logprobs: torch.Tensor = torch.log_softmax(logits.float(), -1)[len(prompt) - 1 : -1]
        return logprobs

    def difference(self, answer: Answer, name: str | None) -> Difference:
        """Compare an answer with PEFT's for the adapter `name`, or for the base."""
        expected = self.logprobs(name, answer.prompt, answer.tokens)
        worst = max(
            abs(logprob - expected[step, token].item())
            for step, by_token in enumerate(answer.logprobs)
            for token, logprob in by_token.items()
        )
        greedy = answer.tokens == tuple(expected.argmax(-1).tolist())
        return Difference(worst=worst if math.isfinite(worst) else math.inf, greedy=greedy)

    def assert_equal(self, answer: Answer, name: str | None) -> None:
        """Assert that the answer equals PEFT's."""
        difference = self.difference(answer, name)
        assert difference.none, (name, difference)

    def assert_served(self, engine: Engine, *names: str | None, seed: int = 0) -> None:
        """Assert that the artifacts of all names, in one batch, are answered as PEFT does; None is the base."""
        answers = engine.generate([self.row(name, seed + place) for place, name in enumerate(names)])
        for name, answer in zip(names, answers, strict=True):
            self.assert_equal(answer, name)
