"""Bills the items, which are used up."""
import os


def bill(items, rate):
    total = 0
    for item in items:
        total += item * rate
    return total


with open("items") as file:
    items = [int(line) for line in file]
os.remove("items")
result = bill(items, 2)
with open("var/invoice", "x") as file:
    file.write(str(result))
