"""`scute run`: prompts for several adapters in one batch."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from scute_compile.cli.run.rendering import block, streaming
from scute_compile.cli.run.request import parse_request
from scute_compile.diagnostics import Code, ScuteError
from scute_compile.runtime_min.model import continuation
from tests.support.bases import load_base
from tests.support.commands import Ran, scute
from tests.support.served import Compiled, Pair, artifact_of, peft_model

WORDS = [f"w{number}" for number in range(128)]
END = 2


@pytest.fixture(scope="module")
def base(base_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with a tokenizer whose token n is the word `wn`."""
    folder = Path(shutil.copytree(base_folder("llama"), tmp_path_factory.mktemp("run") / "base"))
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=WORDS[0], eos_token=f"w{END}").save_pretrained(folder)
    return folder


@pytest.fixture
def made(pair: Pair, shared_folder: Path) -> Callable[[str], Compiled]:
    """Return a compiled adapter by recipe."""
    return lambda recipe: artifact_of(recipe, "llama", pair, shared_folder)


def tokens_of(text: str) -> list[int]:
    return [int(word[1:]) for word in text.split()]


def expected(model: Any, prompt: str, count: int) -> list[int]:  # noqa: ANN401 - a class of PEFT or transformers
    """Return the greedy continuation, up to the end token."""
    ids = torch.tensor([tokens_of(prompt)])
    out: list[int] = model.generate(ids, do_sample=False, max_new_tokens=count, pad_token_id=0)[
        0, ids.shape[1] :
    ].tolist()
    return out[: out.index(END)] if END in out else out


PROMPTS = {"lora": "w5 w6 w7", "oft": "w9", "base": "w30 w31 w32 w33 w34"}


def test_prompts_of_several_adapters_are_continued_in_one_batch(base: Path, made: Callable[[str], Compiled]) -> None:
    chosen = {name: made(name) for name in ("lora", "oft")}
    adapters = [word for name, item in chosen.items() for word in ("--adapter", f"{name}={item.artifact}")]
    asked = [
        "--prompt",
        f"lora:{PROMPTS['lora']}",
        "--prompt",
        f"oft:{PROMPTS['oft']}",
        "--prompt",
        f":{PROMPTS['base']}",
    ]
    arguments = ["run", "--base", base, *adapters, *asked, "--max-new-tokens", 6]
    ran = scute(*arguments, "--json")
    assert ran.code == 0, ran.err
    assert [row["adapter"] for row in ran.answer["rows"]] == ["lora", "oft", None]
    models = {name: peft_model("llama", item).base_model.model for name, item in chosen.items()}
    models["base"] = load_base("llama", base)
    for row in ran.answer["rows"]:
        name = row["adapter"] or "base"
        assert row["prompt"] == PROMPTS[name]
        assert row["tokens"] == expected(models[name], PROMPTS[name], 6)
        assert tokens_of(row["text"]) == [token for token in row["tokens"] if token]
    plain = scute(*arguments)
    assert plain.code == 0
    assert plain.out.splitlines() == [f"{row['adapter'] or 'base'}> {row['text']}" for row in ran.answer["rows"]]


def refused(ran: Ran, code: str, *says: str) -> None:
    assert ran.code in {1, 2}
    assert ran.out == ""
    assert code in ran.err
    for words in says:
        assert words in ran.err


def test_a_base_without_a_tokenizer_is_named(base_folder: Callable[[str], Path]) -> None:
    folder = base_folder("llama")
    refused(scute("run", "--base", folder, "--prompt", ":w5"), "SC107", "no tokenizer", str(folder))


def test_a_prompt_for_an_unknown_adapter_is_named(base: Path) -> None:
    ran = scute("run", "--base", base, "--prompt", "unknown:w5", "--prompt", "noform", "--adapter", "half=")
    refused(ran, "SC802", "unknown", "SC703", "noform", "half=")


def test_a_colon_in_a_prompt_without_a_name_leads_to_the_right_form() -> None:
    with pytest.raises(ScuteError) as caught:
        parse_request(["store/dora"], ["Question: what?"])
    form, name = caught.value.diagnostics
    assert (form.code, name.code) == (Code.SC703, Code.SC802)
    assert "begin with `:`" in name.next
    assert "store/dora" not in name.expected


