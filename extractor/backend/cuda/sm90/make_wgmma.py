#!/usr/bin/env python3
"""Writes wgmma.h: D[64, N] (+)= A[64, 16] · B[16, N], bf16 in, fp32 accumulators; one struct a width N.

Wgmma: A in registers, B in shared memory with rows of K. WgmmaShared: A in shared memory too; clears D first where `add` is 0.
WgmmaByColumns: A in registers, B in shared memory with rows of N.
"""
import pathlib


def struct(name, n, shared_a=False, by_columns=False):
    r = n // 2
    rows = lambda items, per, indent: (",\n" + " " * indent).join(", ".join(items[i:i + per]) for i in range(0, len(items), per))
    registers = [f"%{i}" for i in range(r)]
    lines = [", ".join(registers[i:i + 16]) for i in range(0, r, 16)]
    text = '"\n        "'.join(line + (", " if i + 1 < len(lines) else "") for i, line in enumerate(lines))
    constraints = rows([f'"+f"(d[{i}])' for i in range(r)], 6, 10)
    if shared_a:
        arguments, add = "uint64_t a, uint64_t b, int add", f"%{r + 2}"
        operands, flags = f"%{r}, %{r + 1}", "0, 0"
        inputs = '"l"(a), "l"(b), "r"(add)'
    else:
        arguments, add = "const uint32_t (&a)[4], uint64_t b", "1"
        operands, flags = f"{{%{r}, %{r + 1}, %{r + 2}, %{r + 3}}}, %{r + 4}", "1" if by_columns else "0"
        inputs = '"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)'
    return ["template <>", f"struct {name}<{n}> {{", f"  __device__ static void Multiply(float (&d)[{r}], {arguments}) {{",
            "    asm volatile(", f'        "{{\\n.reg .pred p;\\nsetp.ne.b32 p, {add}, 0;\\n"',
            f'        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{"', f'        "{text}"',
            f'        "}}, {operands}, p, 1, 1, {flags};\\n}}\\n"',
            f"        : {constraints}", f"        : {inputs});", "  }", "};", ""]


out = ["// Written by make_wgmma.py. Device code only.", "#pragma once", "", "#include <cstdint>", "", "namespace statetap::cuda {", ""]
for name in ("Wgmma", "WgmmaShared", "WgmmaByColumns"):
    out += ["template <int kWidth>", f"struct {name};", ""]
for n in range(8, 201, 8):
    out += struct("Wgmma", n)
for n in (32, 64, 128):
    out += struct("WgmmaShared", n, shared_a=True)
out += struct("WgmmaByColumns", 128, by_columns=True)
out += ["}  // namespace statetap::cuda"]
pathlib.Path(__file__).with_name("wgmma.h").write_text("\n".join(out) + "\n")
