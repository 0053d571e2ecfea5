"""Output heads and embeddings: which modules of a base are in its checkpoint but are not linear sites.

A checkpoint gives names and shapes only, so modules are recognised by their paths. The names are those of transformers'
model classes (release 5.24, `_tied_weights_keys` and the classification heads) and of models with their own code that
engines serve (InternLM2, ChatGLM).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from scute_compile.base.transformers_plan import tied_heads

_MODELS = r"(?:(?:base_model|module|model|language_model|text_model|transformer|decoder|llm)\.)*"

_HEAD = re.compile(
    # names that denote a head wherever they occur
    r"(?:.*\.)?(?:lm_head|embed_out|generator_lm_head|vocab_projector|lm_loss|score|classifier|qa_outputs)"
    # heads of masked language models: a transformation, then the projection
    r"|(?:.*\.)?(?:predictions|lm_head|mlm_score|head)\.decoder|(?:.*\.)?lm_head\.out_proj|(?:.*\.)?pred_layer\.proj"
    # common words, which denote a head only directly below a whole model
    rf"|{_MODELS}(?:output|output_layer|output_projection|proj_out|head|decoder)"
)
_TOKENS = re.compile(
    r"(?:.*\.)?(?:embed_tokens|embed_in|wte|(?:word|tok|token)_embeddings?|tokens_embed)"
    rf"|{_MODELS}(?:shared|embeddings?)|backbone\.embeddings"
)
_EMBEDDING = re.compile(
    r"(?:.*\.)?(?:wte|wpe|embed|embed_(?:in|tokens|positions)\w*|\w*embeddings?|\w*_embed|relative_attention_bias)"
)


def is_output_head(path: str) -> bool:
    """Return whether the module at `path` projects to a vocabulary or to classes.

    >>> is_output_head("lm_head"), is_output_head("model.output"), is_output_head("encoder.layer.0.output")
    (True, True, False)
    """
    return _HEAD.fullmatch(path) is not None


def is_embedding(path: str) -> bool:
    """Return whether the module at `path` is a table that rows are looked up in: of tokens, positions or others.

    >>> is_embedding("transformer.wpe"), is_embedding("model.shared"), is_embedding("mlp.shared_expert")
    (True, True, False)
    """
    return is_token_embedding(path) or _EMBEDDING.fullmatch(path) is not None


def is_token_embedding(path: str) -> bool:
    """Return whether the module at `path` is a model's table of token embeddings, which an output head may be tied to.

    >>> is_token_embedding("transformer.wte"), is_token_embedding("transformer.wpe")
    (True, False)
    """
    return _TOKENS.fullmatch(path) is not None


def tied_embedding(paths: Iterable[str]) -> str | None:
    """Return the embedding that a head without a tensor is tied to.

    Args:
        paths: The embeddings in the base's checkpoint.

    Returns:
        The only table of token embeddings; of an encoder and a decoder with one each, the shared table; otherwise None.
    """
    tokens = [path for path in paths if is_token_embedding(path)]
    shared = [path for path in tokens if path.rpartition(".")[2] == "shared"]
    candidates = shared or tokens
    return candidates[0] if len(candidates) == 1 else None


def tied_head_names(model_type: str) -> tuple[str, ...]:
    """Return the names of heads that a model of this type ties to its embedding, and leaves out of its checkpoint."""
    return tied_heads(model_type) or ("lm_head",)
