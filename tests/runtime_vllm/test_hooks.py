"""The table of hooks: the installed vLLM has every row, and a row that it lacks is named and stops the installation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scute_compile.runtime_vllm.hooks import GRAPH_HOOKS, HOOKS, LOGITS_SKIPPED, Hook
from tests.runtime_vllm.adapters_by_method import Tenants
from tests.runtime_vllm.engine import Engine, Engines

ROWS = {f"{hook.owner}.{hook.name}": hook for hook in (*HOOKS, *GRAPH_HOOKS)}
REPLACED = {f"{hook.owner}.{hook.name}" for hook in HOOKS if hook.replacement is not None}
MANAGER = "vllm.lora.model_manager:LRUCacheLoRAModelManager"
PLANTED = {
    "an attribute that is missing": (
        Hook("vllm.v1.engine.core:EngineCore", "add_lora_later"),
        "no EngineCore.add_lora_later",
    ),
    "a class that is missing": (Hook("vllm.v1.engine.core:Engine", "add_lora"), "no Engine.add_lora"),
    "a module that is missing": (Hook("vllm.v2.engine", "add_lora"), "no vllm.v2.engine.add_lora"),
    "other parameters": (
        Hook(MANAGER, "activate_adapter", ("self", "lora_id", "device")),
        "LRUCacheLoRAModelManager.activate_adapter takes (self, lora_id), expected (self, lora_id, device)",
    ),
}


@pytest.fixture(scope="module")
def stock(llama: Tenants, engines: Engines) -> Iterator[Engine]:
    """An engine without the plugin, whose vLLM is as it was installed."""
    with engines.started("hooks", llama.base, settings={"VLLM_PLUGINS": "none"}) as running:
        yield running


def test_rows_differ() -> None:
    assert len(ROWS) == len(HOOKS) + len(GRAPH_HOOKS)


@pytest.mark.parametrize("name", ROWS)
def test_the_installed_vllm_has_each_row(name: str, stock: Engine) -> None:
    assert stock.hook_faults()[name] is None


@pytest.mark.parametrize("what", PLANTED)
def test_a_row_that_differs_is_reported_by_name_and_nothing_is_installed(what: str, stock: Engine) -> None:
    hook, fault = PLANTED[what]
    missing, replaced = stock.install_hooks(hook)
    assert missing == [fault]
    assert replaced == set()


def test_a_feature_whose_row_differs_is_left_out_as_a_whole(stock: Engine) -> None:
    """This test is the last in the file, because it installs the other rows in the engine's process."""
    planted = Hook("vllm.lora.utils:LogitsProcessorWithLoRA", "set_weights", feature=LOGITS_SKIPPED)
    missing, replaced = stock.install_hooks(planted)
    assert missing == []
    guarded = {name for name, hook in ROWS.items() if hook.owner == "vllm.lora.ops.torch_ops.lora_ops"}
    left_out = {name for name, hook in ROWS.items() if hook.feature == LOGITS_SKIPPED}
    assert replaced - guarded == REPLACED - left_out - guarded
    assert replaced & guarded in (set(), guarded)  # vLLM 0.33 and newer need no guard
