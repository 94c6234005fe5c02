"""Launches captured in CUDA graphs and timed turn by turn, for scripts that compare libraries in one process."""
import statistics
import time

import torch


def graph_of(launch, count=1):
    for _ in range(3):
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            launch()
    return graph, count


def interleaved(graphs, repeats, rest, settle=0.0):
    """Median microseconds of a launch of each, turn by turn, so that all have the same clock and power; the first `settle` seconds do not count."""
    took, begun = {name: [] for name in graphs}, time.monotonic()
    while len(next(iter(took.values()))) < repeats:
        counts = time.monotonic() - begun >= settle
        for name, (graph, count) in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if counts:
                took[name].append(begin.elapsed_time(end) * 1e3 / count)
            time.sleep(rest)
    return {name: statistics.median(times) for name, times in took.items()}
