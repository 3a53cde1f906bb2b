"""Target GPU generations of the kernels, and occupancy. `programs_per_processor` is built in notebook 03."""

from __future__ import annotations

from dataclasses import dataclass

KB = 1024
REGISTERS = 65_536
"""32-bit registers per multiprocessor, on every target."""


@dataclass(frozen=True)
class Target:
    """A compute capability, from CUDA's programming guide; memory in bytes.

    shared_per_program     maximum shared memory per program (thread block)
    shared                 shared memory per multiprocessor; each program takes `reserved` bytes more than it asks for
    warps, programs        maximum resident warps and programs per multiprocessor
    """

    architecture: int
    examples: str
    shared_per_program: int
    shared: int
    reserved: int
    warps: int
    programs: int
    bfloat16: bool = True


TARGETS = (
    Target(75, "T4, RTX 20", 64 * KB, 64 * KB, 0, 32, 16, bfloat16=False),
    Target(80, "A100", 163 * KB, 164 * KB, KB, 64, 32),
    Target(86, "A10, RTX 30", 99 * KB, 100 * KB, KB, 48, 16),
    Target(89, "L4, RTX 40", 99 * KB, 100 * KB, KB, 48, 24),
    Target(90, "H100, H200", 227 * KB, 228 * KB, KB, 64, 32),
    Target(100, "B200", 227 * KB, 228 * KB, KB, 64, 32),
)


def target_of(architecture: int) -> Target:
    """The target of an architecture such as 90. Raises ValueError for an unsupported one."""
    for target in TARGETS:
        if target.architecture == architecture:
            return target
    raise ValueError(f"architecture is {architecture}; it must be one of {[t.architecture for t in TARGETS]}.")


def programs_per_processor(target: Target, registers: int, warps: int, shared: int) -> int:
    """Occupancy: resident programs per multiprocessor, limited by registers, shared memory, warps and program slots.

    registers   per thread; allocated per warp in units of 256
    shared      bytes per program
    """
    per_warp = -(-registers * 32 // 256) * 256
    by_registers = REGISTERS // per_warp // warps
    by_shared = target.shared // (shared + target.reserved) if shared else target.programs
    return min(by_registers, by_shared, target.warps // warps, target.programs)
