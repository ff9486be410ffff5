"""A plugin of pytest: nbval compares numbers in a notebook's outputs as numbers, not as text.

The cells that are compared are deterministic, but another processor, or another build of TensorFlow, rounds differently in the
last bits of a float32. After hundreds of training steps that reaches the digits that a cell prints. So two outputs are equal
if they differ in decimal numbers alone, and each of these by at most `RELATIVE`, or by two units of its last digit. Whole
numbers, and all that is no number, have to be the same.

    python -m pytest -p tests.nbval_numbers --nbval-lax ...
"""

import re

RELATIVE = 0.005
_DECIMAL = re.compile(r"(?<![\w.])-?\d[\d,]*\.\d+(?:e[+-]?\d+)?")


def agree(text, reference):
    """Returns whether two texts are the same but for decimal numbers that are nearly equal."""
    if _DECIMAL.sub("#", text) != _DECIMAL.sub("#", reference):
        return False
    return all(_near(*pair) for pair in zip(_DECIMAL.findall(text), _DECIMAL.findall(reference)))


def _near(text, reference):
    found, expected = (float(number.replace(",", "")) for number in (text, reference))
    mantissa, _, exponent = reference.partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return abs(found - expected) <= max(2.001 * unit, RELATIVE * abs(expected))


def _with_reference(output, reference):
    """Returns an output in which each text that agrees with the reference's is replaced by that."""
    if "text" in output and "text" in reference and agree(output["text"], reference["text"]):
        output = {**output, "text": reference["text"]}
    if "data" in output and "data" in reference:
        data = {
            key: reference["data"][key]
            if isinstance(value, str) and isinstance(reference["data"].get(key), str) and agree(value, reference["data"][key])
            else value
            for key, value in output["data"].items()
        }
        output = {**output, "data": data}
    return output


def pytest_configure(config):
    from nbformat import from_dict
    from nbval import plugin

    compare = plugin.IPyNbCell.compare_outputs

    def compare_outputs(self, test, ref, skip_compare=None):
        if len(test) == len(ref):
            test = [from_dict(_with_reference(*pair)) for pair in zip(test, ref)]
        return compare(self, test, ref, skip_compare)

    plugin.IPyNbCell.compare_outputs = compare_outputs
