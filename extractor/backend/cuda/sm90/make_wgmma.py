#!/usr/bin/env python3
"""Writes wgmma.h: D[64, N] += A[64, 16] (registers) · B[16, N] (shared memory, K-major), bf16 in, fp32 accumulators; one struct a width."""
import pathlib
out = ["// Written by make_wgmma.py. Device code only.", "#pragma once", "", "#include <cstdint>", "", "namespace statetap::cuda {", "",
       "template <int kWidth>", "struct Wgmma;", ""]
for n in range(8, 201, 8):
    r = n // 2
    rows = lambda items, per, indent: (",\n" + " " * indent).join(", ".join(items[i:i + per]) for i in range(0, len(items), per))
    registers = [f"%{i}" for i in range(r)]
    lines = [", ".join(registers[i:i + 16]) for i in range(0, r, 16)]
    text = '"\n        "'.join(line + (", " if i + 1 < len(lines) else "") for i, line in enumerate(lines))
    constraints = rows([f'"+f"(d[{i}])' for i in range(r)], 6, 10)
    out += ["template <>", f"struct Wgmma<{n}> {{", f"  __device__ static void Multiply(float (&d)[{r}], const uint32_t (&a)[4], uint64_t b) {{",
            "    asm volatile(", '        "{\\n.reg .pred p;\\nsetp.ne.b32 p, 1, 0;\\n"',
            f'        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{"', f'        "{text}"',
            f'        "}}, {{%{r}, %{r + 1}, %{r + 2}, %{r + 3}}}, %{r + 4}, p, 1, 1, 0;\\n}}\\n"',
            f"        : {constraints}", '        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));', "  }", "};", ""]
out += ["}  // namespace statetap::cuda"]
pathlib.Path(__file__).with_name("wgmma.h").write_text("\n".join(out) + "\n")
