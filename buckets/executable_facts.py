"""What the compiler says of an executable: seconds, bytes, operations, collectives.

Owns the reading of a compiled program's own analyses. Loads no JAX (the program is passed in) and
judges nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

_COLLECTIVE = re.compile(
    r"= [^=]*?\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
    r"(?:-start)?\("
)


@dataclass(frozen=True, slots=True)
class ExecutableFacts:
    """Facts about one executable; bytes are per device.

    Attributes:
        lower_s: seconds to trace and lower; 0 where that was not needed.
        compile_s: seconds in the compiler.
        alias_bytes: of the arguments that are given back as results, in place.
        temp_bytes: what the program needs beside arguments and results.
        code_bytes: the program itself; the CPU compiler doesn't tell and says 0.
        flops, bytes_accessed: the compiler's count. The body of a scan is counted once.
        estimated_step_s: the compiler's estimate of one run; None where it makes none. The body
            of a scan is counted once, a kernel as it declares itself.
        collectives: number of each kind in the program text.
    """

    lower_s: float
    compile_s: float
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int
    flops: float
    bytes_accessed: float
    estimated_step_s: float | None
    collectives: dict[str, int]

    @property
    def hbm_bytes(self) -> int:
        """What must fit in a device's memory for a run: arguments, results, temporaries, code."""
        given_back = self.output_bytes - self.alias_bytes
        return self.argument_bytes + given_back + self.temp_bytes + self.code_bytes

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ExecutableFacts | None:
        """Reads `to_json`'s form; None where a fact is missing (another release wrote it)."""
        names = {field.name for field in fields(cls)}
        if not names <= content.keys():
            return None
        return cls(**{name: content[name] for name in names})


def facts_of(compiled: Any, *, lower_s: float, compile_s: float) -> ExecutableFacts:
    """Reads the facts of a `jax.stages.Compiled`."""
    memory = compiled.memory_analysis()
    cost = _cost(compiled)
    seconds = cost.get("optimal_seconds", 0.0)
    return ExecutableFacts(
        lower_s=lower_s,
        compile_s=compile_s,
        argument_bytes=int(memory.argument_size_in_bytes),
        output_bytes=int(memory.output_size_in_bytes),
        alias_bytes=int(memory.alias_size_in_bytes),
        temp_bytes=int(memory.temp_size_in_bytes),
        code_bytes=int(memory.generated_code_size_in_bytes),
        flops=cost.get("flops", 0.0),
        bytes_accessed=cost.get("bytes accessed", 0.0),
        # The compiler says -1 or nothing where a kernel inside declares no cost.
        estimated_step_s=seconds if seconds > 0 else None,
        collectives=dict(Counter(_COLLECTIVE.findall(compiled.as_text() or ""))),
    )


def _cost(compiled: Any) -> Mapping[str, float]:
    analysis = compiled.cost_analysis()
    if isinstance(analysis, list):  # one per program in older releases
        analysis = analysis[0] if analysis else None
    return cast("Mapping[str, float]", analysis or {})
