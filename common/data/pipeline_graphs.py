"""Graphs of tf.data pipelines: everything that a pipeline depends on, or the reason why that cannot be known."""

import hashlib
import os
import re

import numpy as np

from common.core import UserError

# Operations by name: those that draw random numbers (the order of ShuffleDataset is none of them), and those that depend on
# more than the graph: Python, variables, tables.
_RANDOM = re.compile(r"Random(?!.*Seed)|Multinomial|TruncatedNormal|^Stateful|RngReadAndSkip|NonDeterministicInts|^StatelessS")
_UNSEEN = re.compile(
    r"PyFunc|GeneratorDataset|VarHandle|HashTable|LookupTable|ReadVariable|Iterator|Queue|Placeholder"
    r"|MatchingFiles|SqlDataset|LoadDataset|Snapshot|Checkpoint|Restore|DataService|Timestamp"
)
_RESOURCE = 20  # DT_RESOURCE, of a captured object; shuffle() and cache() have one each
# Operations that read the files that they are given, and those that pass names on as they are
_READ = re.compile(r"^(ReadFile|WholeFileReader.*|(TFRecord|TextLine|FixedLengthRecord|CSV|LMDB)Dataset.*)$")
_PASS = re.compile(
    r"^(Const|Identity|StridedSlice|GatherV2|Pack|Reshape|ExpandDims|Squeeze"
    r"|((Tensor|TensorSlice|Shuffle|Repeat|Take|Skip|Shard|Prefetch|Concatenate|Zip|Cache|Options)Dataset.*))$"
)


class Unseen(Exception):
    """A pipeline that depends on more than its graph and the files that it names; the text is the reason."""


def dependencies(dataset, name, way_out):
    """Returns everything that a dataset depends on: a hash of its graph, and the files that it reads.

    Raises:
      Unseen: if that cannot be known.
      UserError: if it draws random numbers, as for augmentation, since the same ones would be kept for ever; the line begins
        with `name`, and ends with `way_out`.
    """
    graph = _graph_of(dataset)
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    if drawn := [node.op for node in nodes if _RANDOM.search(node.op)]:
        raise UserError(f"{name} draws random numbers ({drawn[0]}), and is read once: {way_out}")
    constants = {node.name: node for node in graph.node if node.op == "Const"}
    resources = {name for name, node in constants.items() if node.attr["dtype"].type == _RESOURCE}
    for node in nodes:
        if _UNSEEN.search(node.op) or resources & set(node.input) and not re.match("(Shuffle|Cache)Dataset", node.op):
            raise Unseen(f"it holds {node.op}" + ", with an object of Python" * bool(resources & set(node.input)))
        if node.op.startswith("CacheDataset") and any(_texts_in(constants[name]) != [b""] for name in node.input[1:2]):
            raise Unseen("its cache() is in a file")
    for name in resources:
        constants[name].attr.pop("value")  # an address
    texts = [text for node in nodes if node.op == "Const" for text in _texts_in(node)]
    files = sorted({text for text in texts if len(text) < 4096 and os.path.isfile(text)})
    are_here = files and not any(b"://" in text for text in texts)
    if any(_READ.match(node.op) for node in nodes) and not (are_here and _are_constant(graph)):
        raise Unseen("it reads files whose names are not in it")
    return _hash_of(graph), [os.path.abspath(os.fsdecode(path)) for path in files]


def has(dataset, *kinds):
    """Whether a dataset is made by a method of one of these names; batches before an unbatching method do not count."""
    kind = type(dataset).__name__
    if "Unbatch" in kind or "FlatMap" in kind or "Interleave" in kind:
        return "Batch" not in kinds and any(has(each, *kinds) for each in dataset._inputs())
    return any(each in kind for each in kinds) or any(has(each, *kinds) for each in dataset._inputs())


def _graph_of(dataset):
    from tensorflow.core.framework import graph_pb2
    from tensorflow.python.data.ops import options

    if not hasattr(dataset, "element_spec"):
        raise Unseen("it is a keras.utils.PyDataset")
    try:
        serialized = dataset._as_serialized_graph(external_state_policy=options.ExternalStatePolicy.IGNORE)
    except Exception as error:  # a capture that cannot be sent, in many ways
        raise Unseen(f"it cannot be serialized ({type(error).__name__})") from error
    return graph_pb2.GraphDef.FromString(serialized.numpy())


def _texts_in(node):
    """Returns the strings of a constant."""
    import tensorflow as tf

    tensor = node.attr["value"].tensor
    if tensor.dtype != tf.string.as_datatype_enum:
        return []
    return np.ravel(np.asarray(tf.io.parse_tensor(tensor.SerializeToString(), tf.string).numpy(), object)).tolist()


def _are_constant(graph):
    """Whether the names of all files that a graph reads are constants in it, passed on as they are."""

    def are(inputs, nodes):
        found = [nodes.get(name.lstrip("^").partition(":")[0]) for name in inputs]  # None: an argument of a function
        return all(node is None or _PASS.match(node.op) and are(node.input, nodes) for node in found)

    scopes = {function.signature.name: {node.name: node for node in function.node_def} for function in graph.library.function}
    scopes[""] = {node.name: node for node in graph.node}
    reading: set[str] = set()  # names of functions that read files
    before = -1
    while len(reading) > before:
        before = len(reading)
        for name, nodes in scopes.items():
            readers = [node for node in nodes.values() if _READ.match(node.op) or reading & _called_by(node)]
            if not all(are(node.input, nodes) for node in readers):
                return False
            reading |= {name} if readers else set()
    return True


def _called_by(node):
    """Returns the names of the functions that a node calls."""
    return {func.name for value in node.attr.values() for func in (value.func, *value.list.func) if func.name}


def _hash_of(graph):
    """Returns a hash of a graph, without what differs in another process: names of functions, and debugging information."""
    functions = {function.signature.name: function for function in graph.library.function}
    names: dict[str, str] = {}

    def rename(nodes):
        for node in nodes:
            node.ClearField("experimental_debug_info")
            node.attr.pop("metadata", None)
            called = [func for key in sorted(node.attr) for func in (node.attr[key].func, *node.attr[key].list.func)]
            called = [func for func in called if func.name in functions]
            for name in [*(func.name for func in called), *([node.op] if node.op in functions else [])]:
                if name not in names:
                    names[name] = f"function_{len(names)}"
                    rename(functions[name].node_def)
            for func in called:
                func.name = names[func.name]
            node.op = names.get(node.op, node.op)

    rename(graph.node)
    found = hashlib.sha256()
    for node in (*graph.node, *(node for name in names for node in functions[name].node_def)):
        found.update(node.SerializeToString(deterministic=True))
    found.update(repr([sorted(functions[name].ret.items()) for name in names]).encode())
    return found.hexdigest()
