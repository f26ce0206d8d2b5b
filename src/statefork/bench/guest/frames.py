"""A warm numpy and pandas interpreter: a frame of a million rows, a model fitted on it, asked through two FIFOs."""

import numpy
import pandas

rows = 1_000_000
frame = pandas.DataFrame({"x": numpy.arange(rows, dtype=float), "y": numpy.random.default_rng(1).random(rows)})
frame["fit"] = numpy.polyval(numpy.polyfit(frame.x, frame.y, 3), frame.x)
groups = frame.groupby((frame.x // 1000).astype(int)).mean()
seed = 0
print("up", flush=True)
while True:
    with open("/run/ask") as ask:
        words = ask.read().split()
    if words[0] == "dirty":
        seed = int(words[1])
        frame.loc[:9999, "y"] = float(seed)
    with open("/run/answer", "w") as answer:
        answer.write(f"{int(frame.y[0])} {len(groups)}\n")
