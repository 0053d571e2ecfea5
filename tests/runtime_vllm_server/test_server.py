"""vLLM's OpenAI-compatible server with compiled adapters gives PEFT's tokens, and keeps serving after bad adapters."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.runtime_vllm.engine_forks import connected
from tests.runtime_vllm_server.server import Answer, Server, serving
from tests.support.artifact_files import rank_file
from tests.support.served import Compiled, Pair, artifact_of, ids_of, peft_model

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM, in a separate environment")

BASE = "llama-heads-of-32"
AT_START = ("dora", "ia3")
LATER = "oft"
METHODS = (*AT_START, LATER)
TOKENS = 8
IN_MEMORY = 8
"""The server's max_cpu_loras."""
PROMPTS = tuple(tuple(row) for row in ids_of(2, 6, seed=3).tolist())
MARGIN = 1e-3
"""Smallest distance of the best log-probability from the second: ten times the plugin's bound against PEFT."""


@pytest.fixture(scope="module")
def adapters(pair: Pair, shared_folder: Path) -> dict[str, Compiled]:
    """Compiled adapters by method."""
    return {name: artifact_of(name, BASE, pair, shared_folder) for name in METHODS}


@pytest.fixture(scope="module")
def expected(adapters: dict[str, Compiled]) -> dict[str, list[list[int]]]:
    """PEFT's continuation of each prompt, by method and for the base."""
    found = {}
    for name in ("base", *METHODS):
        model = peft_model(BASE, adapters[name if name != "base" else LATER])
        found[name] = [_greedy(model.unload() if name == "base" else model, prompt) for prompt in PROMPTS]
    assert len({str(tokens) for tokens in found.values()}) == len(found)
    return found


