#!/usr/bin/env python3
"""One layer's routed FFN of a rank of eight beside Humming 0.1.20 (INT4) and torch._grouped_mm (bf16 weights), whole chains, in one run, turn by turn.

    routed_ffn_peers.py libstatetap_peers.so --layout expert --tokens 1024,8192,32768 [--zipf 0.5] [--sustained] [--json FILE]

Ours sorts, gathers, multiplies and sums within its time. The others are given sorted rows, and their gather, activation and ordered sum, in Triton,
touch local rows alone. Humming's chains: indexed (its own heuristics, no gather), grouped (gather, then for either product the fastest of a few
schedules, chosen here by time), mixed (indexed gate and up, an activation that permutes, grouped down); "best" is the fastest of the three.
Random data; of every chain 64 tokens are compared with fp32 and all tokens with ours, into poisoned buffers. Bursts rest between launches; --sustained
runs back to back until the power cap holds. Gate and up of ours alone, and 8192^3 beside it, are timed by torch's profiler.
--zipf S: expert of popularity rank r is chosen ~ r^-S; experts are placed on the ranks by the load that another sample shows (`placement`, of this bench
alone), and the busiest rank is timed, beside ours with uniform routing on its busiest rank.

Needs an H100 or H200, torch >= 2.11 and the package humming-kernels on PYTHONPATH, whose kernels are compiled at first use.
"""
import argparse
import concurrent.futures
import ctypes
import json
import math
import re
import statistics
import sys
import time

import torch
import triton
import triton.language as tl
from graph_timing import graph_of, interleaved

DEV, BF, GROUP, HIDDEN, TOP_K, EXPERTS, RANKS = "cuda", torch.bfloat16, 32, 7168, 8, 384, 8
TOLERANCE = 0.01  # of relative errors: bf16 results are within 0.005
TILE_ROWS = (32, 48, 56, 64, 96, 128, 144, 160, 176, 184, 192)  # of Humming's grouped schedules


def say(text):
    print(text, file=sys.stderr, flush=True)


def relative(got, want):
    """|got - want| / |want|, NaN if anything is NaN; in pieces, since whole copies in fp32 would be large."""
    apart = sum((g.float() - w.float()).square().sum(dtype=torch.float64) for g, w in zip(got.split(4096), want.split(4096)))
    return math.sqrt(float(apart / sum(w.float().square().sum(dtype=torch.float64) for w in want.split(4096))))


