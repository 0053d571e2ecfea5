"""The stable codes of all diagnostics. A code has a title, a paragraph for `docs/errors.md`, and a default next step.

SC1xx: files. SC2xx: configuration. SC3xx: keys and tensors. SC4xx: the base model. SC5xx: tensor parallelism.
SC6xx: artifacts and stores. SC7xx: commands. SC8xx: the runtime. A code is never reused.
"""

from __future__ import annotations

from enum import Enum


class Code(Enum):
    """A kind of finding. The value is `(title, paragraph)` or `(title, paragraph, next)`."""

    SC101 = (
        "no such adapter",
        "The path is neither a folder with an adapter nor an artifact, and no Hub repository of that name was found.",
    )
    SC102 = (
        "the adapter's weights are a pickle",
        "Only safetensors files are read, since a pickle can run code while it loads. Load the adapter in the "
        "environment that wrote it, and save it with `save_pretrained(..., safe_serialization=True)`.",
        "load it where it was made and save it with `save_pretrained(..., safe_serialization=True)`",
    )
    SC103 = (
        "the file is a Git LFS pointer",
        "The repository was cloned without its large files: the safetensors file holds a few lines of text that "
        "name the real one. Run `git lfs pull`, or download the adapter again.",
        "run `git lfs pull` in the clone, or download the files again",
    )
    SC104 = (
        "the safetensors file is truncated",
        "The file is shorter than its header says. An interrupted copy or upload is the usual cause.",
        "copy or download the file again, or save it once more",
    )
    SC105 = (
        "the safetensors header is not readable",
        "A safetensors file begins with eight bytes that give the header's length, and a JSON header that lists the "
        "tensors without gaps or overlaps. This file breaks one of these rules: it is damaged, or is not a safetensors "
        "file.",
        "the file is damaged or not a safetensors file: copy, download or save it again",
    )
    SC106 = (
        "the adapter holds no tensors",
        "The safetensors file is valid and empty. A trainer writes such a file when it saves while the weights are "
        "sharded over several processes.",
        "save the adapter again; gather sharded weights (ZeRO-3, FSDP) before saving",
    )
    SC107 = ("a file is missing", "The folder lacks a required file.")
    SC108 = ("the JSON is not readable", "A configuration or index file is not valid JSON, or is not a JSON object.")
    SC109 = (
        "the file could not be read or written",
        "The operating system refused to read or write a file or a folder.",
    )
    SC110 = ("a tensor's dtype is not served", "Adapters and bases hold float32, bfloat16, float16 or float64 numbers.")
    SC111 = (
        "a file changed while it was read",
        "An adapter is planned from one reading of its files and packed from another, and the base is read between "
        "the two. A file had other bytes later than at first, so nothing was written for it.",
        "wait until whatever writes the file is done, and run the command again",
    )
    SC112 = (
        "the input exceeds a limit",
        "Sizes have limits that no real adapter or base reaches, so that a crafted file can't use up time or memory. "
        "The message gives the limit.",
        "report it, if the file is a real one",
    )
    SC201 = (
        "not a PEFT configuration",
        "`adapter_config.json` has no `peft_type`. Other programs use the same file name for their own settings.",
        "pass the folder that PEFT's `save_pretrained` wrote",
    )
    SC202 = (
        "the PEFT method is not served",
        "The method is not among LoRA (with DoRA and rsLoRA), AdaLoRA, IA3, VeRA and OFT.",
        "serve it with PEFT, or as a merged model where PEFT's merge_and_unload can make one",
    )
    SC203 = (
        "an unknown configuration field is set",
        "The configuration sets a field that this version doesn't know. The field may change what the adapter "
        "computes, so it is not ignored.",
        "update Scute if a newer one knows the field, or save the adapter without it",
    )
    SC204 = (
        "a configuration field has a value that is not served",
        "The field asks for a computation outside the normal form, or for one that depends on more than the input row.",
        "train or convert the adapter without it",
    )
    SC205 = (
        "a configuration field is malformed",
        "A field has the wrong type or an impossible value.",
        "correct the field in adapter_config.json",
    )
    SC206 = (
        "the initialisation changed the base",
        "PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change the base weights when training starts, and an unknown "
        "initialisation may. Applied to the original base as plain LoRA, the adapter would not compute what was "
        "trained.",
    )
    SC207 = (
        "the scale is unknown",
        "The scaling factor can't be derived from what was saved.",
        "restore lora_alpha from the training run",
    )
    SC208 = (
        "a pattern matches no module",
        "An entry of `rank_pattern` or `alpha_pattern` matches none of the adapted modules, or an entry of "
        "`target_modules` matches none of the base's layers. The entry has no effect.",
    )
    SC209 = (
        "a pattern can't be matched in bounded time",
        "Patterns have the meaning that Python's `re` gives them, but an automaton of bounded size matches them, so no "
        "pattern takes exponential time or memory. Back-references, atomic groups, possessive repeats, repeats inside "
        "repeated groups (on which PEFT itself may never end) and patterns of very many states are refused.",
        "replace the pattern with a list of module names",
    )
    SC210 = (
        "the method's older parametrisation",
        "OFT changed its parametrisation three times. Files of the first generation rotate outputs and are refused; "
        "later ones are computed as they were trained.",
    )
    SC211 = (
        "parts of the model are replaced",
        "`modules_to_save` and trainable tokens replace weights of the base, which the normal form can't express.",
    )
    SC212 = (
        "experts are not served",
        "The adapter changes the stacked parameters of experts, which is outside the normal form.",
        "train with target_modules on linear layers only",
    )
    SC213 = (
        "several patterns match one module",
        "PEFT takes the first matching pattern of `alpha_pattern` in the file's order, and sorts the patterns when it "
        "saves them. The order of the training run is lost, and with it possibly the scale.",
    )
    SC301 = (
        "a key belongs to no slot",
        "Every tensor of the checkpoint must be claimed by exactly one slot. This one is not, and ignoring it could "
        "change what the adapter computes.",
    )
    SC302 = (
        "no key matches the base",
        "None of the adapted modules exists in the base, and no single change of their prefix makes all of them match.",
        "check that the base is the one the adapter was trained on, or rename the keys",
    )
    SC303 = (
        "some keys match nothing in the base",
        "Some of the adapted modules don't exist in the base, so only a part of the adapter could be applied.",
    )
    SC304 = (
        "keys were re-rooted",
        "All keys match the base after one unique change of their prefix (a wrapper's name, or a text model inside a "
        "multimodal one).",
    )
    SC305 = (
        "a tensor is missing",
        "A module has some of the tensors that its method needs, but not all.",
        "save the adapter again; PEFT would load this one with initial values in the gap",
    )
    SC306 = (
        "a tensor appears twice",
        "Two keys name the same tensor, and nothing in the files decides between them.",
        "remove the key that is not meant",
    )
    SC307 = (
        "a tensor has the wrong shape",
        "The tensor doesn't fit the base's layer or its partner factor.",
        "check that the base is the one the adapter was trained on",
    )
    SC308 = (
        "a tensor is empty",
        "A dimension is zero. A trainer writes such tensors when it saves while the weights are sharded over several "
        "processes.",
        "gather the sharded weights before saving (under ZeRO-3 or FSDP, save through the trainer)",
    )
    SC309 = ("a tensor is not finite", "The weights contain NaN or infinity, which make every answer NaN.")
    SC310 = (
        "tensors contradict the configuration",
        "A number or a module that the configuration states differs from what the tensors show.",
        "restore the configuration of the training run",
    )
    SC311 = (
        "not a PEFT layout",
        "The keys resemble PEFT's, but another framework wrote them, and it stores factors in another layout.",
        "convert the adapter to PEFT's layout with the framework that wrote it",
    )
    SC312 = (
        "the adapter contains a dense weight",
        "The checkpoint contains a whole weight of the base (a head, an embedding, a norm) with other values than the "
        "base's.",
    )
    SC313 = (
        "a copy of a base weight was dropped",
        "The checkpoint contains a whole weight of the base with the base's own values.",
    )
    SC314 = (
        "the adapter has no effect",
        "Every slot is zero or the identity. The training run saved its initial state.",
        "nothing to do: the adapter is compiled, and its outputs equal the base's",
    )
    SC315 = (
        "a setting was taken from the tensors",
        "The configuration lacks a number or a list, or differs from the tensors. The tensors' value is used.",
    )
    SC316 = (
        "projections were regenerated",
        "VeRA's shared matrices are not in the checkpoint. They were regenerated from the key, as PEFT does.",
    )
    SC317 = (
        "the module is not served",
        "Output heads, embeddings, convolutions and experts are not among the linear layers that engines batch.",
        "train without this module among the targets",
    )
    SC318 = (
        "an older key was read",
        "The key has a spelling of an earlier PEFT, which the current one ignores or renames.",
    )
    SC319 = (
        "targets match modules without tensors",
        "The configuration targets modules of the base that have no tensors in the checkpoint.",
        "check that the base is the one the adapter was trained on, and that the checkpoint is complete",
    )
    SC320 = (
        "a value does not fit the dtype",
        "Values overflow in the chosen dtype, or are subnormal in it and lose precision.",
    )
    SC321 = (
        "a tensor plays no part in inference",
        "The checkpoint contains a training-time buffer. It is left out, because PEFT doesn't use it in evaluation.",
    )
    SC401 = ("no such base", "The base is neither a folder with a config.json nor a Hub repository that was found.")
    SC402 = (
        "the adapter is not for this base",
        "Architecture or shapes of the adapter and the base differ.",
        "pass the base that the adapter was trained on",
    )
    SC403 = (
        "base weights are needed",
        "A value depends on weights of the base that its folder doesn't hold.",
        "pass a base folder with its safetensors files",
    )
    SC404 = (
        "the base is quantized",
        "The base's weights are stored in a quantized form that can't be read exactly.",
        "use --base to pass the model that this one was quantized from",
    )
    SC405 = ("the base's structure is unknown", "Shapes can't be derived from what the base folder holds.")
    SC406 = (
        "no base was named",
        "Neither --base nor the adapter's configuration names a base model.",
        "pass the base with --base",
    )
    SC407 = (
        "the base's weights are a pickle",
        "Only safetensors files are read, since a pickle can run code while it loads. Load the base with transformers "
        "in an environment that you trust, and call `save_pretrained`, which writes safetensors.",
        "convert the base: load it with transformers where you trust it, and call save_pretrained",
    )
    SC501 = ("the layer can't be cut", "A layer doesn't divide evenly over this many ranks.")
    SC502 = (
        "a rotation block lies across a cut",
        "A block of R needs inputs that two ranks hold.",
    )
    SC503 = (
        "no tensor-parallel rule for the layer",
        "Neither the plans taken from transformers nor the table of architectures says how ranks divide this model.",
        "compile with --tp 1",
    )
    SC601 = ("not an artifact", "The folder has no manifest that this version can read.")
    SC602 = (
        "the artifact's version is unknown",
        "The schema's major version is newer than this reader.",
        "update scute, or compile the adapter again with this version",
    )
    SC603 = (
        "a file's hash is wrong",
        "A file differs from the manifest's hash of it.",
        "the file was changed or damaged: copy the artifact again, or compile the adapter again",
    )
    SC604 = (
        "a path leaves the folder",
        "A manifest may name only files inside its folder, and none of them may be a link.",
        "copy the store without links",
    )
    SC605 = (
        "the artifact's tensors don't match its manifest",
        "Names, shapes or dtypes differ.",
        "compile the adapter again",
    )
    SC606 = (
        "a shared factor is missing",
        "The artifact names a shared factor by its hash, and the store that holds the artifact doesn't have it.",
    )
    SC607 = (
        "two adapters have one name",
        "Two adapters of one call would be written to the same folder.",
        "rename the folders, or compile them in separate calls with --name",
    )
    SC608 = (
        "the artifact is for another base",
        "The fingerprint of the base differs from the manifest's.",
        "pass the base that it was compiled for, or compile the adapter again",
    )
    SC609 = (
        "the adapter changed since it was compiled",
        "The hashes of the adapter's files differ from those in the artifact's manifest.",
    )
    SC701 = (
        "a package is missing",
        "The default install plans and checks adapters. Compiling, verifying and serving need an extra.",
        "`pip install 'scute-compile[compile]'`",
    )
    SC702 = (
        "not comparable with the installed PEFT",
        "The installed PEFT computes this adapter differently from the PEFT that wrote it, by its authors' decision.",
        "verify in an environment with the PEFT version that wrote the adapter",
    )
    SC703 = ("usage error", "An argument is out of range or contradicts another.")
    SC704 = ("verification failed", "The artifact differs from PEFT by more than rounding explains.")
    SC705 = (
        "an internal error",
        "This is a bug in Scute. Please report it, with the traceback that is printed when the environment variable "
        "SCUTE_DEBUG is set.",
    )
    SC801 = (
        "the artifact is for another tp or dtype",
        "A runtime serves artifacts that were compiled for its number of ranks and for the dtype of its pool.",
    )
    SC802 = (
        "the adapter is not loaded",
        "A row of the batch, or a call to the pool, names an adapter that is not loaded.",
    )
    SC803 = (
        "the runtime doesn't serve these terms",
        "The runtime serves low-rank terms whose factors are all the adapter's, or one term between two shared "
        "factors. This site has others.",
    )
    SC804 = (
        "too many distinct adapters in a batch",
        "The adapters of one step must be resident together, and they need more adapter indices or pages than the "
        "pool has.",
    )
    SC805 = (
        "the pool is too small",
        "One adapter needs more memory than the whole pool has, or the device has no memory left to stage it.",
    )
    SC806 = (
        "the adapter is held",
        "A running step uses the adapter, or its name is already loaded. It can't be evicted, removed or added.",
    )
    SC807 = (
        "the request can never be served",
        "The request has no tokens, or with the tokens to generate it is longer than the model or the cache allows. "
        "Other requests are not affected.",
    )
    SC808 = (
        "the first token would come too late",
        "With early abort, a request that can't meet its first-token deadline by the stated service times is dropped "
        "before any work is done for it.",
    )
    SC809 = (
        "the model can't be served step by step",
        "A continuous batch uses transformers' continuous batching. The installed version doesn't offer it, or its "
        "results differ from those of the model.",
    )
    SC810 = (
        "the adapter changed during a request",
        "The adapter was replaced after the request had begun. The request's cache holds results of the old adapter, "
        "so further tokens would depend on both.",
    )
    SC811 = (
        "the engine can't serve the adapter",
        "A rank, a slot or a layer exceeds what the serving engine was started with, or what its layers can compute.",
    )
    SC812 = (
        "the runtime uses another layout of low-rank terms",
        "With `--lora-sharding full`, a rank holds a part of both factors, and ranks exchange the intermediate "
        "results. A runtime without that exchange can't serve a fully sharded artifact, and one with it can't serve "
        "the default layout.",
    )
    SC813 = (
        "the step failed",
        "The model raised an error during a step of a continuous batch. The requests of that step end, since their "
        "cache is incomplete; waiting requests are served.",
    )
    SC814 = (
        "the device's memory is too small",
        "The base, its adapters and the batch don't fit on the device together.",
    )
    SC815 = (
        "the ranks don't load the same adapter",
        "All ranks of a model must load an adapter, from one artifact. Otherwise a step would wait for the missing "
        "rank, or would combine parts of two adapters.",
    )

    def __init__(self, title: str, paragraph: str, next: str = "") -> None:  # noqa: A002 - the name of a diagnostic's field
        self.title = title
        """A few words for the first line of a message."""
        self.paragraph = paragraph
        """The meaning of the code, for the documentation."""
        self.next = next
        """The next step of a diagnostic that states none; may be empty."""


USAGE_CODES = frozenset({Code.SC401, Code.SC404, Code.SC406, Code.SC703})
"""The codes that end a command with status 2: usage errors, and bases that can't be used."""
