"""Look at a table of orders, or change it. What the agent may do is one step each; some are better left undone.

table.py profile FILE      what is wrong with it, one line for each kind: KIND COUNT
table.py STEP FILE         trim, lower-mail, iso-dates, plain-amounts, drop-doubles, drop-bad-rows, fill-with-zero
"""

from __future__ import annotations

import csv
import re
import sys

FIELDS = ("order", "mail", "date", "amount")
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
GOOD = {
    "order": re.compile(r"[0-9]+"),
    "mail": re.compile(r"[a-z0-9.]+@[a-z0-9.]+"),
    "date": re.compile(r"20[0-9]{2}-[01][0-9]-[0-3][0-9]"),
    "amount": re.compile(r"[0-9]+\.[0-9]{2}"),
}
Row = dict[str, str]


def problems(rows: list[Row]) -> dict[str, int]:
    found = {field: sum(not GOOD[field].fullmatch(row[field]) for row in rows) for field in FIELDS}
    found["doubles"] = len(rows) - len({tuple(row.values()) for row in rows})
    found["zeros"] = sum(row["amount"] == "0.00" for row in rows)
    return found


def trim(rows: list[Row]) -> list[Row]:
    return [{field: value.strip() for field, value in row.items()} for row in rows]


def lower_mail(rows: list[Row]) -> list[Row]:
    return [{**row, "mail": row["mail"].lower()} for row in rows]


def iso_dates(rows: list[Row]) -> list[Row]:
    return [{**row, "date": _date(row["date"])} for row in rows]


def _date(text: str) -> str:
    if found := re.fullmatch(r"(\d\d)/(\d\d)/(\d{4})", text):
        return f"{found[3]}-{found[2]}-{found[1]}"
    if (found := re.fullmatch(r"([A-Za-z]{3}) (\d+), (\d{4})", text)) and found[1].lower() in MONTHS:
        return f"{found[3]}-{MONTHS.index(found[1].lower()) + 1:02}-{int(found[2]):02}"
    return text


def plain_amounts(rows: list[Row]) -> list[Row]:
    return [{**row, "amount": _amount(row["amount"])} for row in rows]


def _amount(text: str) -> str:
    plain = re.sub(r"[$ ]|EUR", "", text)
    plain = plain.replace(".", "").replace(",", ".") if re.fullmatch(r"[0-9.]+,\d\d", plain) else plain.replace(",", "")
    return f"{float(plain):.2f}" if re.fullmatch(r"[0-9]+(\.[0-9]*)?", plain) else text


def drop_doubles(rows: list[Row]) -> list[Row]:
    return [dict(pairs) for pairs in dict.fromkeys(tuple(row.items()) for row in rows)]


def drop_bad_rows(rows: list[Row]) -> list[Row]:
    return [row for row in rows if all(GOOD[field].fullmatch(row[field]) for field in FIELDS)]


def fill_with_zero(rows: list[Row]) -> list[Row]:
    return [{**row, "amount": row["amount"] if GOOD["amount"].fullmatch(row["amount"]) else "0.00"} for row in rows]


STEPS = {
    "trim": trim,
    "lower-mail": lower_mail,
    "iso-dates": iso_dates,
    "plain-amounts": plain_amounts,
    "drop-doubles": drop_doubles,
    "drop-bad-rows": drop_bad_rows,
    "fill-with-zero": fill_with_zero,
}


def main(verb: str, path: str) -> None:
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    if verb == "profile":
        for kind, count in problems(rows).items():
            print(kind, count)
        print("orders", len({row["order"].strip() for row in rows}))
        return
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(STEPS[verb](rows))


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("profile", *STEPS):
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])
