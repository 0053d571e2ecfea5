"""The stable codes of all diagnostics: a title for the message, and a paragraph for the page of codes.

SC1xx: files. SC2xx: configuration. SC3xx: keys and tensors. SC4xx: the base model. SC5xx: tensor parallelism.
SC6xx: artifacts and stores. SC7xx: commands. SC8xx: the runtime. A code is never reused.
"""

from __future__ import annotations

from enum import Enum


class Code(Enum):
    """A kind of finding. The value is `(title, paragraph)`."""

    SC101 = (
        "no such adapter",
        "The path is neither a folder with an adapter nor an artifact, and no Hub repository of that name was found.",
    )
    SC102 = (
        "the adapter's weights are a pickle",
        "Only safetensors files are read. A pickle can run code while it loads; re-save it with "
        "`save_pretrained(..., safe_serialization=True)` in the environment that made it.",
    )
    SC103 = (
        "the file is a Git LFS pointer",
        "The repository was cloned without its large files: the safetensors file holds a few lines of text that "
        "name the real one. Run `git lfs pull`, or download the adapter again.",
    )
    SC104 = (
        "the safetensors file is truncated",
        "The file ends before the bytes that its header promises; a copy or an upload broke off.",
    )
    SC105 = (
        "the safetensors header is not readable",
        "The first eight bytes give the header's length and the header is JSON that lists every tensor without holes "
        "or overlaps. A file that breaks this is damaged, or is no safetensors file.",
    )
    SC106 = (
        "the adapter holds no tensors",
        "A training run that looked normal can save an empty file, for example when weights were still sharded "
        "over several processes at the time.",
    )
    SC107 = ("a file is missing", "A folder lacks a file that its kind must have.")
    SC108 = ("the JSON is not readable", "A configuration or index file is no valid JSON, or no JSON object.")
    SC109 = (
        "the file could not be read or written",
        "The operating system refused to read or write a file or a folder.",
    )
    SC110 = ("a tensor's dtype is not served", "Adapters and bases hold float32, bfloat16, float16 or float64 numbers.")
    SC201 = (
        "not a PEFT configuration",
        "`adapter_config.json` has no `peft_type`; other programs use the same file name for their own settings.",
    )
    SC202 = (
        "the PEFT method is not served",
        "The method is not among LoRA (with DoRA and rsLoRA), AdaLoRA, IA3, VeRA and OFT.",
    )
    SC203 = (
        "an unknown configuration field is set",
        "A field that this version doesn't know may change the maths, so it is never ignored when it has a value.",
    )
    SC204 = (
        "a configuration field has a value that is not served",
        "The field asks for a computation outside the normal form, or for one that depends on more than the input row.",
    )
    SC205 = ("a configuration field is malformed", "A field has the wrong type or an impossible value.")
    SC206 = (
        "the initialisation changed the base",
        "PiSSA, OLoRA, CorDA and LoftQ change the base weights when training starts; read as plain LoRA against the "
        "original base, the adapter is wrong in silence.",
    )
    SC207 = ("the scale is unknown", "The scaling factor can't be derived from what was saved.")
    SC208 = (
        "a pattern matches no module",
        "An entry of `rank_pattern` or `alpha_pattern` matches none of the adapted modules, or one of `target_modules` "
        "none of the base's layers, and so changes nothing.",
    )
    SC209 = (
        "a pattern takes too long to match",
        "A regular expression backtracks without end on ordinary module names.",
    )
    SC210 = (
        "the method's older parametrisation",
        "OFT changed its parametrisation three times; files of the first generation rotate outputs and are refused, "
        "later ones are computed as they were trained.",
    )
    SC211 = ("parts of the model are replaced", "modules_to_save and trainable tokens replace weights outright.")
    SC212 = ("experts are not served", "Adapters on the stacked parameters of experts are outside the normal form.")
    SC213 = (
        "several patterns match one module",
        "PEFT takes the first pattern of `alpha_pattern` that matches, in the file's order, and sorts patterns when it "
        "saves them: the order of the training run is lost, and with it perhaps the scale.",
    )
    SC301 = (
        "a key belongs to no slot",
        "Every tensor of the checkpoint must be claimed by exactly one slot; a dropped tensor is a silent fault.",
    )
    SC302 = (
        "no key matches the base",
        "Not one adapted module exists in the base, and no single change of the prefix makes all of them match.",
    )
    SC303 = ("some keys match nothing in the base", "Part of the adapter would not be applied.")
    SC304 = (
        "keys were re-rooted",
        "All keys match the base after one unique change of their prefix (a wrapper's name, or a text model inside a "
        "multimodal one).",
    )
    SC305 = ("a tensor is missing", "A module has some of the tensors that its method needs, but not all.")
    SC306 = ("a tensor is there twice", "Two keys mean the same slot; which one counts would be a guess.")
    SC307 = ("a tensor has the wrong shape", "The tensor doesn't fit the base's layer or its partner factor.")
    SC308 = (
        "a tensor is empty",
        "A dimension is zero: the weights were probably still sharded over processes when they were saved.",
    )
    SC309 = ("a tensor is not finite", "NaN or infinity in the weights turns every answer into NaN.")
    SC310 = ("tensors contradict the configuration", "What the tensors say and what the configuration says differ.")
    SC311 = ("not a PEFT layout", "The keys resemble PEFT's but belong to another framework, with another layout.")
    SC312 = (
        "a dense weight rides in the adapter",
        "A whole weight of the base (a head, an embedding, a norm) is in the checkpoint; it differs from the base's, "
        "or can't be compared.",
    )
    SC313 = ("a copy of a base weight was dropped", "The tensor is identical to the base's own.")
    SC314 = ("the adapter has no effect", "Every term is zero: the training run saved its initial state.")
    SC315 = ("the tensor decides", "The configuration lacks a number that the tensors give.")
    SC316 = ("projections were regenerated", "VeRA's shared matrices were drawn anew from the key, as PEFT does.")
    SC317 = (
        "the module is not served",
        "Output heads, embeddings, convolutions and experts are outside the linear sites that engines batch.",
    )
    SC318 = ("an older key was read", "The key has a spelling that today's PEFT ignores or renames.")
    SC319 = ("targets match modules without tensors", "The configuration targets modules that have no tensors.")
    SC320 = ("a value does not fit the dtype", "Values overflow, or lose precision as subnormals, in the chosen dtype.")
    SC321 = (
        "a tensor plays no part in inference",
        "A training-time buffer rides in the checkpoint; it is left out, as PEFT leaves it out in evaluation.",
    )
    SC401 = ("no such base", "The base is neither a folder with a config.json nor a Hub repository that was found.")
    SC402 = ("the adapter is not for this base", "Architecture or shapes of the adapter and the base differ.")
    SC403 = ("base weights are needed", "A slot depends on weights that the base folder doesn't hold.")
    SC404 = ("the base is quantized", "The base's weights are stored in a quantized form that can't be read exactly.")
    SC405 = ("the base's structure is unknown", "Shapes can't be derived from what the base folder holds.")
    SC406 = ("no base was named", "Neither --base nor the adapter's configuration names a base model.")
    SC407 = (
        "the base's weights are a pickle",
        "Only safetensors files are read. A pickle can run code while it loads; load the base with transformers where "
        "you trust it, and call `save_pretrained`, which writes safetensors.",
    )
    SC501 = ("the layer can't be cut", "A layer doesn't divide over this many ranks.")
    SC502 = ("a rotation block lies across a cut", "A block of R would need inputs that two ranks hold.")
    SC503 = (
        "tensor parallelism is unknown here",
        "Neither transformers nor the table of architectures says how ranks divide this model.",
    )
    SC601 = ("not an artifact", "The folder has no manifest that a reader accepts.")
    SC602 = ("the artifact's version is unknown", "The schema's major version is newer than this reader.")
    SC603 = ("a file's hash is wrong", "A file differs from what the manifest says.")
    SC604 = ("a path leaves the folder", "A manifest names files inside its own folder only.")
    SC605 = ("the artifact's tensors don't match its manifest", "Names, shapes or dtypes differ.")
    SC606 = ("a shared factor is missing", "The store that holds the artifact lacks a factor that it names by hash.")
    SC607 = ("two adapters have one name", "Two adapters of one call would be written to the same folder.")
    SC608 = ("the artifact is for another base", "The fingerprint of the base differs from the manifest's.")
    SC609 = (
        "the adapter changed since it was compiled",
        "Files of the adapter aren't those that the artifact was compiled from, by the hashes in its manifest.",
    )
    SC701 = ("a package is missing", "The light install plans and checks; compiling and verifying need torch and peft.")
    SC702 = (
        "not comparable with the installed PEFT",
        "The installed PEFT computes this adapter differently from the PEFT that wrote it, by intent.",
    )
    SC703 = ("usage error", "An argument is out of range or contradicts another.")
    SC704 = ("verification failed", "The artifact differs from PEFT by more than rounding explains.")
    SC705 = (
        "an internal error",
        "A fault of Scute itself; please report it, with the traceback that is printed when the environment variable "
        "SCUTE_DEBUG is set.",
    )
    SC801 = (
        "the artifact is for another tp or dtype",
        "A runtime serves artifacts that were cut for as many ranks as it runs on, in the dtype of its pool.",
    )
    SC802 = (
        "the adapter is not loaded",
        "A row, or a command of the pool, names an adapter that the pool doesn't know.",
    )
    SC803 = (
        "the runtime doesn't serve these terms",
        "A site has low-rank terms whose factors are all its own, or one term between two shared factors.",
    )
    SC804 = (
        "too many distinct adapters in a batch",
        "The adapters of one step must be resident together, and they need more slots or pages than the pool has.",
    )
    SC805 = ("the pool is too small", "One adapter, or one loan, needs more pages than the pool can ever free for it.")
    SC806 = (
        "the adapter is held",
        "It is used by a running step, or pinned, or present under that name already; it can't be evicted, removed or "
        "added.",
    )
    SC807 = (
        "the request can never be served",
        "It has no tokens, or with those to come it is longer than the model or the cache allows. Others go on.",
    )
    SC808 = (
        "the first token would come too late",
        "With early abort, a request that can't meet its first-token deadline by the stated service times is dropped "
        "before any work is done for it.",
    )
    SC809 = (
        "the model can't be served step by step",
        "Requests join and leave on transformers' continuous batching, which the installed version doesn't offer, or "
        "which doesn't compute what the model computes.",
    )
    SC810 = (
        "the adapter changed under a request",
        "It was replaced after the request had begun: the cache holds what the old one computed, so no token that "
        "followed would be either's.",
    )
    SC811 = (
        "the engine can't serve the adapter",
        "A rank, a slot or a layer is beyond what the serving engine was started with, or beyond what its layers do.",
    )
    SC812 = (
        "the runtime divides low-rank terms otherwise",
        "With `--lora-sharding full` a rank holds a part of both factors, so that ranks must exchange what stands "
        "between them; a runtime that doesn't would add a part of the adapter and call it all, and one that does would "
        "exchange what every rank has whole.",
    )
    SC813 = (
        "the step broke off",
        "The model raised an error in the middle of a step of a continuous batch. The requests that took part end, "
        "since the cache holds a part of what they need; those that wait are served.",
    )
    SC814 = (
        "the device's memory is too small",
        "The base, its adapters and the batch don't fit on the device together.",
    )
    SC815 = (
        "the ranks don't load the adapter alike",
        "An adapter is loaded on all ranks of a model or on none, and from one artifact: a step with it would wait for "
        "the missing rank for ever, or put parts of two adapters together.",
    )

    @property
    def title(self) -> str:
        """A few words for the first line of a message."""
        return self.value[0]

    @property
    def paragraph(self) -> str:
        """What the code stands for, for the documentation."""
        return self.value[1]
