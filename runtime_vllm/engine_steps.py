"""The steps of an engine: which kernel variants are compiled in its warm-up, captured in its graphs and launched.

A step's form follows from its number of rows alone: few rows run the decode kernels, more rows the prefill kernels. So
a graph that was captured for a number of rows finds its plan at the same address at every replay, whatever the
mix of adapters.
"""

from __future__ import annotations

import dataclasses

from scute_compile.diagnostics import Code, fail
from scute_compile.runtime_min.pool.resident_pool import ResidentPool
from scute_compile.runtime_min.step.arguments import Features
from scute_compile.runtime_min.step.plan import StepBuffers
from scute_compile.runtime_min.step.writer import StepForm, StepLimits, StepWriter


class EngineSteps(StepWriter):
    """Writes the steps of one engine on one rank, for calls that are padded, captured or part of a warm-up.

    Args:
        pool: The adapters.
        limits: The limits of steps; `fixed` is set.
    """

    def __init__(self, pool: ResidentPool, limits: StepLimits) -> None:
        super().__init__(pool, dataclasses.replace(limits, fixed=True))
        self.rehearsing = False
        """Whether the engine's adapters are stand-ins: it measures its memory, or warms up what it will capture."""
        self.current = False
        """Whether the written step is the one that the engine prepares now, not the one before."""

    @property
    def plain(self) -> bool:
        """Whether the step that the engine prepares now has no shared pair and no rotation."""
        written = self.current and not self.rehearsing and self.adapted and bool(self.forms)
        return written and not any(form.plan.shared or form.plan.rotated for form in self.forms)

    def rehearses(self, rows: int) -> bool:
        """Return whether a call with `rows` rows should run every kernel that any step of so many rows may need.

        The engine measures the memory of such a step before it gives the rest to its KV cache, and kernels are compiled
        and loaded before a capture, in which that may be forbidden.
        """
        return self.rehearsing and self.form_for(rows) is not None

    def arguments_for(self, rows: int, *, fixed: bool, plain: bool = False) -> tuple[StepBuffers, Features]:
        """Return the buffers and features for a layer that is called with `rows` rows.

        Args:
            rows: Number of rows of the call, with padding.
            fixed: Whether the call is being captured, and so must support every later step of so many rows.
            plain: Whether only plain steps will run what is captured.

        Raises:
            ScuteError: SC703 when the step was written for more rows than the layer sees.
        """
        form = self._expect(rows)
        if fixed:
            return form.buffers, self.fixed(form, rows, plain=plain)
        exact = self.exact(form)
        most = self.fixed(form, rows, plain=not (exact.shared or exact.rotated))
        # the features that select a kernel's variant are those of the rehearsal, which compiled it
        rotated = max(exact.rotated, min(1, most.rotated))
        return form.buffers, dataclasses.replace(
            exact, owned=most.owned, shared=most.shared, tall=most.tall, rotated=rotated
        )

    def rehearsal(self, rows: int) -> tuple[StepBuffers, tuple[Features, ...]]:
        """Return the buffers, and the features for which kernels must be compiled before the engine takes requests.

        A step's features select among a kernel's variants. Compiling a variant delays all waiting requests by seconds,
        so steps use two only: one for plain steps and one for all others.

        Args:
            rows: Number of rows of the call that rehearses.
        """
        form = self._expect(rows)
        return form.buffers, (self.fixed(form, rows, plain=True), self.fixed(form, rows))

    def _expect(self, rows: int) -> StepForm:
        form = self.form_for(rows)
        if form is None:
            fail(
                Code.SC703,
                where="a step",
                found=f"a layer with {rows} rows in a step of {self.tokens}",
                expected="layers that run on every token of the step",
                next="report the model; adapters can't be served on it this way",
            )
        return form
