"""Plans the adapters of a call, each against the given base or the base that its configuration names."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from scute_compile.diagnostics import Code, ScuteError, as_scute_error, fail
from scute_compile.driver.bases import OpenBase, open_model
from scute_compile.formats.peft_folder import AdapterFolder, open_adapter
from scute_compile.ir.target import Target
from scute_compile.pipeline import Planned, plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Bases:
    """The base models of one call, each opened once."""

    given: str | None
    """The base of every adapter; None: each adapter's configuration names its base."""
    weights: bool
    """Whether a base on the Hub is downloaded with its weights."""
    _opened: dict[str, OpenBase] = field(default_factory=dict)

    def open_given(self) -> OpenBase | None:
        """Open the base that the call names; None when it names none.

        Raises:
            ScuteError: SC4xx.
        """
        return None if self.given is None else self._open(self.given)

    def open_for(self, adapter: AdapterFolder, source: str) -> OpenBase:
        """Open the base of an adapter.

        Args:
            adapter: The opened adapter.
            source: Its path or Hub id, for findings.

        Raises:
            ScuteError: SC406 when neither the call nor the configuration names a base, and further SC4xx.
        """
        if self.given is not None:
            return self._open(self.given)
        named = adapter.config.get("base_model_name_or_path")
        if not isinstance(named, str) or not named:
            fail(
                Code.SC406,
                where=source,
                found=f"base_model_name_or_path = {named!r} and no --base",
                expected="a base model",
            )
        try:
            return self._open(named)
        except ScuteError as error:
            hint = "; the adapter names this base, and --base can name another place"
            raise ScuteError(
                replace(finding, next=finding.next + hint) if finding.code is Code.SC401 else finding
                for finding in error.diagnostics
            ) from None

    def _open(self, source: str) -> OpenBase:
        if source not in self._opened:
            self._opened[source] = open_model(source, weights=self.weights)
        return self._opened[source]


def plan_adapter(
    source: str, bases: Bases, target: Target, *, alone: bool, hash_files: bool = False, name: str = ""
) -> tuple[Planned, OpenBase | None]:
    """Open an adapter and plan it against its base.

    Args:
        source: A PEFT folder or a Hub id.
        bases: The bases of the call.
        target: What to compile for.
        alone: Whether it is the only adapter of the call: then a missing base ends the call, and is not a finding.
        hash_files: Whether the scan hashes the adapter's files as well.
        name: The artifact's name; by default the folder's.

    Returns:
        The planned adapter, refused or not, and its base; None for the base when the adapter could not be opened or
        its base is missing.

    Raises:
        ScuteError: SC4xx when the base can't be opened and it was given, or the adapter is alone.
    """
    base = bases.open_given()
    try:
        adapter = open_adapter(source)
    except Exception as error:  # noqa: BLE001 - the fault of one adapter must not end the work on others
        return _refused(source, name or Path(source).name, error), None
    if base is None:
        try:
            base = bases.open_for(adapter, source)
        except Exception as error:
            if alone:
                raise
            return _refused(source, name or adapter.name, error), None
    return plan(source, base, target, hash_files=hash_files, name=name, adapter=adapter), base


def _refused(source: str, name: str, error: Exception) -> Planned:
    found = as_scute_error(error).diagnostics
    return Planned(source=source, name=name, adapter=None, scan=None, program=None, findings=found)


def servable(planned: Planned) -> Planned:
    """Return an adapter that was not refused.

    Raises:
        ScuteError: the findings, when it was refused.
    """
    if planned.refused:
        raise ScuteError(planned.findings)
    return planned
