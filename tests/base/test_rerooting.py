"""Re-rooting: the only change of the prefix that makes all paths match, or none."""

from __future__ import annotations

from scute_compile.base.rerooting import Rerooting, Unrooted, reroot

LAYERS = tuple(f"model.layers.{i}.self_attn.{p}_proj" for i in range(3) for p in "qkvo")


def rerooted(paths: tuple[str, ...], known: tuple[str, ...]) -> Rerooting:
    found = reroot(paths, known)
    assert isinstance(found, Rerooting)
    return found


def unrooted(paths: tuple[str, ...], known: tuple[str, ...]) -> Unrooted:
    found = reroot(paths, known)
    assert isinstance(found, Unrooted)
    return found


def test_paths_that_match_are_kept_even_when_another_root_fits_too() -> None:
    inner = tuple("vision." + name for name in LAYERS)
    assert rerooted(LAYERS[:4], LAYERS + inner).identity


def test_a_doubled_prefix_is_dropped() -> None:
    found = rerooted(tuple("base_model.model." + name for name in LAYERS), LAYERS)
    assert (found.dropped, found.added) == ("base_model.model", "")
    assert tuple(found.mapping.values()) == LAYERS


def test_a_missing_prefix_is_added() -> None:
    found = rerooted(tuple(name.removeprefix("model.") for name in LAYERS), LAYERS)
    assert (found.dropped, found.added) == ("", "model")


def test_a_text_model_is_found_inside_a_multimodal_one() -> None:
    known = tuple(name.replace("model.", "model.language_model.") for name in LAYERS)
    found = rerooted(LAYERS, (*known, "model.vision_tower.layers.0.attention.q_proj"))
    assert (found.dropped, found.added) == ("model", "model.language_model")


def test_one_path_that_does_not_fit_refuses_all() -> None:
    paths = (*("module." + name for name in LAYERS), "module.model.layers.9.self_attn.q_proj")
    assert not unrooted(paths, LAYERS).ambiguous


def test_two_roots_that_fit_are_ambiguous() -> None:
    known = tuple(f"{side}.{name}" for side in ("encoder", "decoder") for name in LAYERS)
    found = unrooted(LAYERS, known)
    assert set(found.candidates) == {("", "encoder"), ("", "decoder")}
    assert "`` -> `decoder`" in found.reason


def test_numbers_are_neither_dropped_nor_added() -> None:
    assert not unrooted(("towers.1.layers.0.q_proj",), ("layers.0.q_proj",)).ambiguous
    assert not unrooted(("layers.0.q_proj",), ("towers.1.layers.0.q_proj",)).ambiguous


def test_another_name_of_the_layers_is_not_a_prefix() -> None:
    assert not unrooted(tuple(name.replace("layers", "blocks") for name in LAYERS), LAYERS).ambiguous


def test_a_path_without_numbers_keeps_its_last_segment() -> None:
    assert rerooted(("wrapper.head.score",), ("head.score",)).dropped == "wrapper"
    assert not unrooted(("wrapper.rank",), ("head.score",)).ambiguous


def test_no_paths_match_as_they_are() -> None:
    assert rerooted((), LAYERS).identity
