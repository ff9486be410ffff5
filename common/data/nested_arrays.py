"""Arrays of samples, labels or weights: one, or several in tuples and dicts, in a fixed order and with names."""


def mapped(function, part):
    """Applies the function to each array of samples, labels or weights; returns the results in the same structure."""
    return mapped_by_name(lambda array, name: function(array), part, "")


def mapped_by_name(function, part, name):
    """Applies the function to each array and its name, as `x_train['left']`; returns the results in the same structure.

    Dicts are in the order of their sorted keys, as `tf.nest` and Keras flatten them.
    """
    if isinstance(part, dict):
        return {key: mapped_by_name(function, part[key], f"{name}[{key!r}]") for key in sorted(part)}
    if isinstance(part, tuple):
        return tuple(mapped_by_name(function, value, f"{name}[{i}]") for i, value in enumerate(part))
    return function(part, name)


def named(part, name):
    """Returns the arrays of samples, labels or weights by name, as {"x_train['left']": array}."""
    found: dict = {}
    mapped_by_name(lambda array, its: found.update({its: array}), part, name)
    return found


def arrays_in(part):
    """Returns a list of the arrays of samples, labels or weights: one array, or several in a tuple or dict."""
    return list(named(part, "").values())
