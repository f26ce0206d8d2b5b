#!/usr/bin/python3
"""A console for a terminal; what was typed counts in its memory only."""
import os
import sys

if not sys.stdin.isatty():
    sys.exit("the console needs a terminal")
with open("var/console", "x"):  # started before: refuses
    pass
value, locked = 0, True


def said(text):
    with open("var/said", "a") as file:
        file.write(text + "\n")


said("ready")
for line in sys.stdin:
    match line.split():
        case ["unlock", "4711"]:
            locked = False
            said("unlocked")
        case ["unlock", *_]:
            said("wrong pin")
            sys.exit(1)
        case ["add", number] if not locked:
            value += int(number)
            said(f"value {value}")
        case ["double"] if not locked:
            value *= 2
            said(f"value {value}")
        case ["save"] if not locked:
            with open("var/saved", "w") as file:
                file.write(str(value))
            said("saved")
        case _:
            said("what?")
