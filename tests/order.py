"""Which operations of a graph use the same variable in no certain order: they race."""

from collections import defaultdict

READS = ("ReadVariableOp", "ResourceGather", "VariableShape")
PASS_ON = ("Enter", "Switch", "_SwitchN", "Identity")  # the handle of a variable, into a loop or a branch


def races(graph):
    """Returns triples (variable, operation, another): one of the two writes, and none comes after the other.

    Operations in different branches of a condition never run both. Those of different turns of a loop are in order if it runs
    one turn at a time, which this asserts. A lock that is taken after another taking of it is taken after its release.

    Args:
      graph: a `GraphDef` without functions: a partition graph of `tf.RunMetadata`, as it runs; or what leads to some fetches.
    """
    nodes = {node.name: node for node in graph.node}
    assert all(node.attr["parallel_iterations"].i == 1 for node in graph.node if node.op == "Enter")
    inputs = {name: _inputs(node, nodes) for name, node in nodes.items()}
    before, branches = _before(nodes, inputs)
    while waits := _for_locks(nodes, inputs, before):
        for taking, release in waits:
            inputs[taking].append((release, None))
        before, branches = _before(nodes, inputs)
    users: dict[str, list] = defaultdict(list)
    for name, node in nodes.items():
        if node.op not in PASS_ON:
            for variable in {_variable(source, nodes, inputs) for source, output in inputs[name] if output is not None}:
                users[variable].append(name)
    users.pop("", None)

    def is_race(one, other):
        if nodes[one].op in READS and nodes[other].op in READS:
            return False
        either = before[one] & before[other]
        if either in (before[one], before[other]):
            return False
        return all(branches[one][each] & branches[other][each] for each in set(branches[one]) & set(branches[other]))

    return [(v, a, b) for v, names in users.items() for i, a in enumerate(names) for b in names[i + 1 :] if is_race(a, b)]


def _before(nodes, inputs):
    """Returns what comes before each operation, and itself, a set as bits, as there are many; and in which branches it is:
    {what decides: numbers of its branches}.
    """
    before: dict[str, int] = {}
    branches: dict[str, dict] = {}
    for i, name in enumerate(_in_order(inputs)):
        before[name], branches[name] = 1 << i, defaultdict(set)
        for source, output in inputs[name]:
            before[name] |= before[source]
            if nodes[name].op == "Merge":
                continue
            for decides, numbers in branches[source].items():
                branches[name][decides] |= numbers
            if nodes[source].op in ("Switch", "_SwitchN") and output is not None:
                branches[name][inputs[source][1][0]].add(output)
    return before, branches


def _for_locks(nodes, inputs, before):
    """Returns pairs: the taking of a lock, and the release after an earlier taking of it; not those that `inputs` has."""
    releases = {inputs[name][0][0]: name for name, node in nodes.items() if node.op == "ConsumeMutexLock"}
    lock = {taking: nodes[inputs[taking][0][0]].attr["shared_name"].s for taking in releases}
    return [
        (taking, releases[earlier])
        for taking in releases
        for earlier in releases
        if earlier != taking and lock[earlier] == lock[taking]
        if before[earlier] & before[taking] == before[earlier] and (releases[earlier], None) not in inputs[taking]
    ]


def _inputs(node, nodes):
    """Returns pairs (name, number of its output; None of a control input), without those from the turn of a loop before."""
    found = []
    for each in node.input:
        name, _, output = each.removeprefix("^").partition(":")
        if nodes[name].op != "NextIteration":
            found.append((name, None if each.startswith("^") else int(output or 0)))
    return found


def _in_order(inputs):
    """Returns the names, each after its inputs."""
    done: dict[str, None] = {}
    todo = list(inputs)
    while todo:
        name = todo[-1]
        missing = [source for source, _ in inputs[name] if source not in done]
        todo += missing
        if not missing:
            done[todo.pop()] = None
    return list(done)


def _variable(name, nodes, inputs):
    """Returns which variable the output of an operation is the handle of; "" if none."""
    while nodes[name].op in PASS_ON:
        name = inputs[name][0][0]
    return name if nodes[name].op == "VarHandleOp" else ""
