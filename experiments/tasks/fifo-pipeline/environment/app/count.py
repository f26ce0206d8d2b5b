#!/usr/bin/python3
"""Weighs each value with its number; `var/seen` is how many there were."""
import os

total = seen = 0
with open("var/mid") as lines:
    for line in lines:
        if line.strip() == "flush":
            with open("var/total", "x") as file:
                file.write(str(total))
            break
        number, value = map(int, line.split())
        total += number * value
        seen += 1
        with open("var/seen.new", "w") as file:
            file.write(str(seen))
        os.rename("var/seen.new", "var/seen")
