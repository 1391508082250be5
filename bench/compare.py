#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the benchmark programs and prints a table, peer by peer, in markdown.

    bench/compare.py build/bench                     # the table
    bench/compare.py build/bench --plot growth.svg   # and the growth of the time per token
    bench/compare.py build/bench --only core         # the programs whose name has "core" in it

Each row is one piece of work on one thread count: our time, the share of the bound that the program
measured around the runs, and each peer's time; the ratio is the fastest peer's time over ours. Flags that it
does not know go to the programs: --threads=1,2 --rounds=5 --peers=NAME,NAME --benchmark_filter=REGEX.
"""

import argparse
import collections
import json
import pathlib
import subprocess
import sys
import tempfile

PROGRAMS = ["matrix_product", "attention_core", "attention_layer", "premix_postmix", "fold", "training_step"]
OURS = "vha"
Row = collections.namedtuple("Row", "seconds counters error")


def run(program, arguments):
    """The program's results, as Google Benchmark writes them."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "results.json")
        print(f"{program.name} ...", file=sys.stderr, flush=True)
        subprocess.run(
            [program, f"--benchmark_out={out}", "--benchmark_out_format=json", *arguments],
            stdout=subprocess.DEVNULL, check=True)
        return json.loads(out.read_text() or '{"context": {}, "benchmarks": []}')  # empty where nothing ran


def collect(results):
    """{work: {contender: Row}}, in the order of the runs."""
    works = {}
    for result in results["benchmarks"]:
        path = result["name"].split("/iterations:")[0]
        work, contender = path.rsplit("/", 1)
        counters = {k: v for k, v in result.items() if isinstance(v, (int, float))}
        error = result.get("error_message")
        seconds = None if error else result["real_time"] * 1e-3
        works.setdefault(work, {})[contender] = Row(seconds, counters, error)
    return works


def milliseconds(row):
    if row is None:
        return ""
    if row.error:
        return "failed"
    text = f"{row.seconds * 1e3:.3g} ms" if row.seconds < 1 else f"{row.seconds:.3g} s"
    rate = row.counters.get("GB/s")
    return f"{text}, {rate:.3g} GB/s" if rate else f"{text}, {row.counters['GFLOP/s']:.3g} GFLOP/s"


def is_form_of_ours(contender):
    """Other layers and forms of our own, measured beside the one that the peers are held against."""
    return contender.startswith(("vha_", "gqa_"))


def print_table(works, peers):
    """One line for each piece of work; returns the errors and disturbances to be told below it."""
    notes = []
    print("| work | ours | share of bound |" + "".join(f" {p} |" for p in peers) + " ratio |")
    print("|---|---|---|" + "---|" * (len(peers) + 1))
    for work, rows in works.items():
        rivals = [rows[p].seconds for p in peers if p in rows and rows[p].seconds]
        for contender, row in rows.items():
            if row.error:
                notes.append(f"{work}, {contender}: {row.error}")
            elif row.counters.get("disturbed"):
                notes.append(f"{work}, {contender}: the machine was not quiet")
            if contender != OURS and not is_form_of_ours(contender):
                continue
            is_ours = contender == OURS
            cells = [work if is_ours else f"{work}, {contender}", milliseconds(row),
                     "" if row.error else f"{row.counters['share']:.0%}"]
            cells += [milliseconds(rows.get(p)) if is_ours else "" for p in peers]
            ratio = min(rivals) / row.seconds if rivals and is_ours and row.seconds else None
            cells.append(f"{ratio:.2f}" if ratio else "")
            print("| " + " | ".join(cells) + " |")
    return notes


def plot(pyplot, works, path):
    """Milliseconds per token over the context, one line for each element and thread count."""
    kinds = {"growth_prefill": ("prefill, last block of 512 tokens", 512),
             "growth_decode": ("decode", 1)}
    figure, axes = pyplot.subplots(1, len(kinds), figsize=(10, 4))
    for axis, (kind, (title, tokens)) in zip(axes, kinds.items()):
        lines = collections.defaultdict(list)
        for work, rows in works.items():
            name, context, element, threads = work.split("/")
            row = rows[OURS]
            if name == kind and not row.error:
                point = (int(context.split(":")[1]) / 1024, row.seconds * 1e3 / tokens)
                lines[f"{element}, {threads.replace(':', ' ')}"].append(point)
        for label, points in lines.items():
            axis.plot(*zip(*sorted(points)), marker="o", markersize=3, label=label)
        axis.set(title=title, xlabel="context, K tokens", ylabel="ms per token", xlim=0, ylim=0)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle("Attention core of the 1.7B layer")
    figure.tight_layout()
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=pathlib.Path, help="where the benchmark programs are")
    parser.add_argument("--only", default="", help="run the programs with this in their names")
    parser.add_argument("--plot", type=pathlib.Path, help="run growth, and draw it to this SVG")
    parser.add_argument("--results", type=pathlib.Path, help="keep all measurements, as JSON")
    arguments, flags = parser.parse_known_args()

    if arguments.plot:  # before the runs, lest they be for nothing
        try:
            import matplotlib
            matplotlib.use("Agg")
            from matplotlib import pyplot
        except ImportError:
            sys.exit("--plot needs matplotlib (Debian: python3-matplotlib)")

    works, context = {}, None
    for name in PROGRAMS:
        if arguments.only not in name:
            continue
        results = run(arguments.build / name, flags)
        context = context or results["context"]
        works.update(collect(results))
    if works:
        peers = []
        for rows in works.values():
            peers += [c for c in rows if c != OURS and not is_form_of_ours(c) and c not in peers]
        for key in sorted(context):
            if key == "machine" or key.startswith(("peaks", "peer")):
                print(f"{key}: {context[key]}  ")
        print()
        notes = print_table(works, peers)
        print("\nRatio: the fastest peer's time over ours. Medians; all ran in turn.")
        for note in notes:
            print(f"- {note}")
    if arguments.plot:
        growth = collect(run(arguments.build / "growth", flags))
        works.update(growth)
        plot(pyplot, growth, arguments.plot)
    if arguments.results:
        rows = {work: {c: row._asdict() for c, row in rows.items()} for work, rows in works.items()}
        arguments.results.write_text(json.dumps({"context": context, "works": rows}, indent=1))


if __name__ == "__main__":
    main()
