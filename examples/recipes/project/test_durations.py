import pytest
from durations import seconds


@pytest.mark.parametrize(("text", "wanted"), [("45s", 45), ("1h30m", 5400), ("2d", 172800), ("1d1s", 86401)])
def test_good(text, wanted):
    assert seconds(text) == wanted


@pytest.mark.parametrize("text", ["", "7", "3x", "1h 30m!", "h"])
def test_nonsense_is_refused(text):
    with pytest.raises(ValueError):
        seconds(text)
