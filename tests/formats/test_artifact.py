"""Opening artifacts: every fault of a manifest or a file is refused under its code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from safetensors.torch import load_file, save_file

from scute_compile.diagnostics import Diagnostic, ScuteError
from scute_compile.formats.artifact import Artifact, is_artifact, open_artifact
from scute_compile.formats.artifact_tensors import load_factor, load_rank
from scute_compile.formats.manifest import manifest_digest, schema_text
from tests.support.artifacts import Written, rewrite_manifest, write_artifact

Json = Any  # a manifest as a test edits it
SCHEMA = Path(__file__).parents[2] / "formats" / "manifest.schema.json"


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


UP = Written(
    name="layers.0.up",
    in_features=12,
    out_features=16,
    slots={
        "dR": drawn(3, 4, 4),
        "ds": drawn(16),
        "b": drawn(16),
        "A0": drawn(5, 20),
        "B0": drawn(5, 16),
        "d0": drawn(5),
        "e0": drawn(16),
    },
    shared=frozenset({"A0"}),
)
DOWN = Written(
    name="layers.0.down", in_features=16, out_features=12, slots={"dR": drawn(16), "b": drawn(12)}, split="row"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_artifact(tmp_path / "store", (UP, DOWN), tp=2)


def refused(folder: Path) -> Diagnostic:
    with pytest.raises(ScuteError) as caught:
        open_artifact(folder)
    return caught.value.diagnostics[0]


def edited(folder: Path, change: Callable[[Json], None]) -> Diagnostic:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    rewrite_manifest(folder, manifest)
    return refused(folder)


def rank_file(folder: Path) -> Path:
    return next(folder.glob("rank-00001-of-00002.*.safetensors"))


def factor_file(folder: Path) -> Path:
    return next((folder.parent / "factors").iterdir())


def test_a_good_artifact_opens_and_its_tensors_load(folder: Path) -> None:
    artifact: Artifact = open_artifact(folder)
    second = load_rank(artifact, 1)
    window = artifact.sites[UP.name].terms[0].a
    assert window is not None
    assert torch.equal(load_factor(artifact, window.factor), UP.slots["A0"])
    assert torch.equal(second[f"{UP.name}.ds"], UP.slots["ds"][8:])
    assert torch.equal(second[f"{DOWN.name}.dR"], DOWN.slots["dR"][8:])
    assert torch.equal(second[f"{DOWN.name}.b"], DOWN.slots["b"])


def test_a_folder_without_a_manifest_is_no_artifact(tmp_path: Path) -> None:
    assert not is_artifact(tmp_path)
    assert refused(tmp_path).code.name == "SC601"


def test_a_manifest_that_is_no_json_is_no_artifact(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"schema_version": ')
    assert refused(folder).code.name == "SC601"


def test_a_deeply_nested_manifest_is_no_artifact(folder: Path) -> None:
    (folder / "manifest.json").write_text("[" * 100_000)
    assert refused(folder).code.name == "SC601"


def test_an_unknown_major_version_is_refused_before_the_other_fields_are_read(folder: Path) -> None:
    text = '{"format": "scute.artifact", "schema_version": "3.0", "sites": "elsewhere"}'
    (folder / "manifest.json").write_text(text)
    diagnostic = refused(folder)
    assert diagnostic.code.name == "SC602"
    assert "3.0" in diagnostic.found


def test_a_manifest_of_another_program_is_no_artifact(folder: Path) -> None:
    for text in ('{"schema_version": "2.0"}', '{"format": "other", "schema_version": "2.0"}'):
        (folder / "manifest.json").write_text(text)
        diagnostic = refused(folder)
        assert diagnostic.code.name == "SC601"
        assert "the format" in diagnostic.found


def test_a_newer_minor_version_opens_unless_it_has_new_fields(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    rewrite_manifest(folder, {**{k: v for k, v in manifest.items() if k != "digest"}, "schema_version": "2.7"})
    assert open_artifact(folder).manifest.schema_version == "2.7"
    diagnostic = edited(folder, lambda manifest: manifest.update(future=1))
    assert diagnostic.code.name == "SC602"
    assert "newer minor" in diagnostic.found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update(future=1), "future"),
        (lambda m: m.pop("notes"), "notes"),
        (lambda m: m.update(tp="2"), "tp"),
        (lambda m: m.update(tp=3), "2 rank files"),
        (lambda m: m.update(method="boft"), "method"),
        (lambda m: m["sites"].append(m["sites"][0]), "listed twice"),
        (lambda m: m["sites"][0]["inputs"].pop(), "1 input and 2 output cuts"),
        (lambda m: m["sites"][0].update(outputs=[[[0, 8]], [[9, 16]]]), "don't hold the whole output"),
        (lambda m: m["sites"][0].update(outputs=[[[0, 8]], [[8, 17]]]), "beyond 16"),
        (lambda m: m["sites"][0].update(outputs=[[[0, 8], [4, 8]], [[8, 16]]]), "overlap"),
        (lambda m: m["sites"][0].update(inputs=[[[0, 4]], [[4, 12]]]), "input of `layers.0.up` is cut"),
        (lambda m: m["sites"][1].update(inputs=[[[0, 9]], [[8, 16]]]), "twice"),
        (lambda m: m["sites"][1].update(shift_rank=2), "rank 2 can't add"),
        (lambda m: m["sites"][1].update(shift_rank=-1), "rank -1 can't add"),
        (lambda m: m["sites"][0].update(shift_rank=0), "rank 0 can't add"),
        (lambda m: m["sites"][0]["rotation"].update(block=5), "3 blocks of 5"),
        (lambda m: m["sites"][0].update(rotation={"kind": "diagonal", "block": 2, "blocks": 6}), "6 blocks of 2"),
        (lambda m: m["sites"][0].update(split="unknown", outputs=2 * [[[0, 16]]]), "unknown for 2 ranks"),
        (lambda m: m["sites"][1].update(rotation={"kind": "blocks", "block": 16, "blocks": 1}), "across a cut"),
        (lambda m: m["sites"][0]["terms"][0]["a"].update(features=11), "11 features of 12"),
        (lambda m: m["sites"][0]["terms"][0].update(rank=4), "5x20"),
        (lambda m: m["factors"].clear(), "doesn't list"),
        (lambda m: m["factors"][0].update(hash="../../outside"), "factors.0.hash"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    folder: Path, change: Callable[[Json], None], words: str
) -> None:
    diagnostic = edited(folder, change)
    assert diagnostic.code.name == "SC601"
    assert words in diagnostic.found


def test_every_rank_adds_the_shift_of_a_replicated_site(tmp_path: Path) -> None:
    site = Written(name="layers.0.gate", in_features=4, out_features=2, slots={"b": drawn(2)}, split="replicated")
    artifact = open_artifact(write_artifact(tmp_path, [site], tp=2))
    assert artifact.sites[site.name].shift_rank == -1
    assert all(torch.equal(load_rank(artifact, rank)[f"{site.name}.b"], site.slots["b"]) for rank in range(2))

    def on_one_rank(manifest: Json) -> None:
        manifest["sites"][0]["shift_rank"] = 0

    diagnostic = refused(write_artifact(tmp_path, [site], name="other", tp=2, change=on_one_rank))
    assert "rank 0 can't add" in diagnostic.found


def test_a_changed_manifest_no_longer_has_its_digest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"tenant"', '"tenent"'))
    assert refused(folder).code.name == "SC603"


@pytest.mark.parametrize("name", ["../other/rank.safetensors", "/etc/passwd", "..", "a\\b", "", "rank.safetensors"])
def test_a_file_name_that_the_content_does_not_give_is_refused(folder: Path, name: str) -> None:
    assert edited(folder, lambda manifest: manifest["ranks"][0].update(file=name)).code.name == "SC604"


def test_symbolic_links_are_refused(folder: Path, tmp_path: Path) -> None:
    for path in (rank_file(folder), factor_file(folder), folder.parent / "factors", folder / "manifest.json"):
        outside = tmp_path / "outside"
        path.rename(outside)
        path.symlink_to(outside)
        assert refused(folder).code.name == "SC604"
        path.unlink()
        outside.rename(path)
    open_artifact(folder)


def test_a_truncated_rank_file_is_refused_without_hashing(folder: Path) -> None:
    rank_file(folder).write_bytes(rank_file(folder).read_bytes()[:-4])
    with pytest.raises(ScuteError) as caught:
        open_artifact(folder, verify_hashes=False)
    assert caught.value.diagnostics[0].code.name == "SC603"


def test_one_flipped_bit_of_a_rank_file_changes_its_hash(folder: Path) -> None:
    raw = bytearray(rank_file(folder).read_bytes())
    raw[-1] ^= 1
    rank_file(folder).write_bytes(raw)
    assert refused(folder).code.name == "SC603"
    open_artifact(folder, verify_hashes=False)


def test_missing_files_of_all_ranks_are_reported_together(folder: Path) -> None:
    for path in folder.glob("rank-*"):
        path.unlink()
    with pytest.raises(ScuteError) as caught:
        open_artifact(folder)
    assert [d.code.name for d in caught.value.diagnostics] == ["SC603", "SC603"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("layers.0.up.ds"), "no `layers.0.up.ds`"),
        (lambda t: t.update(extra=torch.zeros(2)), "an unknown `extra`"),
        (lambda t: t.update({"layers.0.up.ds": torch.zeros(9)}), "F32 [9], not F32 [8]"),
        (lambda t: t.update({"layers.0.up.b": torch.zeros(8, dtype=torch.bfloat16)}), "BF16 [8], not F32 [8]"),
    ],
)
def test_tensors_that_differ_from_the_manifest_are_refused(
    folder: Path, change: Callable[[dict[str, torch.Tensor]], None], words: str
) -> None:
    tensors = load_file(rank_file(folder))
    change(tensors)
    save_file(tensors, rank_file(folder))
    size = rank_file(folder).stat().st_size
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["ranks"][1]["bytes"] = size
    rewrite_manifest(folder, {k: v for k, v in manifest.items() if k != "digest"})
    with pytest.raises(ScuteError) as caught:
        open_artifact(folder, verify_hashes=False)
    assert caught.value.diagnostics[0].code.name == "SC605"
    assert words in caught.value.diagnostics[0].found


def test_a_shared_factor_must_be_in_the_store_with_its_shape_and_its_bytes(folder: Path) -> None:
    path = factor_file(folder)
    factor = load_file(path)["factor"]
    for wrong in (factor[:, :-1].contiguous(), factor * 1.5):
        save_file({"factor": wrong}, path)
        assert refused(folder).code.name == "SC606"
    shutil.rmtree(path.parent)
    assert refused(folder).code.name == "SC606"


def test_the_digest_depends_on_every_field_but_itself() -> None:
    first = manifest_digest({"a": 1, "b": [1, 2.5]})
    assert first == manifest_digest({"b": [1, 2.5], "a": 1, "digest": "anything"})
    assert first != manifest_digest({"a": 1, "b": [1, 2.0]})


def test_the_json_schema_is_current_and_accepts_a_good_manifest(folder: Path) -> None:
    assert SCHEMA.read_text() == schema_text()
    schema = json.loads(SCHEMA.read_text())
    manifest = json.loads((folder / "manifest.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(manifest)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate({**manifest, "future": 1})
