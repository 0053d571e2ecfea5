"""Measures the error of artifacts of every method for SmolLM2-135M, against PEFT.

    PYTHONPATH=. python benchmarks/smollm2_exactness.py --base SMOLLM2_FOLDER [--methods dora,oft] [--tokens 32]

The script creates the adapters with PEFT and draws their learned values away from the identity. Errors are relative:
the mean absolute error of the log-probabilities over the adapter's mean absolute effect, in float32 arithmetic.

The reference for bfloat16 artifacts is PEFT with its folded factors rounded to bfloat16. From PEFT's layers the script
computes what an artifact stores (A; s c B, with s in float64; s - 1; R - I; VeRA's d, e, A and B; AdaLoRA's E in A),
rounds it, and replaces every adapted layer by a plain module for the formula. This code is independent of the compiler.
The same modules measure what each rounding costs in a lightly trained DoRA: that of the factors, and that of s.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel, get_peft_model

from scute_compile.diagnostics import ScuteError
from scute_compile.driver.bases import open_model
from scute_compile.driver.packing import compile_planned
from scute_compile.ir.dtypes import DType
from scute_compile.ir.target import Target
from scute_compile.pipeline import plan
from scute_compile.runtime_min.oracle.verification import verify
from tests.support.adapters import RECIPES, SMALL_DRAWS, Config, adalora, draw, lora, oft, vera
from tests.support.bases import Sites

AIMS = {"float32": 5e-5, "bfloat16": 2.5e-2, "ratio": 1.2, "light": 1e-3}
"""Largest errors: of artifacts by dtype, of bfloat16 artifacts over rounded PEFT, and of the lightly trained DoRA."""
TEXTS = (
    "A compiler rewrites a program until a machine can run it.",
    "The river was low that summer, and the old bridge stood dry.",
    "To make bread you need flour, water, salt and time.",
    "Many adapters share one base model and are served in one batch.",
)

METHODS: Mapping[str, Config] = {
    "lora": lora(r=8, lora_alpha=12),
    "rslora": lora(r=9, lora_alpha=4, use_rslora=True),
    "dora": lora(r=8, lora_alpha=12, use_dora=True),
    "ia3": RECIPES["ia3"].config,
    "vera": vera(r=64, target_modules=["v_proj", "down_proj"]).config,
    "oft": oft(oft_block_size=32).config,
    "adalora": adalora(init_r=8, target_r=4, lora_alpha=24),
}


def load(base: Path) -> torch.nn.Module:
    """Load the base in float32, with eager attention."""
    kind: Any = transformers.AutoModelForCausalLM
    model: torch.nn.Module = kind.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval()
    return model


def write_adapter(method: str, base: Path, folder: Path) -> Path:
    """Write an adapter as PEFT saves it."""
    model = get_peft_model(load(base), METHODS[method](Sites()))
    draw(model, 7, SMALL_DRAWS)
    model.save_pretrained(folder)
    return folder


def train_adapter(base: Path, folder: Path, *, steps: int, rate: float) -> Path:
    """Train a DoRA adapter on `TEXTS` for some steps of AdamW, and save it."""
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    model = get_peft_model(load(base), METHODS["dora"](Sites())).train()
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=rate)
    for step in range(steps):
        ids = tokenizer(TEXTS[step % len(TEXTS)], return_tensors="pt").input_ids
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """The values that an artifact stores for a layer, unrounded; A is `(rank, in)` and B `(rank, out)`."""

    delta: torch.Tensor | None = None
    """R - I, `(in, in)` or a diagonal `(in,)`."""
    ds: torch.Tensor | None = None
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    d: torch.Tensor | None = None
    e: torch.Tensor | None = None

    def each(self, change: Callable[[torch.Tensor], torch.Tensor], *names: str) -> Folded:
        """Return a copy with `change` applied to the slots in `names`; to all slots if there are no names."""
        slots = {name: getattr(self, name) for name in names or self.__slots__}
        return replace(self, **{name: change(value) for name, value in slots.items() if value is not None})


def folded(layer: Any) -> Folded:  # noqa: ANN401 - PEFT does not annotate its layers
    """Fold one PEFT layer, in float64."""
    if hasattr(layer, "oft_R"):
        eye = torch.eye(layer.in_features)
        return Folded(delta=layer.oft_R["default"](eye).double() - eye)
    if hasattr(layer, "ia3_l"):
        difference = layer.ia3_l["default"].double().flatten() - 1
        return Folded(delta=difference) if layer.is_feedforward else Folded(ds=difference)
    if hasattr(layer, "vera_lambda_d"):
        a, b = layer.vera_A["default"][:, : layer.in_features], layer.vera_B["default"][: layer.out_features].T
        d, e = layer.vera_lambda_d["default"], layer.vera_lambda_b["default"]
        return Folded(a=a.double(), b=b.double(), d=d.double(), e=e.double())
    scaling = layer.scaling["default"]
    if "default" in getattr(layer, "lora_E", {}):
        a = layer.lora_A["default"].double() * layer.lora_E["default"].double()
        return Folded(a=a, b=layer.lora_B["default"].double().T * scaling / (layer.ranknum["default"].item() + 1e-5))
    a, b = layer.lora_A["default"].weight.double(), scaling * layer.lora_B["default"].weight.double().T
    if "default" not in layer.lora_magnitude_vector:
        return Folded(a=a, b=b)
    norms = (layer.get_base_layer().weight.double() + b.T @ a).norm(dim=1)
    s = layer.lora_magnitude_vector["default"].weight.double() / norms
    return Folded(a=a, b=b * s, ds=s - 1)


class Formula(torch.nn.Module):
    """A layer computed by the formula in float32: `y + y ds + (((x A) d) B) e`, with `y` from `x + x (R - I)`."""

    def __init__(self, layer: torch.nn.Linear, slots: Folded) -> None:
        super().__init__()
        self.layer, self.slots = layer, slots.each(torch.Tensor.float)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `(..., out)` for `x` of `(..., in)`."""
        slots = self.slots
        rotated = x
        if slots.delta is not None:
            rotated = x + (x * slots.delta if slots.delta.ndim == 1 else x @ slots.delta)
        y: torch.Tensor = self.layer(rotated)
        if slots.ds is not None:
            y = y + y * slots.ds
        if slots.a is not None and slots.b is not None:
            inner = x @ slots.a.T if slots.d is None else x @ slots.a.T * slots.d
            y = y + (inner @ slots.b if slots.e is None else inner @ slots.b * slots.e)
        return y