# ---- data ----------------------------------------------------------------------------------------------------------------------------------------
def random_weights(experts, rows, cols, seed):
    generator = torch.Generator(device=DEV).manual_seed(seed)
    words = torch.randint(-2**31, 2**31 - 1, (experts, rows, cols // 8), generator=generator, device=DEV, dtype=torch.int64).to(torch.int32)
    scales = (torch.randn((experts, rows, cols // GROUP), generator=generator, device=DEV) * 0.3).exp_() / (4.61 * math.sqrt(cols))
    return words, scales.to(BF)


def dequantised(words, scales):
    """fp32; a nibble is its value + 8, the low nibble first."""
    shift = torch.arange(0, 32, 4, device=words.device, dtype=torch.int32)
    return (((words.unsqueeze(-1) >> shift) & 15) - 8).flatten(-2).float() * scales.float().repeat_interleave(GROUP, -1)


def random_routing(tokens, exponent, seed):
    """ids [tokens, TOP_K], chosen without replacement ~ rank^-exponent, and weights that sum to one."""
    generator = torch.Generator(device=DEV).manual_seed(seed)
    popularity = torch.arange(1, EXPERTS + 1, dtype=torch.float32)[torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(7))] ** -exponent
    uniform = torch.rand((tokens, EXPERTS), generator=generator, device=DEV).clamp_(1e-9, 1 - 1e-7)
    ids = (popularity.to(DEV).log() - (-uniform.log()).log()).topk(TOP_K, 1).indices
    weights = torch.rand((tokens, TOP_K), generator=generator, device=DEV) + 0.1
    return ids, weights / weights.sum(1, keepdim=True)


def load_of(ids):
    return torch.bincount(ids.reshape(-1), minlength=EXPERTS).cpu()


def blocks():
    return torch.arange(EXPERTS).view(RANKS, -1).tolist()


def placement(load):
    """The experts of each rank, equally many: the most loaded first, each to the least loaded rank with room; then the busiest and the idlest rank swap
    the two experts that even them out best, while that helps."""
    load, ranks, sums = load.tolist(), [[] for _ in range(RANKS)], [0] * RANKS
    for expert in sorted(range(EXPERTS), key=lambda e: -load[e]):
        rank = min((r for r in range(RANKS) if len(ranks[r]) < EXPERTS // RANKS), key=lambda r: sums[r])
        ranks[rank].append(expert)
        sums[rank] += load[expert]
    while True:
        busy, idle = sums.index(max(sums)), sums.index(min(sums))
        gap = sums[busy] - sums[idle]
        give, take = min(((g, t) for g in ranks[busy] for t in ranks[idle]), key=lambda pair: abs(gap - 2 * (load[pair[0]] - load[pair[1]])))
        moved = load[give] - load[take]
        if not 0 < moved < gap:
            return [sorted(r) for r in ranks]
        ranks[busy][ranks[busy].index(give)], ranks[idle][ranks[idle].index(take)] = take, give
        sums[busy], sums[idle] = sums[busy] - moved, sums[idle] + moved


def busiest(ranks, load):
    """The rank with the most rows, and its rows over the mean."""
    rows = [int(load[experts].sum()) for experts in ranks]
    return ranks[rows.index(max(rows))], max(rows) * RANKS / sum(rows)


def renumbered(ids, local):
    """Experts of `local` become 0, 1, …, the others follow."""
    others = sorted(set(range(EXPERTS)) - set(local))
    number = torch.empty(EXPERTS, dtype=torch.int64)
    number[torch.tensor(local + others)] = torch.arange(EXPERTS)
    return number.to(ids.device)[ids]


class Problem:
    """A routing as the others want it: pairs of token and choice in the order of their experts, those of other ranks (ids >= experts) left out."""

    def __init__(self, ids, weights, experts):
        self.ids, self.weights, self.experts, self.tokens = ids.int().contiguous(), weights.contiguous(), experts, len(ids)
        flat = ids.reshape(-1)
        self.counts = torch.bincount(flat, minlength=EXPERTS)[:experts]
        self.rows = int(self.counts.sum())
        self.pair_of_row = torch.argsort(flat, stable=True)[: self.rows].int()
        self.row = torch.arange(self.rows, device=ids.device, dtype=torch.int32)
        pair = torch.arange(flat.numel(), device=ids.device, dtype=torch.int32)
        self.pair_here = torch.where(flat < experts, pair, -1)  # [pairs]; -1 where another rank has the expert
        self.row_of_pair = torch.full_like(pair, -1)
        self.row_of_pair[self.pair_of_row.long()] = self.row
        self.offsets = torch.nn.functional.pad(self.counts.cumsum(0), (1, 0)).int()  # [experts + 1]

    def padded(self, block):
        """Pairs with each expert's padded to whole blocks, the expert of each block, and the length, for the indexed kernels."""
        blocks = (self.counts + block - 1) // block
        start = (blocks.cumsum(0) - blocks) * block - self.offsets[:-1]
        total = int(blocks.sum()) * block
        pairs = torch.full((total,), self.ids.numel(), dtype=torch.int32, device=self.ids.device)
        pairs[self.row.long() + start.repeat_interleave(self.counts)] = self.pair_of_row
        block_expert = torch.arange(self.experts, device=self.ids.device, dtype=torch.int32).repeat_interleave(blocks)
        return pairs, block_expert, torch.tensor([total], dtype=torch.int32, device=self.ids.device)


# ---- what the others' chains need beside their products ------------------------------------------------------------------------------------------
@triton.jit
def gather_kernel(x, row_of_pair, to, N, K: tl.constexpr, BN: tl.constexpr):  # a token is read once and written to its rows
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    value = tl.load(x + t * N + c, mask=c < N)
    for j in tl.static_range(K):
        row = tl.load(row_of_pair + t * K + j).to(tl.int64)
        tl.store(to + row * N + c, value, mask=(c < N) & (row >= 0))


@triton.jit
def swiglu_kernel(h, a, source, target, rows, N, BR: tl.constexpr, BN: tl.constexpr):  # a[target[r]] = silu(gate) · up of h[source[r]]
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    s = tl.load(source + r, mask=r < rows, other=0).to(tl.int64)[:, None]
    t = tl.load(target + r, mask=r < rows, other=0).to(tl.int64)[:, None]
    c = (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    here = (r < rows)[:, None] & (c < N)
    gate = tl.load(h + s * 2 * N + c, mask=here, other=0.0).to(tl.float32)
    up = tl.load(h + s * 2 * N + N + c, mask=here, other=0.0).to(tl.float32)
    tl.store(a + t * N + c, (gate * tl.sigmoid(gate) * up).to(tl.bfloat16), mask=here)


@triton.jit
def sum_kernel(y, weights, place, out, N, K: tl.constexpr, BN: tl.constexpr):  # in the order of a token's choices; place < 0: another rank's
    t = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BN,), tl.float32)
    for j in tl.static_range(K):
        row = tl.load(place + t * K + j).to(tl.int64)
        total += tl.load(y + row * N + c, mask=(c < N) & (row >= 0), other=0.0).to(tl.float32) * tl.load(weights + t * K + j)
    tl.store(out + t * N + c, total.to(tl.bfloat16), mask=c < N)


def gather(problem, x, to):
    gather_kernel[(problem.tokens, triton.cdiv(HIDDEN, 1024))](x, problem.row_of_pair, to, HIDDEN, K=TOP_K, BN=1024)


def swiglu(problem, h, a, source, target):
    width = a.shape[1]
    columns = min(width, 1024)
    rows = 1024 // columns
    swiglu_kernel[(triton.cdiv(problem.rows, rows), triton.cdiv(width, columns))](h, a, source, target, problem.rows, width, BR=rows, BN=columns)


def weighted_sum(problem, y, place, out):
    sum_kernel[(problem.tokens, triton.cdiv(HIDDEN, 1024))](y, problem.weights, place, out, HIDDEN, K=TOP_K, BN=1024)


# ---- contenders ----------------------------------------------------------------------------------------------------------------------------------
class Ours:
    def __init__(self, path, layer):
        library = ctypes.CDLL(path)
        library.statetap_ffn_create.restype = ctypes.c_void_p
        self.run_ffn, pointer = library.statetap_ffn_run, lambda tensor: ctypes.c_void_p(tensor.data_ptr())
        self.ffn = ctypes.c_void_p(library.statetap_ffn_create(layer.experts, HIDDEN, layer.width, *map(pointer, (*layer.up, *layer.down))))

    def run(self, problem, x, out):
        pointer = lambda tensor: ctypes.c_void_p(tensor.data_ptr())
        self.run_ffn(self.ffn, pointer(x), pointer(problem.ids), pointer(problem.weights), problem.tokens, TOP_K, pointer(out),
                     ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))


def tiled(rows, stream_k, ctas=1, warp_columns=32):
    """A schedule with TMA and producer warps; the epilogue has a buffer of its own where shared memory has room beside four stages."""
    return dict(mma_type="wgmma", block_shape=(rows, 256, 64), warp_shape=(rows, warp_columns, 64), num_stages=4, num_ctas_per_sm=ctas, use_warp_spec=True,
                use_tma=True, use_stream_k=stream_k, smem_reuse_mode="none" if rows < 192 else "all_stages", producer_stage_unroll=1,
                wgmma_split_issue_wait=True, raster_group_m=4)


def grouped_schedules(counts, depth):
    """Those worth timing: the tiles whose blocks cost least with these rows of each expert, with and without stream-K where there is a depth to split."""
    cost = lambda rows: int(((counts + rows - 1) // rows).sum()) * (rows + 32)
    cheapest = sorted(TILE_ROWS, key=cost)
    schedules = [tiled(rows, stream_k) for rows in cheapest[:5] for stream_k in ((True, False) if depth > 512 else (False,))]
    if depth <= 512:
        schedules += [tiled(rows, False, 2, columns) for rows in [r for r in cheapest if r in (48, 56, 64)][:2] for columns in (32, 64)]
    return schedules


def named(schedule):
    parts = ["x".join(map(str, schedule["block_shape"])), "x".join(map(str, schedule["warp_shape"])), f"{schedule.get('num_ctas_per_sm', 1)} CTA"]
    parts += ["TMA"] if schedule.get("use_tma") else []
    parts += ["stream-K"] if schedule.get("use_stream_k", True) else []
    return " ".join(parts)


class Humming:
    """One product of every expert; kernels are compiled ahead in `pool`."""

    def __init__(self, pool, words, scales):
        from humming.layer import HummingLayer
        self.pool, self.kernels = pool, {}
        experts, rows, self.depth = words.shape[0], words.shape[1], words.shape[2] * 8
        with torch.device(DEV):
            layer = HummingLayer(shape_n=rows, shape_k=self.depth, num_experts=experts, torch_dtype=BF,
                                 weight_config={"dtype": "uint4", "group_size": GROUP, "scale_dtype": "bfloat16"})
        self.layer = layer.cuda()
        self.layer.load_from_tensors({"weight": words, "weight_scale": scales})
        self.layer.transform()
        self.locks = torch.zeros(1 << 16, dtype=torch.int32, device=DEV)

    def default(self, problem, kind):
        from humming.tune import get_heuristics_config
        return dict(get_heuristics_config(self.layer.humming_config, shape_m=problem.rows, gemm_type=kind))

    def candidates(self, problem):
        return [self.default(problem, "grouped_contiguous")] + grouped_schedules(problem.counts.cpu(), self.depth)

    def kernel(self, kind, schedule):
        """A future of the compiled kernel."""
        key = kind, json.dumps(schedule, sort_keys=True)
        if key not in self.kernels:
            self.kernels[key] = self.pool.submit(self.compiled, kind, schedule)
        return self.kernels[key]

    def compiled(self, kind, schedule):
        from humming.kernel.humming import HummingKernel
        kernels = HummingKernel.prepare_kernels(self.layer.humming_config.to_str(), json.dumps({"gemm_type": kind}), [[0, 1 << 30, schedule]])
        return kernels.reshape(-1, 4)[0].clone()

    def run(self, kernel, x, out, top_k=1, sorted_ids=None, expert_ids=None, num_tokens_padded=None, expert_layout=None):
        from humming import ops
        ops.launch_kernel(configs=kernel, inputs=x, weight=self.layer.weight, weight_scale=self.layer.weight_scale, outputs=out, sorted_ids=sorted_ids,
                          expert_ids=expert_ids, num_tokens_padded=num_tokens_padded, expert_layout=expert_layout, locks=self.locks, top_k=top_k)

    def indexed(self, problem, top_k):
        """A launch(x, out) by Humming's own heuristics."""
        schedule = self.default(problem, "indexed")
        kernel, padded = self.kernel("indexed", schedule).result(), problem.padded(schedule["block_shape"][0])
        return (lambda x, out: self.run(kernel, x, out, top_k, *padded)), named(schedule)

    def fastest_grouped(self, problem, x, out, want, rest):
        """The launch(x, out) of the candidate that takes least, its name and its microseconds. Says which ones are out, and why."""
        graphs, launches = {}, {}
        for schedule in self.candidates(problem):
            name = named(schedule)
            if name in graphs:
                continue
            try:
                kernel = self.kernel("grouped_contiguous", schedule).result()
                launch = lambda x, out, kernel=kernel: self.run(kernel, x, out, expert_layout=problem.offsets)
                self.locks.zero_()
                out.fill_(math.nan)
                launch(x, out)
                error = relative(out, want)
                if not error < TOLERANCE:
                    raise ArithmeticError(f"relative error {error:.3g}")
                graphs[name], launches[name] = graph_of(lambda launch=launch: launch(x, out)), launch
            except Exception as error:  # whatever a schedule dies of, the others are still to be timed
                say(f"  OUT: {name} (depth {self.depth}, {problem.rows} rows): {type(error).__name__}: {str(error).strip()[:300]}")
        if not graphs:
            return None, "none", math.nan
        us = interleaved(graphs, 7, rest)
        best = min(us, key=us.get)
        say(f"  depth {self.depth}: " + ", ".join(f"{name} {us[name]:.0f}" for name in sorted(us, key=us.get)))
        return launches[best], best, us[best]


class Layer:
    def __init__(self, layout):
        self.experts, self.width = {"tensor": (EXPERTS, 256), "expert": (EXPERTS // RANKS, 2048)}[layout]
        self.up, self.down = random_weights(self.experts, 2 * self.width, HIDDEN, 1), random_weights(self.experts, HIDDEN, self.width, 2)

    def in_bf16(self):
        """Gate and up, down: [experts, depth, columns]."""
        return [torch.stack([dequantised(*of_expert).to(BF) for of_expert in zip(*weights)]).transpose(1, 2) for weights in (self.up, self.down)]

    def reference(self, problem, x, sample):
        ids, weights = problem.ids[sample], problem.weights[sample]
        out = torch.zeros((len(sample), HIDDEN), device=x.device)
        for e in [e for e in ids.unique().tolist() if e < self.experts]:
            t, j = (ids == e).nonzero(as_tuple=True)
            gate, up = (x[sample[t]].float() @ dequantised(self.up[0][e], self.up[1][e]).T).chunk(2, 1)
            product = (torch.nn.functional.silu(gate) * up) @ dequantised(self.down[0][e], self.down[1][e]).T
            out.index_add_(0, t, product * weights[t, j].unsqueeze(1))
        return out


# ---- timing --------------------------------------------------------------------------------------------------------------------------------------
def profiled(launch, matmul, repeats, rest):
    """Median microseconds of our gate and up, our down, and `matmul`, kernel by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            launch()
            matmul()
            torch.cuda.synchronize()
            time.sleep(rest)
    kernels = sorted((e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA), key=lambda e: e.time_range.start)
    products = [e for e in kernels if re.search("HopperKernel|FewRowsKernel", e.name)]
    others = [e for e in kernels if re.search("gemm|nvjet|cutlass", e.name) and e not in products]
    if len(products) != 2 * repeats or len(others) != repeats:
        raise RuntimeError(f"{len(products)} products and {len(others)} matmuls of {repeats} runs among {sorted({e.name[:80] for e in kernels})}")
    median = lambda events: statistics.median(e.time_range.elapsed_us() for e in events)
    return {"gate-up": median(products[0::2]), "down": median(products[1::2]), "matmul": median(others)}


class Bench:
    def __init__(self, args):
        self.args, self.layer = args, Layer(args.layout)
        self.duty = (60, 0.0, 2.0) if args.sustained else (25, 0.02, 0.0)  # repeats, seconds of rest, seconds that do not count
        self.pool = concurrent.futures.ThreadPoolExecutor(16)
        self.up, self.down = (Humming(self.pool, *weights) for weights in (self.layer.up, self.layer.down))
        self.problems = {tokens: self.routed(tokens) for tokens in args.tokens}
        for problem, _ in self.problems.values():
            for product in (self.up, self.down):
                product.kernel("indexed", product.default(problem, "indexed"))
                for schedule in product.candidates(problem):
                    product.kernel("grouped_contiguous", schedule)
        self.ours = Ours(args.library, self.layer)
        self.bf16_up, self.bf16_down = self.layer.in_bf16()
        a, b, c = (torch.randn(8192, 8192, device=DEV).to(BF) for _ in range(3))
        self.matmul = lambda: torch.mm(a, b, out=c)

    def routed(self, tokens):
        """The problem, and what is to be said of it."""
        ids, weights = random_routing(tokens, self.args.zipf or 0.0, 1000 + tokens)
        said = {}
        if self.args.zipf and self.layer.experts < EXPERTS:
            ranks, load = placement(load_of(random_routing(32768, self.args.zipf, 5)[0])), load_of(ids)
            local, said["busiest rank over mean"] = busiest(ranks, load)
            said["busiest rank over mean, experts in blocks"] = busiest(blocks(), load)[1]
            ids = renumbered(ids, local)
        problem = Problem(ids, weights, self.layer.experts)
        said["busiest expert over mean"] = float(problem.counts.max() / problem.counts.float().mean())
        return problem, said

    def measure(self, tokens):
        (problem, said), layer, new = self.problems[tokens], self.layer, lambda *shape: torch.empty(shape, device=DEV, dtype=BF)
        pairs, ends = tokens * TOP_K, problem.offsets[1:].clone()
        repeats, rest, settle = self.duty
        x, out = torch.randn((tokens, HIDDEN), device=DEV).to(BF), new(tokens, HIDDEN)
        xs, h, a, y = buffers = new(problem.rows, HIDDEN), new(pairs, 2 * layer.width), new(pairs, layer.width), new(pairs, HIDDEN)
        hs, gs, ys = h[: problem.rows], a[: problem.rows], y[: problem.rows]  # of the chains with rows in the order of their experts

        gather(problem, x, xs)
        want_h = torch._grouped_mm(xs, self.bf16_up, offs=ends)
        want_a = new(problem.rows, layer.width)
        swiglu(problem, want_h, want_a, problem.row, problem.row)
        want_y = torch._grouped_mm(want_a, self.bf16_down, offs=ends)
        indexed_up, up_name = self.up.indexed(problem, TOP_K)
        indexed_down, down_name = self.down.indexed(problem, 1)
        grouped_up, best_up, up_us = self.up.fastest_grouped(problem, xs, hs, want_h, rest)
        grouped_down, best_down, down_us = self.down.fastest_grouped(problem, want_a, ys, want_y, rest)
        del want_h, want_a, want_y

        def indexed():
            indexed_up(x, h)
            swiglu(problem, h, a, problem.pair_of_row, problem.pair_of_row)
            indexed_down(a, y)
            weighted_sum(problem, y, problem.pair_here, out)

        def grouped():
            gather(problem, x, xs)
            grouped_up(xs, hs)
            swiglu(problem, hs, gs, problem.row, problem.row)
            grouped_down(gs, ys)
            weighted_sum(problem, ys, problem.row_of_pair, out)

        def mixed():
            indexed_up(x, h)
            swiglu(problem, h, gs, problem.pair_of_row, problem.row)
            grouped_down(gs, ys)
            weighted_sum(problem, ys, problem.row_of_pair, out)

        def grouped_mm():
            gather(problem, x, xs)
            swiglu(problem, torch._grouped_mm(xs, self.bf16_up, offs=ends), gs, problem.row, problem.row)
            weighted_sum(problem, torch._grouped_mm(gs, self.bf16_down, offs=ends), problem.row_of_pair, out)

        chains = {"ours": lambda: self.ours.run(problem, x, out), "indexed": indexed, "grouped": grouped, "mixed": mixed, "grouped_mm": grouped_mm}
        if not (grouped_up and grouped_down):
            del chains["grouped"], chains["mixed"]
        errors = self.checked(problem, x, out, buffers, chains)
        if self.args.zipf:
            ids, weights = random_routing(tokens, 0.0, 2000 + tokens)
            if layer.experts < EXPERTS:
                ids = renumbered(ids, busiest(blocks(), load_of(ids))[0])
            even = Problem(ids, weights, layer.experts)
            chains["ours, uniform"] = lambda: self.ours.run(even, x, out)
            said["rows, uniform"] = even.rows
        count = max(1, 4096 // tokens)
        graphs = {name: graph_of(launch, count) for name, launch in chains.items()} | {"8192^3": graph_of(self.matmul)}
        us = interleaved(graphs, repeats, rest, settle)
        best = min((name for name in ("indexed", "grouped", "mixed") if name in us), key=us.get)
        result = {"layout": self.args.layout, "zipf": self.args.zipf, "tokens": tokens, "rows": problem.rows,
                  "duty": "sustained" if self.args.sustained else "burst",
                  "us": us, "best humming": best, "humming/ours": us[best] / us["ours"],
                  "grouped_mm/ours": us.get("grouped_mm", math.nan) / us["ours"], "errors": errors,
                  "schedules": {"indexed": [up_name, down_name], "grouped": [best_up, best_down]}, "grouped products us": [up_us, down_us],
                  "TF": {name: 6 * problem.rows * layer.width * HIDDEN / time / 1e6 for name, time in us.items() if name in errors}
                  | {"8192^3": 2 * 8192**3 / us["8192^3"] / 1e6}} | said
        if self.args.zipf:
            result["skewed/uniform"] = us["ours"] / us["ours, uniform"]
        return result

    def products(self, tokens):
        """Our two products alone beside 8192^3, by the profiler; last, since it may slow what is launched after it."""
        problem, (repeats, rest, _) = self.problems[tokens][0], self.duty
        x, out = (torch.randn((tokens, HIDDEN), device=DEV).to(BF) for _ in range(2))
        us = profiled(lambda: self.ours.run(problem, x, out), self.matmul, repeats, rest)
        flops = 4 * problem.rows * self.layer.width * HIDDEN
        return {"tokens": tokens, "profiled us": us, "gate-up/8192^3": flops / us["gate-up"] * us["matmul"] / (2 * 8192**3)}

    def checked(self, problem, x, out, buffers, chains):
        """Relative errors of each chain: of 64 tokens against fp32, of all against ours. Another's chain that is wrong is dropped; ours may not be."""
        sample = torch.randperm(problem.tokens, generator=torch.Generator().manual_seed(3))[:64].to(DEV)
        want, errors = self.layer.reference(problem, x, sample), {}
        for name, launch in list(chains.items()):
            for buffer in (*buffers, out):
                buffer.fill_(math.nan)
            launch()
            torch.cuda.synchronize()
            if name == "ours":
                ours = out.clone()
            error = {"fp32": relative(out[sample], want), "ours": relative(out, ours)}
            if all(e < TOLERANCE for e in error.values()):
                errors[name] = error
            elif name == "ours":
                raise ArithmeticError(f"ours, {problem.tokens} tokens: relative errors {error}, more than {TOLERANCE}")
            else:
                say(f"  OUT: {name}, {problem.tokens} tokens: relative errors {error}, more than {TOLERANCE}")
                del chains[name]
        return errors


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("library")
    ap.add_argument("--layout", choices=["expert", "tensor"], default="expert", help="48 experts of width 2048, or 384 of 256 [expert]")
    ap.add_argument("--tokens", type=lambda text: [int(t) for t in text.split(",")], default=[1024, 2048, 4096, 8192, 16384, 32768],
                    help="sizes to time, of at most 32768 [1024 to 32768]")
    ap.add_argument("--zipf", type=float, metavar="S", help="exponent [uniform routing]")
    ap.add_argument("--sustained", action="store_true", help="no rest between launches")
    ap.add_argument("--json", help="a line a size is appended")
    args = ap.parse_args()
    if max(args.tokens) > 32768:
        ap.error(f"--tokens {max(args.tokens)}: the library plans for 32768")
    torch.backends.cuda.matmul.allow_tf32 = False
    begun = time.monotonic()
    bench = Bench(args)
    concurrent.futures.wait([future for product in (bench.up, bench.down) for future in product.kernels.values()])
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {len(bench.up.kernels) + len(bench.down.kernels)} kernels of Humming's ready after "
        f"{time.monotonic() - begun:.0f} s")
    results = []

    def report(result):
        say(f"after {time.monotonic() - begun:.0f} s: {json.dumps(result)}")
        if args.json:
            with open(args.json, "a") as file:
                file.write(json.dumps(result) + "\n")

    for tokens in args.tokens:
        results.append(bench.measure(tokens))
        report(results[-1])
        torch.cuda.empty_cache()
    try:
        for result in results:
            result |= (products := bench.products(result["tokens"]))
            report({"layout": args.layout} | products)
    except RuntimeError as error:  # no profiler on this machine: the chains' times stand
        say(f"NOT MEASURED: our gate and up alone: {error}")
    columns = list(dict.fromkeys(name for r in results for name in r["us"])) + ["humming/ours", "grouped_mm/ours", "gate-up/8192^3"]
    columns += ["skewed/uniform"] if args.zipf else []
    say("| tokens | " + " | ".join(columns) + " |\n" + "|---:" * (len(columns) + 1) + "|")
    for r in results:
        say(f"| {r['tokens']} | " + " | ".join(f"{r['us'][c]:.0f}" if c in r["us"] else f"{r.get(c, math.nan):.3f}" for c in columns) + " |")
    large = [r["humming/ours"] for r in results if r["tokens"] >= 4096]
    if large:
        say(f"geometric mean of Humming's best / ours from 4,096 tokens: {statistics.geometric_mean(large):.3f} ({results[0]['duty']}, {args.layout})")


if __name__ == "__main__":
    main()
