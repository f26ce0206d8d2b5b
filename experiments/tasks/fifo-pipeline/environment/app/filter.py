#!/usr/bin/python3
"""Passes on what begins with ok, and numbers it."""
number = 0
with open("var/in") as lines, open("var/mid", "w", buffering=1) as out:
    for line in lines:
        word, _, rest = line.partition(" ")
        if word.strip() == "flush":
            out.write("flush\n")
        elif word == "ok":
            number += 1
            out.write(f"{number} {rest}")
