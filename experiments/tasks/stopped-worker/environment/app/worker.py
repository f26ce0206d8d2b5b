#!/usr/bin/python3
"""Three stages; everything that it knows is in its memory."""
import os
import time

with open("var/starts", "a") as file:
    file.write("started\n")
with open("input") as file:
    numbers = [int(line) for line in file]
os.remove("input")
total = sum(numbers)


def tell(stage):
    with open("var/stage.new", "w") as file:
        file.write(str(stage))
    os.rename("var/stage.new", "var/stage")


tell(1)
while not os.path.exists("var/go"):
    time.sleep(0.05)
with open("plan") as file:
    factor = int(file.read().split()[1])
tell(2)
with open("var/result", "w") as file:
    file.write(str(total * factor))
tell(3)