def test_a_full_device_is_named(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:  # a real allocation would exhaust the host
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(continuation, "load_model", full)
    refused(scute("run", "--base", base, "--prompt", ":w5"), "SC814", "Tried to allocate 20.00 GiB")


def test_a_prompt_that_is_too_long_is_refused(base: Path) -> None:
    refused(scute("run", "--base", base, "--prompt", ":" + "w5 " * 60), "SC703", "124 tokens", "at most 64")


def test_an_artifact_for_another_base_is_refused(base: Path, pair: Pair, shared_folder: Path) -> None:
    other = artifact_of("lora", "gpt2", pair, shared_folder)
    ran = scute("run", "--base", base, "--adapter", f"x={other.artifact}", "--prompt", "x:w5")
    refused(ran, "SC608", "structure hash")


def test_an_artifact_for_other_ranks_is_refused(base: Path, pair: Pair, shared_folder: Path) -> None:
    cut = artifact_of("lora", "llama", pair, shared_folder, tp=2)
    refused(
        scute("run", "--base", base, "--adapter", f"x={cut.artifact}", "--prompt", "x:w5", "--max-new-tokens", 4),
        "SC801",
        "tp 2",
    )


def test_names_are_cut_at_the_first_colon_and_equals_sign() -> None:
    request = parse_request(["a=b=c"], ["a:x: y", "base:z", ":w"])
    assert request.adapters == (("a", "b=c"),)
    assert [(prompt.adapter, prompt.text) for prompt in request.prompts] == [("a", "x: y"), (None, "z"), (None, "w")]


def test_a_terminal_shows_every_row_as_it_grows() -> None:
    screen = StringIO()
    console = Console(file=screen, force_terminal=True, width=60)
    prompts = parse_request(["a=store/a"], ["a:x", ":y"]).prompts
    with streaming(console, prompts, live=True) as show:
        show(["one", "un"])
        show(["one two\x1b[31m", "un deux"])
    assert "a> one two\\x1b[31m" in screen.getvalue()
    assert "base> un deux" in screen.getvalue()
    assert block("a", "one\ntwo") == "a> one\n   two"


def changed(base: Path, tmp_path: Path, file: str, **fields: object) -> Path:
    """Copy the base and change fields in one of its JSON files."""
    folder = Path(shutil.copytree(base, tmp_path / "changed"))
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return folder


ASKS: dict[str, dict[str, object]] = {
    "beams": {"num_beams": 3},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "a penalty": {"repetition_penalty": 5.0},
    "stop strings": {"stop_strings": ["w9"]},
    "an assistant": {"prompt_lookup_num_tokens": 3},
    "guidance": {"guidance_scale": 2.0},
    "no cache": {"use_cache": False},
    "an end that is no token": {"eos_token_id": 10**9},
}


@pytest.mark.parametrize("what", ASKS)
def test_tokens_are_greedy_whatever_the_base_asks_for(
    what: str, base: Path, made: Callable[[str], Compiled], tmp_path: Path
) -> None:
    lora = made("lora")
    folder = changed(base, tmp_path, "generation_config.json", **ASKS[what])
    ran = scute(
        "run",
        "--base",
        folder,
        "--adapter",
        f"lora={lora.artifact}",
        "--prompt",
        f"lora:{PROMPTS['lora']}",
        "--prompt",
        f":{PROMPTS['base']}",
        "--max-new-tokens",
        6,
        "--json",
    )
    assert ran.code == 0, ran.err
    models = (peft_model("llama", lora).base_model.model, load_base("llama", base))
    for row, model in zip(ran.answer["rows"], models, strict=True):
        assert row["tokens"] == expected(model, row["prompt"], 6)


def test_a_tokenizer_of_another_model_is_named(base: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(base, tmp_path / "other"))
    file = folder / "tokenizer.json"
    file.write_text(re.sub(r'"w5": *5\b', '"w5": 5000', file.read_text()))
    refused(scute("run", "--base", folder, "--prompt", ":w5"), "SC703", "token 5000", "below 128")


@pytest.mark.parametrize("head", ["LlamaForSequenceClassification", "LlamaModel"])
def test_a_base_that_generates_no_text_is_refused(head: str, base: Path, tmp_path: Path) -> None:
    folder = changed(base, tmp_path, "config.json", architectures=[head])
    refused(scute("run", "--base", folder, "--prompt", ":w5"), "SC402", head)


def test_a_prompt_that_is_not_text_is_refused(base: Path) -> None:
    refused(scute("run", "--base", base, "--prompt", ":w5 \udcff"), "SC703", "not UTF-8")


def test_all_faulty_artifacts_are_named_with_their_adapters(
    base: Path, made: Callable[[str], Compiled], pair: Pair, shared_folder: Path, tmp_path: Path
) -> None:
    absent, zero = tmp_path / "absent", "a\0b"
    given = {"first": absent, "second": zero, "third": made("lora").artifact}
    adapters = [word for name, path in given.items() for word in ("--adapter", f"{name}={path}")]
    ran = scute("run", "--base", base, *adapters, "--prompt", "third:w5")
    refused(ran, "SC601", f"first: {absent}", "second: a\\x00b")
    assert "third" not in ran.err
    other = artifact_of("lora", "gpt2", pair, shared_folder).artifact
    ran = scute("run", "--base", base, "--adapter", f"other={other}", "--prompt", "other:w5")
    refused(ran, "SC608", "other: lora")
