"""What makes a suite slow to begin: a table that takes a while to compute, once for each process that imports it."""

LIMIT = 400_000


def _primes(limit):
    sieve = bytearray([1]) * limit
    sieve[:2] = b"\0\0"
    for number in range(2, int(limit**0.5) + 1):
        if sieve[number]:
            sieve[number * number :: number] = bytes(len(range(number * number, limit, number)))
    return [number for number in range(limit) if sieve[number]]


PRIMES = _primes(LIMIT)
FACTORS = {number: next(prime for prime in PRIMES if number % prime == 0) for number in range(2, 60_000)}
