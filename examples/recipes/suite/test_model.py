import model
import pytest


@pytest.mark.parametrize("number", range(2, 202))
def test_the_smallest_factor(number):
    factor = model.FACTORS[number]
    assert number % factor == 0
    assert all(number % smaller for smaller in range(2, factor))
