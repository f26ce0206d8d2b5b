"""A process with so many MiB of touched memory, asked through two FIFOs; it changes 1% or all of its pages in each round."""

import os
import sys

size = int(sys.argv[1]) << 20
block = os.urandom(1 << 20)
data = bytearray()
for number in range(size >> 20):
    data += number.to_bytes(8, "little") + block[8:]
seed = 0
print("up", flush=True)
while True:
    with open("/run/ask") as ask:
        words = ask.read().split()
    if words[0] == "dirty":
        seed = int(words[1])
        for at in range(0, len(data), 4096 * 100 if words[2] == "1%" else 4096):
            data[at + 16] = (data[at + 16] + 1 + seed) % 256
    with open("/run/answer", "w") as answer:
        answer.write(f"{seed} {len(data)} {data[16]}\n")
