"""More cases: rotations, adapters outside the formula, and damaged files."""

from __future__ import annotations

from functools import partial

import torch
from peft import OFTConfig

from tests.support import damage
from tests.support.bases import ATTENTION, GATED
from tests.support.cases import ENDLESS, MAGNITUDES, NAMES, RANKS, SCALES, TASK, VECTORS, Case, E, N, Oracle, R, lora
from tests.support.damage import ROOT, added, changed, configured, without

ROTATED_QUERY = partial(OFTConfig, oft_block_size=8, target_modules=["q_proj"], task_type=TASK)

ROTATIONS = (
    Case(
        name="one exact rotation block for all",
        outcome=E,
        config=partial(
            OFTConfig,
            oft_block_size=8,
            block_share=True,
            use_cayley_neumann=False,
            target_modules=[*ATTENTION, *GATED],
            task_type=TASK,
        ),
        tp=(1, 2),
    ),
    Case(
        name="OFT without its block size",
        outcome=N,
        config=ROTATED_QUERY,
        edit=without("oft_block_size"),
        words=("8", ("block size", "oft_block_size")),
        oracle=Oracle.UNCHANGED,
    ),
    Case(
        name="OFT of the first generation",
        outcome=R,
        config=ROTATED_QUERY,
        edit=damage.first_generation_rotation,
        words=("oft_r", ("0.13", "first generation")),
    ),
    Case(
        name="OFT without a version",
        outcome=N,
        config=ROTATED_QUERY,
        edit=without("peft_version"),
        words=("peft_version", ("0.16", "0.17")),
        oracle=Oracle.SEPARATE_TEST,
    ),
)

OUTSIDE = (
    Case(
        name="PiSSA on the base it came from",
        outcome=R,
        config=lora(init_lora_weights="pissa", target_modules=["q_proj", "v_proj"]),
        words=("pissa",),
    ),
    Case(
        name="LoRA-GA that was not converted when it was saved",
        outcome=R,
        config=lora(),
        edit=configured(init_lora_weights="lora_ga"),
        words=("lora_ga",),
    ),
    Case(
        name="an unknown initialisation",
        outcome=R,
        config=lora(),
        edit=configured(init_lora_weights="some_new_init"),
        words=("init_lora_weights", "some_new_init"),
    ),
    Case(
        name="an initialisation that keeps the base",
        outcome=E,
        config=lora(),
        edit=configured(init_lora_weights="orthogonal"),
    ),
    Case(name="an unknown field that is null", outcome=E, config=lora(), edit=configured(some_future_config=None)),
    Case(
        name="an unknown field that is set",
        outcome=R,
        config=lora(),
        edit=configured(some_future_config={"gamma": 0.5}),
        words=("some_future_config",),
    ),
    Case(
        name="LoRA on a tied head",
        outcome=R,
        base="llama-tied",
        config=lora(target_modules=["q_proj", "lm_head"]),
        words=("lm_head",),
    ),
    Case(
        name="trained tokens",
        outcome=R,
        config=lora(target_modules=["q_proj"], trainable_token_indices=[5, 6]),
        words=(("trainable token", "trainable_token", "trained token"),),
    ),
    Case(
        name="LoRA on stacked experts",
        outcome=R,
        base="mixtral",
        config=lora(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"]),
        words=("experts",),
    ),
    Case(
        name="an adapter that was never trained",
        outcome=N,
        config=lora(),
        edit=changed("lora_B", torch.zeros_like),
        words=("zero", "effect"),
        oracle=Oracle.SEPARATE_TEST,
    ),
)

FILES = (
    Case(
        name="a Git LFS pointer",
        outcome=R,
        config=lora(),
        spoil=damage.git_lfs_pointer,
        words=("git lfs",),
    ),
    Case(
        name="a file that lost its end", outcome=R, config=lora(), spoil=damage.cut_short(-1024), words=("truncated",)
    ),
    Case(name="a file of eight bytes", outcome=R, config=lora(), spoil=damage.cut_short(8), words=("truncated",)),
    Case(
        name="a file without tensors",
        outcome=R,
        config=lora(),
        edit=damage.nothing_left,
        words=(("no tensors", "0 tensors"),),
    ),
    Case(
        name="tensors without values",
        outcome=R,
        config=lora(),
        edit=damage.emptied,
        words=(("shape", "dimension"), "0", ("gather", "shard")),
    ),
    Case(
        name="only a pickle",
        outcome=R,
        config=lora(),
        spoil=damage.pickle_with_a_trap,
        words=("adapter_model.bin", "pickle"),
    ),
    Case(
        name="one matrix of NaN",
        outcome=R,
        config=lora(),
        edit=changed(r"layers\.1\.mlp\.up_proj\.lora_B", lambda value: torch.full_like(value, float("nan"))),
        words=(("not finite", "nan"), "layers.1.mlp.up_proj.lora_b"),
    ),
    Case(
        name="Windows line ends and no version",
        outcome=E,
        config=lora(),
        edit=without("peft_version"),
        spoil=damage.windows_line_ends,
    ),
    Case(
        name="another program's settings",
        outcome=R,
        config=lora(),
        edit=damage.foreign_configuration,
        words=("peft_type",),
    ),
    Case(
        name="a header of an exabyte",
        outcome=R,
        config=lora(),
        spoil=damage.header_of_an_exabyte,
        words=("header",),
    ),
    Case(
        name="terminal escapes in a key",
        outcome=R,
        config=lora(),
        edit=added(ROOT + "\x1b[31mred\x1b]0;title\x07.lora_A.weight", lambda: torch.zeros(8, 64)),
        words=(r"\x1b[31mred",),
    ),
    Case(
        name="targets that backtrack without end",
        outcome=R,
        config=lora(),
        edit=configured(target_modules=ENDLESS),
        words=("target_modules",),
    ),
    Case(
        name="a rank pattern that backtracks without end",
        outcome=R,
        config=lora(),
        edit=configured(rank_pattern={ENDLESS: 4}),
        words=("rank_pattern",),
    ),
    Case(
        name="another framework's layout on square layers",
        outcome=R,
        base="llama-square",
        config=lora(target_modules=["o_proj"]),
        edit=damage.other_frameworks_layout,
        words=("layout", "lora_a"),
    ),
)

CASES: tuple[Case, ...] = (*NAMES, *SCALES, *RANKS, *MAGNITUDES, *VECTORS, *ROTATIONS, *OUTSIDE, *FILES)