@pytest.fixture(scope="module")
def server(
    adapters: dict[str, Compiled], shared_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server that loads two of the adapters when it starts."""
    folder = tmp_path_factory.mktemp("server")
    at_start = {name: adapters[name].artifact for name in AT_START}
    with (
        connected(shared_folder) as forks,
        serving(
            forks,
            adapters[LATER].base,
            at_start,
            folder / "log",
            "--max-loras",
            "4",
            "--max-cpu-loras",
            str(IN_MEMORY),
            "--max-lora-rank",
            "16",
        ) as running,
    ):
        yield running


@pytest.fixture
def scratch(tmp_path: Path, adapters: dict[str, Compiled]) -> Path:
    """A copy of an artifact that a test may damage."""
    store = adapters["dora"].artifact.parent
    shutil.copytree(store, tmp_path / "store")
    return tmp_path / "store" / adapters["dora"].artifact.name


def _greedy(model: torch.nn.Module, prompt: Sequence[int]) -> list[int]:
    ids = torch.tensor([prompt])
    for _ in range(TOKENS):
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=ids).logits[0, -1], -1)
        first, second = logprobs.topk(2).values.tolist()
        assert first - second > MARGIN, "rounding could change the token; choose another prompt"
        ids = torch.cat([ids, logprobs.argmax()[None, None]], 1)
    return ids[0, len(prompt) :].tolist()


def _all(server: Server, names: Sequence[str]) -> dict[str, list[list[int]]]:
    """Complete every prompt with every adapter, all at the same time."""
    requests = tuple(product(names, PROMPTS))
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(lambda request: server.complete(request[0], request[1], TOKENS).tokens, requests))
    return {name: answers[i * len(PROMPTS) : (i + 1) * len(PROMPTS)] for i, name in enumerate(names)}


def _damage(artifact: Path) -> None:
    weights = rank_file(artifact)
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)


def _refused(answer: Answer, *texts: str) -> None:
    assert all(text in answer.error for text in texts), answer.body


def test_three_methods_and_the_base_match_peft_in_one_batch(
    server: Server, adapters: dict[str, Compiled], expected: dict[str, list[list[int]]]
) -> None:
    if LATER not in server.models():
        assert server.load(LATER, adapters[LATER].artifact).status == 200
    assert server.models() == {"base", *METHODS}
    assert _all(server, ("base", *METHODS)) == expected


def test_unloading_one_keeps_the_others_and_it_can_be_loaded_again(
    server: Server, adapters: dict[str, Compiled], expected: dict[str, list[list[int]]]
) -> None:
    kept, unloaded = ("base", "ia3"), "dora"
    assert server.unload(unloaded).status == 200
    assert server.complete(unloaded, PROMPTS[0], TOKENS).status == 404
    assert _all(server, kept) == {name: expected[name] for name in kept}
    assert server.load(unloaded, adapters[unloaded].artifact).status == 200
    assert _all(server, (unloaded, *kept)) == {name: expected[name] for name in (unloaded, *kept)}


def test_a_damaged_artifact_is_refused_with_its_reason_and_the_rest_is_served(
    server: Server, scratch: Path, expected: dict[str, list[list[int]]]
) -> None:
    _damage(scratch)
    _refused(server.load("damaged", scratch), "error[SC603]: a file's hash is wrong", "compile the adapter again")
    assert "damaged" not in server.models()
    assert _all(server, ("base", "ia3")) == {name: expected[name] for name in ("base", "ia3")}


def test_an_artifact_for_another_base_is_refused_with_its_reason(
    server: Server, pair: Pair, shared_folder: Path
) -> None:
    other = artifact_of("dora", "llama", pair, shared_folder)
    _refused(server.load("stranger", other.artifact), "error[SC608]: the artifact is for another base")
    assert "stranger" not in server.models()


def test_a_peft_folder_that_vllm_refuses_is_refused_with_the_command_that_compiles_it(
    server: Server, adapters: dict[str, Compiled]
) -> None:
    _refused(server.load("raw", adapters["dora"].adapter), "vLLM does not yet support DoRA", "scute compile", "--tp 1")


def test_only_a_request_whose_artifact_was_deleted_fails(
    server: Server, scratch: Path, expected: dict[str, list[list[int]]]
) -> None:
    assert server.load("short-lived", scratch).status == 200
    assert server.complete("short-lived", PROMPTS[0], TOKENS).tokens == expected["dora"][0]
    shutil.rmtree(scratch)
    answer = server.complete("short-lived", PROMPTS[0], TOKENS)
    assert answer.status >= 500
    assert "no longer holds the one that was loaded" in server.log.read_text()
    assert server.unload("short-lived").status == 200
    assert _all(server, ("base", "ia3")) == {name: expected[name] for name in ("base", "ia3")}


def test_new_content_under_a_loaded_name_answers_after_it_is_loaded_in_place(
    server: Server, scratch: Path, adapters: dict[str, Compiled], expected: dict[str, list[list[int]]]
) -> None:
    assert server.load("tenant", scratch).status == 200
    assert _all(server, ("tenant",)) == {"tenant": expected["dora"]}
    shutil.rmtree(scratch)
    shutil.copytree(
        adapters["ia3"].artifact, scratch
    )  # the prefix cache holds keys and values of the older content for these prompts
    refused = server.complete("tenant", PROMPTS[0], TOKENS)
    assert refused.status >= 500
    assert server.load("tenant", scratch).status == 400
    assert server.load("tenant", scratch, load_inplace=True).status == 200
    assert _all(server, ("tenant", "dora")) == {"tenant": expected["ia3"], "dora": expected["dora"]}
    assert server.unload("tenant").status == 200


def test_an_adapter_that_was_loaded_in_place_is_not_read_again(
    server: Server, scratch: Path, expected: dict[str, list[list[int]]]
) -> None:
    assert server.load("replaced", scratch).status == 200
    assert server.load("replaced", scratch, load_inplace=True).status == 200
    _damage(scratch)
    assert server.complete("replaced", PROMPTS[0], TOKENS).tokens == expected["dora"][0]
    assert _all(server, ("base", "ia3")) == {name: expected[name] for name in ("base", "ia3")}


def test_only_a_request_whose_evicted_artifact_was_damaged_fails(
    server: Server, scratch: Path, adapters: dict[str, Compiled], expected: dict[str, list[list[int]]]
) -> None:
    assert server.load("evicted", scratch).status == 200
    _damage(scratch)
    for number in range(IN_MEMORY):
        assert server.load(f"newer-{number}", adapters["ia3"].artifact).status == 200
    answer = server.complete("evicted", PROMPTS[0], TOKENS)
    assert answer.status >= 500
    assert "SC603" in server.log.read_text()
    assert _all(server, ("base", "ia3")) == {name: expected[name] for name in ("base", "ia3")}
