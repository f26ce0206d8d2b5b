"""A shop as a web service. Its market, its ledger and its dice are objects in memory; nothing is written to disk.

uvicorn app:app        POST /price/12   POST /days/30   GET /report
"""

from __future__ import annotations

import os
import random

from fastapi import FastAPI, HTTPException

app = FastAPI(title="shop")


class Shop:
    def __init__(self) -> None:
        self.dice = random.Random(7)
        self.price = 5
        self.days = 0
        self.sold = 0
        self.revenue = 0

    def open_one_day(self) -> None:
        """Each customer has a price above which they do not buy."""
        for _ in range(self.dice.randint(40, 60)):
            if self.dice.triangular(0, 30, 12) >= self.price:
                self.sold += 1
                self.revenue += self.price
        self.days += 1


shop = Shop()


@app.post("/price/{price}")
def set_price(price: int) -> dict[str, int]:
    if price < 1:
        raise HTTPException(422, "a price is at least 1")
    shop.price = price
    return {"price": price}


@app.post("/days/{count}")
def open_days(count: int) -> dict[str, int]:
    for _ in range(count):
        shop.open_one_day()
    return report()


@app.get("/report")
def report() -> dict[str, int]:
    return {"pid": os.getpid(), "days": shop.days, "price": shop.price, "sold": shop.sold, "revenue": shop.revenue}
