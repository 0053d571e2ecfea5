"""Faults of the plugin that tests show and nobody has mended yet: patterns of the tests' names, and what is wrong."""

from __future__ import annotations

from collections.abc import Mapping

KNOWN_FAULTS: Mapping[str, str] = {}
