"""Builds the release, once."""
import os
import sys

with open("var/build", "x") as file:
    inside = sys.prefix != sys.base_prefix and os.environ.get("VIRTUAL_ENV") == sys.prefix
    try:
        import greet
    except ImportError:
        greet = None
    words = greet.WORDS if greet else "nothing"
    file.write(f"{words} {os.environ.get('GREET_MODE', 'debug')} {'inside' if inside else 'outside'}\n")