def bf16(values: torch.Tensor) -> torch.Tensor:
    """Round to bfloat16."""
    return values.bfloat16().to(values.dtype)


class Oracle:
    """PEFT's log-probabilities for an adapter, and the errors of the formula with changed slots."""

    def __init__(self, base: Path, adapter: Path, tokens: int) -> None:
        self.base = base
        generator = torch.Generator().manual_seed(0)
        model = load(base)
        config: Any = model.config
        self.ids = torch.randint(0, config.vocab_size, (4, max(2, -(-tokens // 4))), generator=generator)
        base_logprobs = self.run(model)
        wrapped = PeftModel.from_pretrained(model, adapter).eval()
        self.expected = self.run(wrapped)
        self.effect = (self.expected - base_logprobs).abs().mean().item()
        with torch.no_grad():
            self.slots = dict(_adapted(wrapped))

    def run(self, model: torch.nn.Module) -> torch.Tensor:
        """Return the log-probabilities, `(4, tokens / 4, vocabulary)`."""
        with torch.no_grad():
            return torch.log_softmax(model(input_ids=self.ids).logits, -1)

    def error(self, change: Callable[[Folded], Folded]) -> float:
        """Return the relative error of the formula with `change` applied to the slots of every layer."""
        model = load(self.base)
        for name, slots in self.slots.items():
            parent, _, last = name.rpartition(".")
            layer = model.get_submodule(name)
            if not isinstance(layer, torch.nn.Linear):
                raise TypeError(name)
            setattr(model.get_submodule(parent), last, Formula(layer, change(slots)))
        return (self.run(model) - self.expected).abs().mean().item() / self.effect


def _adapted(wrapped: torch.nn.Module) -> Iterator[tuple[str, Folded]]:
    for name, layer in wrapped.named_modules():
        if hasattr(layer, "get_base_layer"):
            yield name.removeprefix("base_model.model."), folded(layer)


def compile_as(adapter: Path, base: Path, store: Path, tp: int, dtype: str) -> Path:
    """Compile an adapter and return the artifact's folder.

    Raises:
        ScuteError: The adapter is refused.
    """
    opened = open_model(str(base), weights=True)
    planned = plan(str(adapter), opened, Target(tp=tp, dtype=DType(dtype)), name=f"{adapter.name}-tp{tp}-{dtype}")
    if planned.refused:
        raise ScuteError(planned.findings)
    (result,) = compile_planned((planned,), opened, store, lambda *_: None)
    if not isinstance(result, Path):
        raise result
    return result


def verified(artifact: Path, adapter: Path, base: Path, tokens: int) -> float:
    """Return the relative error that `scute verify` reports."""
    result = verify(artifact, adapter, base, tokens=tokens)
    if result.relative_error is None:
        raise AssertionError(result)
    return result.relative_error


def measure(method: str, base: Path, work: Path, tokens: int) -> dict[str, object]:
    """Return the relative errors of a method's artifacts, by dtype and number of ranks."""
    adapter = write_adapter(method, base, work / method)
    oracle = Oracle(base, adapter, tokens)
    row: dict[str, object] = {"method": method, "effect": oracle.effect}
    row["PEFT rounded"] = rounded = oracle.error(lambda slots: slots.each(bf16))
    for dtype in ("float32", "bfloat16"):
        for tp in (1, 3):
            artifact = compile_as(adapter, base, work / "store", tp, dtype)
            row[f"{dtype} tp {tp}"] = error = verified(artifact, adapter, base, tokens)
            if dtype == "bfloat16":
                row[f"ratio tp {tp}"] = error / rounded
    return row


def measure_light(base: Path, work: Path, tokens: int, steps: int, rate: float) -> dict[str, object]:
    """Return the relative errors of a lightly trained DoRA: of its artifacts, and of each rounding alone."""
    adapter = train_adapter(base, work / "light", steps=steps, rate=rate)
    oracle = Oracle(base, adapter, tokens)
    spread = torch.cat([slots.ds for slots in oracle.slots.values() if slots.ds is not None])
    kinds: dict[str, Callable[[Folded], Folded]] = {
        "nothing rounded": lambda slots: slots,
        "ds in bfloat16": lambda slots: slots.each(bf16, "ds"),
        "A and B in bfloat16": lambda slots: slots.each(bf16, "a", "b"),
        "A, B and ds in bfloat16": lambda slots: slots.each(bf16),
        "s in bfloat16, A and B not": lambda slots: slots.each(lambda ds: bf16(1 + ds) - 1, "ds"),
        "s dropped": lambda slots: slots.each(torch.zeros_like, "ds"),
    }
    row: dict[str, object] = {
        "rate": rate,
        "steps": steps,
        "effect": oracle.effect,
        "ds root mean square": spread.square().mean().sqrt().item(),
        "ds largest": spread.abs().max().item(),
    }
    row |= {name: oracle.error(change) for name, change in kinds.items()}
    for dtype in ("bfloat16", "float32"):
        artifact = compile_as(adapter, base, work / "store", 1, dtype)
        row[f"artifact in {dtype}"] = verified(artifact, adapter, base, tokens)
    return row


def refusal(method: str, base: Path, work: Path) -> dict[str, str]:
    """Return the diagnostic that refuses two ranks: they do not divide the 9 heads and 3 key and value heads."""
    try:
        compile_as(work / method, base, work / "store", 2, "float32")
    except ScuteError as error:
        return error.diagnostics[0].to_json()
    raise AssertionError(method)


def main() -> None:
    """Measure, and print each row as a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="the folder of SmolLM2-135M")
    parser.add_argument("--methods", default=",".join(METHODS), help="methods to measure, separated by commas")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of all four rows together")
    parser.add_argument(
        "--rates", default="1e-4,3e-4", help="learning rates of the lightly trained DoRA, separated by commas"
    )
    parser.add_argument("--steps", type=int, default=25, help="its training steps")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    work = Path(tempfile.mkdtemp(prefix="smollm2-exactness-"))
    try:
        print(json.dumps({"aims": AIMS}))
        methods = [method for method in options.methods.split(",") if method]
        for method in methods:
            print(json.dumps(measure(method, options.base, work, options.tokens)), flush=True)
        if methods:
            print(json.dumps(refusal(methods[0], options.base, work)), flush=True)
        for rate in filter(None, options.rates.split(",")):
            print(json.dumps(measure_light(options.base, work, options.tokens, options.steps, float(rate))), flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
