"""An interpreter with numpy and a data set in memory. A line in the FIFO `in` is an expression, its value goes to `out`."""

from __future__ import annotations

import hashlib
import os
import sys

import numpy as np

os.chdir(sys.argv[1])
random = np.random.default_rng(1)
height = random.normal(172, 9, 100_000)
weight = 0.9 * height - 83 + random.normal(0, 11, height.size)


def digest() -> str:
    """What is in memory, in one word."""
    return hashlib.sha256(height.tobytes() + weight.tobytes()).hexdigest()[:12]


def slope(seed: int) -> float:
    """Kilograms for a centimetre, of one sample drawn with replacement."""
    chosen = np.random.default_rng(seed).integers(0, height.size, height.size)
    return round(float(np.polyfit(height[chosen], weight[chosen], 1)[0]), 6)


for fifo in ("in", "out"):
    os.mkfifo(fifo)
while True:
    with open("in") as questions:
        question = questions.readline()
    if question:
        with open("out", "w") as answers:
            print(eval(question), file=answers)
