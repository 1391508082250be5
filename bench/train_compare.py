#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains small models that differ in their attention alone, and compares their held-out losses.

    bench/train_compare.py build/examples/vha_train --text FILE --plot train_compare.svg

All have the same sequences, steps, learning rates and seeds; the table, in markdown, has the mean over the
seeds and the standard deviation. Runs stand side by side, one thread each; the numbers do not depend on how
many. Tasks whose losses --results has already are not trained again.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys

Variant = collections.namedtuple("Variant", "name attention query_heads kv_heads")
Run = collections.namedtuple("Run", "parameters steps losses accuracies")  # the latter of held-out data

HELD_OUT = re.compile(r"held.out:? loss (\S+)  accuracy (\S+) %")
STEP = re.compile(r"step (\d+) ")
PARAMETERS = re.compile(r"(\d+) parameters")


def variants(heads):
    """What is compared, of a model that has `heads` query heads and half as many K/V heads in plain GQA."""
    half = heads // 2
    return [
        Variant(f"GQA, {half} K/V heads", "gqa", heads, half),
        Variant("VHA", "vha", heads, 2),
        Variant("GQA, 2 K/V heads", "gqa", heads, 2),
        Variant("Premix only", "premix", heads, 2),
        Variant("Postmix only, half the query heads", "postmix", half, 2),
        Variant("GQA, 2 K/V heads, half the query heads", "gqa", half, 2),
    ]


def train(program, variant, seed, flags):
    """One training: its held-out losses and accuracies in percent, by step."""
    command = [program, "--attention", variant.attention, "--query-heads", variant.query_heads,
               "--kv-heads", variant.kv_heads, "--seed", seed, "--threads", 1, *flags]
    command = [str(word) for word in command]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}")
    step, steps, losses, accuracies = 0, [], [], []
    for line in done.stdout.splitlines():
        if match := STEP.match(line):
            step = int(match[1])
        if match := HELD_OUT.search(line):
            steps.append(step)
            losses.append(float(match[1]))
            accuracies.append(float(match[2]))
    return Run(int(PARAMETERS.search(done.stdout)[1]), steps, losses, accuracies)


def mean_and_spread(values, digits):
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def steps_to_learn(run):
    """The first evaluation at which nine tenths were right; None where there is none."""
    return next((step for step, accuracy in zip(run.steps, run.accuracies) if accuracy >= 90), None)


def print_table(task, runs, head_dim):
    learns = any(steps_to_learn(run) for of_variant in runs.values() for run in of_variant)
    print(f"\n| {task} | query heads | K/V heads | parameters | cache | held-out loss | accuracy |"
          + (" steps to 90 % |" if learns else ""))
    print("|---" * (8 if learns else 7) + "|")
    for variant, of_variant in runs.items():
        loss = mean_and_spread([run.losses[-1] for run in of_variant], 4)
        accuracy = mean_and_spread([run.accuracies[-1] for run in of_variant], 1)
        cache = 2 * 2 * variant.kv_heads * head_dim  # keys and values, in bfloat16
        row = (f"| {variant.name} | {variant.query_heads} | {variant.kv_heads} | {of_variant[0].parameters} "
               f"| {cache} | {loss} | {accuracy} % |")
        if learns:
            steps = [steps_to_learn(run) for run in of_variant]
            row += f" {mean_and_spread(steps, 0)} |" if all(steps) else " not by all |"
        print(row)


def plot(pyplot, results, path):
    """The mean loss over the steps, and within a band of one standard deviation the seeds'."""
    figure, axes = pyplot.subplots(1, len(results), figsize=(6 * len(results), 4.5), squeeze=False)
    for axis, (task, runs) in zip(axes[0], results.items()):
        for variant, of_variant in runs.items():
            steps = of_variant[0].steps
            by_step = list(zip(*(run.losses for run in of_variant)))
            mean = [statistics.mean(losses) for losses in by_step]
            spread = [statistics.stdev(losses) for losses in by_step]
            line, = axis.plot(steps, mean, label=variant.name, linewidth=1.5)
            axis.fill_between(steps, [m - s for m, s in zip(mean, spread)],
                              [m + s for m, s in zip(mean, spread)], color=line.get_color(), alpha=0.15)
        axis.set(title=task, xlabel="steps", ylabel="held-out loss, nats per token")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", type=pathlib.Path, help="vha_train")
    parser.add_argument("--text", help="train on the bytes of this file, beside recall")
    parser.add_argument("--heads", type=int, default=8, help="query heads of GQA and VHA")
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each variant, two or more")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="trainings side by side")
    parser.add_argument("--plot", type=pathlib.Path, help="draw the losses to this SVG")
    parser.add_argument("--results", type=pathlib.Path, help="keep all losses, as JSON")
    parser.add_argument("--recall-flags", default="--steps 1200",
                        help="of vha_train, on recall")
    parser.add_argument("--text-flags", default="--tokens 128 --batch 16 --steps 1000",
                        help="of vha_train, on the text")
    parser.add_argument("--flags", default="--eval-every 50",
                        help="of vha_train, on both")
    arguments = parser.parse_args()
    if arguments.seeds < 2 or arguments.heads < 4 or arguments.heads % 4:
        parser.error("--seeds must be 2 or more, --heads a multiple of 4")
    if arguments.plot:  # before the runs, lest they be for nothing
        try:
            import matplotlib
            matplotlib.use("Agg")
            from matplotlib import pyplot
        except ImportError:
            sys.exit("--plot needs matplotlib (Debian: python3-matplotlib)")

    tasks = {"associative recall": arguments.recall_flags.split()}
    if arguments.text:
        tasks["bytes of a text"] = ["--text", arguments.text, *arguments.text_flags.split()]
    results = {}
    if arguments.results and arguments.results.exists():
        for task, kept in json.loads(arguments.results.read_text()).items():
            results[task] = {Variant(*entry["variant"]): [Run(*run) for run in entry["runs"]]
                             for entry in kept}
    compared = variants(arguments.heads)
    common = ["--head-dim", arguments.head_dim, *arguments.flags.split()]
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for task, flags in tasks.items():
            if task not in results:
                print(f"{task} ...", file=sys.stderr, flush=True)
                waited = {variant: [pool.submit(train, arguments.program, variant, seed, [*common, *flags])
                                    for seed in range(arguments.seeds)] for variant in compared}
                results[task] = {variant: [run.result() for run in runs] for variant, runs in waited.items()}
            print_table(task, results[task], arguments.head_dim)
    if arguments.results:
        kept = {task: [{"variant": variant, "runs": of_variant} for variant, of_variant in runs.items()]
                for task, runs in results.items()}
        arguments.results.write_text(json.dumps(kept, indent=1))
    if arguments.plot:
        plot(pyplot, results, arguments.plot)


if __name__ == "__main__":
    main()
