"""Changes to saved adapters: renamed keys, edited configurations, damaged files."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
ROOT = "base_model.model."


@dataclass(slots=True, kw_only=True)
class Saved:
    """An adapter folder in memory, to be changed."""

    tensors: dict[str, torch.Tensor]
    config: dict[str, object]

    @classmethod
    def read(cls, folder: Path) -> Saved:
        """Read a folder that PEFT wrote."""
        return cls(tensors=load_file(folder / WEIGHTS), config=json.loads((folder / CONFIG).read_text()))

    def write(self, folder: Path) -> None:
        """Write the adapter under the same file names."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.tensors, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(self.config, indent=2))


Edit = Callable[[Saved], None]
Spoil = Callable[[Path], None]


def renamed(old: str, new: str) -> Edit:
    """Replace a regular expression in every key."""

    def edit(saved: Saved) -> None:
        saved.tensors = {re.sub(old, new, key): value for key, value in saved.tensors.items()}

    return edit


def configured(**fields: object) -> Edit:
    """Set fields of the configuration."""
    return lambda saved: saved.config.update(fields)


def without(*fields: str) -> Edit:
    """Remove fields of the configuration, which files of older versions lack."""

    def edit(saved: Saved) -> None:
        for field in fields:
            saved.config.pop(field, None)

    return edit


def added(key: str, value: Callable[[], torch.Tensor]) -> Edit:
    """Add a tensor."""
    return lambda saved: saved.tensors.update({key: value()})


def removed(pattern: str) -> Edit:
    """Remove the tensors whose keys match."""

    def edit(saved: Saved) -> None:
        saved.tensors = {key: value for key, value in saved.tensors.items() if not re.search(pattern, key)}

    return edit


def changed(pattern: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    """Change the values of the tensors whose keys match; at least one must."""

    def edit(saved: Saved) -> None:
        keys = [key for key in saved.tensors if re.search(pattern, key)]
        assert keys, pattern
        saved.tensors.update({key: change(saved.tensors[key]).contiguous() for key in keys})

    return edit


def first_set_to(number: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Replace the first value of a tensor."""

    def change(value: torch.Tensor) -> torch.Tensor:
        flat = value.clone().flatten()
        flat[0] = number
        return flat.reshape(value.shape)

    return change


def foreign_configuration(saved: Saved) -> None:
    """Replace the configuration with another program's settings."""
    saved.config = {"base_model": "robots/arm-policy"}


def other_frameworks_layout(saved: Saved) -> None:
    """Store both factors transposed under lower-case names, as another framework does."""
    names = {".lora_A.weight": ".lora_a", ".lora_B.weight": ".lora_b"}
    tensors = {}
    for key, value in saved.tensors.items():
        stem, letter = key.rsplit(".lora_", 1)
        tensors[stem + names[".lora_" + letter]] = value.T.contiguous()
    saved.tensors = tensors


def magnitudes_in_both_spellings(saved: Saved) -> None:
    """Add a second, different copy of every magnitude under its key in raw state dicts."""
    twins = {f"{key}.weight": 2 * value for key, value in saved.tensors.items() if "magnitude" in key}
    saved.tensors.update(twins)


def first_generation_rotation(saved: Saved) -> None:
    """Save OFT as its first release did: square blocks `oft_r`, no block size, no version."""
    generator = torch.Generator().manual_seed(3)
    saved.tensors = {
        key.replace("oft_R.weight", "oft_r"): 0.2 * torch.randn(8, 8, 8, generator=generator) for key in saved.tensors
    }
    without("peft_version", "oft_block_size", "use_cayley_neumann", "num_cayley_neumann_terms")(saved)


def one_site_of_rank(rank: int) -> Edit:
    """Give one site factors of another rank than the configuration says."""

    def edit(saved: Saved) -> None:
        stem = ROOT + "model.layers.0.self_attn.q_proj.lora_"
        saved.tensors[stem + "A.weight"] = saved.tensors[stem + "A.weight"][:rank].contiguous()
        saved.tensors[stem + "B.weight"] = saved.tensors[stem + "B.weight"][:, :rank].contiguous()

    return edit


def nothing_left(saved: Saved) -> None:
    """Remove all tensors."""
    saved.tensors = {}


def emptied(saved: Saved) -> None:
    """Empty every tensor, as a sharded run saves tensors that lie on other ranks."""
    saved.tensors = {key: torch.zeros(0) for key in saved.tensors}


def git_lfs_pointer(folder: Path) -> None:
    """Replace the weights with the pointer file of a clone without large files."""
    lines = ("version https://git-lfs.github.com/spec/v1", f"oid sha256:{'5e' * 32}", "size 8123456", "")
    (folder / WEIGHTS).write_text("\n".join(lines))


def cut_short(count: int) -> Spoil:
    """Keep the first `count` bytes; from the end when negative."""

    def spoil(folder: Path) -> None:
        (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:count])

    return spoil


def header_of_an_exabyte(folder: Path) -> None:
    """Set a header length that must not be allocated."""
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", 1 << 60) + (folder / WEIGHTS).read_bytes()[8:])


def windows_line_ends(folder: Path) -> None:
    """Write the configuration with Windows line ends."""
    text = (folder / CONFIG).read_text()
    (folder / CONFIG).write_bytes(text.replace("\n", "\r\n").encode())


TRAP = "scute-was-here"


class _Trap:
    """Writes a file when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (TRAP, "w")


def pickle_with_a_trap(folder: Path) -> None:
    """Replace the weights with a pickle that writes a file when it is loaded."""
    torch.save({**load_file(folder / WEIGHTS), "trap": _Trap()}, folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()
