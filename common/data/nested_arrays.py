"""Arrays of samples, labels or weights: one, or several in tuples and dicts, in a fixed order and with names."""


def mapped(function, part):
    """Applies the function to each array of samples, labels or weights; returns the results in the same structure."""
    if isinstance(part, dict):
        return {key: mapped(function, value) for key, value in items_of(part)}
    return tuple(mapped(function, value) for value in part) if isinstance(part, tuple) else function(part)


def arrays_in(part):
    """Returns a list of the arrays of samples, labels or weights: one array, or several in a tuple or dict.

    The arrays of a dict come in the order of its sorted keys, as from `tf.nest.flatten`.
    """
    return list(named(part, "").values())


def named(part, name):
    """Returns the same arrays by name, as {"x_train['left']": array}."""
    if isinstance(part, (dict, tuple)):
        return {key: array for k, value in items_of(part) for key, array in named(value, f"{name}[{k!r}]").items()}
    return {name: part}


def items_of(part):
    """Returns (key, value) pairs of a dict in alphabetical order, as `tf.nest` and Keras flatten it, or of a tuple."""
    return sorted(part.items()) if isinstance(part, dict) else enumerate(part)


def mapped_by_name(function, part, name):
    """Applies the function to each array and its name, as `x_train['left']`; returns the results in the same structure."""
    if isinstance(part, (dict, tuple)):
        found = {key: mapped_by_name(function, value, f"{name}[{key!r}]") for key, value in items_of(part)}
        return found if isinstance(part, dict) else tuple(found.values())
    return function(part, name)
