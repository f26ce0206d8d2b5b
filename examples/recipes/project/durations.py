"""Durations such as `1h30m` as seconds."""

import re

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def seconds(text):
    total = 0
    for number, unit in re.findall(r"(\d+)([smh])", text):
        total += int(number) * UNITS[unit]
    return total
