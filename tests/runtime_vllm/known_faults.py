"""Faults of the plugin that tests show and nobody has mended yet: patterns of the tests' names, and what is wrong."""

from __future__ import annotations

from collections.abc import Mapping

KNOWN_FAULTS: Mapping[str, str] = {
    r"leaves_nothing_behind\[in one process": "a refused request stays in the output processor: the next call hangs",
    r"another_number_of_ranks": "a load that workers refuse leaves the other ranks' answers in their queues",
    r"(loading|never_loaded).*folder with a layer that the model lacks": "keys of no layer are served as the base",
    r"one_level_too_many": "a folder whose keys match no layer is served as the base",
    r"(loading|never_loaded).*a site that the model lacks": "the message names sites that the model has",
    r"test_a_folder_that_is_replaced": "the content of a plain folder is not in the prefix cache's key",
    r"evicted_answers_whole\[.*folder": "the content of a plain folder is not in the prefix cache's key",
    r"spoilt.*in one process-a folder": "a plain folder that is read again in a step fails without its name",
    r"spoilt.*in several-(a folder|an artifact that is cut)": "what can't be read again in a step ends the engine",
}
