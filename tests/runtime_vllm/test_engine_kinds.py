"""Engines that run in a way in which the plugin can't serve: adapters are refused, with what to change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from scute_compile.diagnostics import ScuteError
from scute_compile.runtime_vllm.loading import _check_engine, _load

if TYPE_CHECKING:
    from scute_compile.runtime_vllm.adapter_manager import AdapterManager

REQUEST = SimpleNamespace(lora_name="tenant", lora_path="nowhere", lora_int_id=1)


def slots_of(*options: str, splits_steps: bool = False) -> AdapterManager:
    """Return an engine's slots as far as these checks read them; `options` are those of LoRA that are on."""
    names = ("fully_sharded_loras", "enable_tower_connector_lora")
    config = SimpleNamespace(**{name: name in options for name in names})
    return cast(
        "AdapterManager",
        SimpleNamespace(lora_config=config, splits_steps=splits_steps, options=SimpleNamespace(stock_kernels=False)),
    )


@pytest.mark.parametrize("option", ["fully_sharded_loras", "enable_tower_connector_lora"])
def test_compiled_adapters_are_refused_by_engines_with_an_option(option: str) -> None:
    _check_engine(slots_of(), REQUEST)
    with pytest.raises(ScuteError, match=option.replace("_", "[-_]")) as error:
        _check_engine(slots_of(option), REQUEST)
    assert error.value.diagnostics[0].code.name == "SC811"


def test_all_adapters_are_refused_where_steps_are_split() -> None:
    with pytest.raises(ScuteError, match="microbatches") as error:
        _load(lambda *_: None, None, slots_of(splits_steps=True), REQUEST)
    assert error.value.diagnostics[0].code.name == "SC811"
    with pytest.raises(ScuteError, match="microbatches"):  # also where plain folders are left to vLLM's own layers
        _check_engine(slots_of(splits_steps=True), REQUEST)
