"""Classic BPF as the kernel's seccomp reads it: an assembler for filters that are a table over system call numbers.

A filter is piecewise constant in the number, so its body is a walk over ranges in ascending order: each range needs one
comparison with its upper end. A number with conditions on its arguments gets a block of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LOAD, AND, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
NUMBER_AT, ARCH_AT, ARGUMENTS_AT = 0, 4, 16
"""Offsets in the kernel's `struct seccomp_data`."""
ALLOW, KILL = 0x7FFF0000, 0x80000000
MAX_INSTRUCTIONS = 4096

Instruction = tuple[int, int, int, int]
"""(code, jump if true, jump if false, operand)"""


def errno_action(number: int) -> int:
    """The action that makes a call fail with this error number."""
    return 0x00050000 | number


@dataclass(frozen=True, kw_only=True)
class _OfArgument:
    argument: int
    otherwise: int


@dataclass(frozen=True, kw_only=True)
class Equals(_OfArgument):
    """Allowed when the low 32 bits of an argument are one of `values`."""

    values: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class NoBits(_OfArgument):
    """Allowed when the low 32 bits of an argument have none of `bits`."""

    bits: int


@dataclass(frozen=True, kw_only=True)
class NoneOf(_OfArgument):
    """Allowed unless the low 32 bits of an argument are one of `values`."""

    values: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class NotAllBits(_OfArgument):
    """Allowed unless the low 32 bits of an argument have all of `bits`."""

    bits: int


@dataclass(frozen=True, kw_only=True)
class Null(_OfArgument):
    """Allowed when all 64 bits of an argument, a pointer, are zero."""


@dataclass(frozen=True, kw_only=True)
class When:
    """`then` decides when the low 32 bits of an argument are `value`, else `otherwise` does: conditions on two arguments."""

    argument: int
    value: int
    then: Rule
    otherwise: Rule


Condition = Equals | NoBits | NoneOf | NotAllBits | Null | When
Rule = int | Condition


def _returns(action: int) -> Instruction:
    return (RETURN, 0, 0, action)


def block(rule: Rule) -> list[Instruction]:
    """Instructions that decide one call and always return. The kernel looks at 32 bits of these arguments as well."""
    if isinstance(rule, int):
        return [_returns(rule)]
    at = ARGUMENTS_AT + 8 * rule.argument
    load = (LOAD, 0, 0, at)
    if isinstance(rule, When):
        then = block(rule.then)
        return [load, (JUMP_EQUAL, 0, len(then), rule.value), *then, *block(rule.otherwise)]
    if isinstance(rule, Null):
        halves = [load, (JUMP_EQUAL, 0, 2, 0), (LOAD, 0, 0, at + 4), (JUMP_EQUAL, 1, 0, 0)]
        return [*halves, _returns(rule.otherwise), _returns(ALLOW)]
    if isinstance(rule, NotAllBits):
        masked = [load, (AND, 0, 0, rule.bits), (JUMP_EQUAL, 0, 1, rule.bits)]
        return [*masked, _returns(rule.otherwise), _returns(ALLOW)]
    if isinstance(rule, NoBits):
        return [load, (JUMP_ANY_BIT, 0, 1, rule.bits), _returns(rule.otherwise), _returns(ALLOW)]
    hit, miss = (ALLOW, rule.otherwise) if isinstance(rule, Equals) else (rule.otherwise, ALLOW)
    left = len(rule.values)
    # A hit jumps over the comparisons still to come and over the miss.
    compares = [(JUMP_EQUAL, left - i, 0, value) for i, value in enumerate(rule.values)]
    return [load, *compares, _returns(miss), _returns(hit)]


def ranges(rules: Mapping[int, Rule], default: int) -> list[tuple[int, Rule]]:
    """`(end, rule)` in ascending order: the rule holds for numbers below `end` that no earlier entry took."""
    out: list[tuple[int, Rule]] = []
    at = 0
    for number in sorted(rules):
        for end, rule in ((number, default), (number + 1, rules[number])):
            if end > at:
                if out and out[-1][1] == rule:
                    out[-1] = (end, rule)
                else:
                    out.append((end, rule))
                at = end
    return out


def assemble(
    arch: int, rules: Mapping[int, Rule], *, default: int, foreign_from: int | None = None
) -> list[Instruction]:
    """Filter for one architecture: `rules` by number, `default` elsewhere, another architecture or a number from
    `foreign_from` on (x32 calls on x86-64) kills the process."""
    program: list[Instruction] = [
        (LOAD, 0, 0, ARCH_AT),
        (JUMP_EQUAL, 1, 0, arch),
        _returns(KILL),
        (LOAD, 0, 0, NUMBER_AT),
    ]
    if foreign_from is not None:
        program += [(JUMP_AT_LEAST, 0, 1, foreign_from), _returns(KILL)]
    for end, rule in ranges(rules, default):
        body = block(rule)
        program += [(JUMP_AT_LEAST, len(body), 0, end), *body]
    program.append(_returns(default))
    assert len(program) <= MAX_INSTRUCTIONS
    return program


def encode(program: Sequence[Instruction]) -> bytes:
    """The program as an array of `struct sock_filter`."""
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
