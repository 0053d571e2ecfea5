"""Stock vLLM, with the same files, refuses adapters that the plugin serves, and computes wrong base rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime_vllm.adapters_by_method import BOUND, NINE, Tenants, prompt_of
from tests.runtime_vllm.engine import Engine, Engines, RefusedError, Row

FIXED = (0, 33)
"""The release that corrected base rows beside adapters on CPUs; older releases apply the last adapter to them."""


@pytest.fixture(scope="module")
def stock(llama: Tenants, engines: Engines) -> Iterator[Engine]:
    with engines.started("off", llama.base, settings={"VLLM_PLUGINS": "none"}, max_loras=1) as running:
        yield running


@pytest.mark.parametrize("name", NINE)
def test_stock_vllm_refuses_artifacts(name: str, stock: Engine, llama: Tenants) -> None:
    with pytest.raises(RefusedError):
        stock.load(llama.request(llama.artifact(name)))


@pytest.mark.parametrize("name", ["dora", "ia3", "vera", "oft"])
def test_stock_vllm_refuses_all_but_plain_lora(name: str, stock: Engine, llama: Tenants) -> None:
    with pytest.raises(RefusedError):
        stock.load(llama.request(llama.folder(name)))


def test_stock_vllm_serves_plain_lora_and_errs_beside_it(stock: Engine, llama: Tenants) -> None:
    """The error that the plugin corrects occurs, so tests of base rows beside adapters can fail."""
    folder = Row(prompt=prompt_of(1), adapter=llama.request(llama.folder("lora")))
    tuned, base = stock.generate([folder, Row(prompt=prompt_of(2))])
    llama.assert_equal(tuned, "lora")
    version = tuple(int(part) for part in stock.ask("version").split(".")[:2])
    assert (llama.difference(base, None).worst > 100 * BOUND) == (version < FIXED)
