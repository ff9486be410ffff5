"""Records in files (TFRecord, Parquet, CSV): their number, their split among workers, and their values as arrays."""

import contextlib
import fractions
import functools
import glob
import os
import re
import threading
from typing import Any, NamedTuple

import numpy as np

from common.core import UserError
from common.data.array_types import OF_STRINGS, rounded
from common.data.user_functions import one_line

HELD = 10  # without --test_data, every tenth record of each file is for the test
LABELS = ("label", "target", "y")  # names of the label column without --label
_ROWS = 8192  # read at once from a table


class FilePart(NamedTuple):
    """Some records of a file: every `step`-th from number `first` on, of all, of the test records, or of the others.

    Before that, a share may be held out for validation, evenly spread.
    """

    path: str
    total: int  # records in the file
    held: bool | None = None  # True: those for the test; False: the others; None: all
    first: int = 0
    step: int = 1
    share: tuple[int, int] | None = None  # (p, q): of every q records p are for validation
    validates: bool = False  # True: the records for validation; False: the others

    @property
    def count(self):
        """The number of these records."""
        of_test = self.total // HELD
        some = {True: of_test, False: self.total - of_test, None: self.total}[self.held]
        if self.share:
            of_validation = held_before(some, self.share)
            some = of_validation if self.validates else some - of_validation
        return len(range(self.first, some, self.step))

    def chosen(self, number):
        """Whether the records with these numbers in the file, an array or tensor, are among these."""
        if self.held:
            return number % HELD == HELD - 1
        of_others = number - number // HELD if self.held is False else number  # renumbered without held ones
        place = of_others
        if self.share:
            before = held_before(of_others, self.share)
            place = before if self.validates else of_others - before
        found = place % self.step == self.first
        if self.held is False:
            found &= number % HELD != HELD - 1
        if self.share:
            found &= is_held(of_others, self.share) == self.validates
        return found


def held_before(number, share):
    """Returns the number of held-out records among the first `number`, for (p, q) = share: p of every q records."""
    p, q = share
    return number * p // q


def is_held(number, share):
    """Returns whether the record with this number, an integer, or an array or tensor of them, is held out."""
    return held_before(number + 1, share) > held_before(number, share)


def share_of(number):
    """Returns (p, q) with the ratio `number`, between 0 and 1, with q of at most a million."""
    return fractions.Fraction(number).limit_denominator(10**6).as_integer_ratio()


def split(parts, index, num_workers):
    """Returns the parts of worker `index`, and whether they are whole files.

    They are if that gives equal shares within a tenth; otherwise a worker has every n-th record.
    """
    if len(parts) >= num_workers:
        shares: list[list[FilePart]] = [[] for _ in range(num_workers)]
        sizes = [0] * num_workers
        for part in sorted(parts, key=lambda part: -part.count):
            least = sizes.index(min(sizes))
            shares[least].append(part)
            sizes[least] += part.count
        if max(sizes) <= 1.1 * min(sizes):
            return sorted(shares[index]), True
    found, before = [], 0
    for part in parts:
        found.append(part._replace(first=(index - before) % num_workers, step=num_workers))
        before += part.count
    return found, False


def kind_of(spec):
    """Returns the kind of files of a pattern, "tfrecord", "parquet" or "csv"; None for anything else."""
    name = os.path.basename(spec)
    return "tfrecord" if ".tfrecord" in name else next((kind for kind in ("parquet", "csv") if name.endswith(f".{kind}")), None)


def files_of(flag, pattern):
    """Returns the files that match a pattern, in alphabetical order, or raises `UserError` if there are none."""
    paths = sorted(path for path in glob.glob(os.path.expanduser(pattern), recursive=True) if os.path.isfile(path))
    if not paths:
        raise UserError(f"{flag}={pattern}: there is no such file")
    return [os.path.abspath(path) for path in paths]


def why(error):
    """The first line of an exception, without the operation names that TensorFlow adds to the message."""
    return re.sub(r"\{\{.*?\}\} ?| ?\[Op:\w+\].*", "", one_line(error))


class TFRecords:
    """Files of TensorFlow's records; `parse` is a function of a scalar string tensor that returns (x, y) or (x, y, weight)."""

    def __init__(self, parse):
        self._parse, self._lock = parse, threading.Lock()
        self._parts: Any = iter(())
        self._pipelines: dict[tuple, Any] = {}  # kept, as each traces the user's functions once

    def about(self, paths):
        """Returns {path: number of records}, and an empty dict. It reads only the records' lengths."""
        return {path: _length_of(path) for path in paths}, {}

    def read(self, parts, skip, size):
        """Yields the samples of some parts in arrays of `size` samples, after the first `skip`."""
        import tensorflow as tf

        key = parts[0]._replace(path="", total=0, first=0), size
        try:
            with self._lock:  # until the iterator has asked for the parts
                if key not in self._pipelines:
                    self._pipelines[key] = self._pipeline(*key)
                self._parts = iter([(part.path, part.first, skip if part is parts[0] else 0) for part in parts])
                samples = self._pipelines[key].as_numpy_iterator()
                found = next(samples, None)
            while found is not None:
                yield found
                found = next(samples, None)
        except tf.errors.DataLossError as error:
            path = next((part.path for part in parts if not _is_whole(part.path)), "a file")
            raise UserError(f"{path} is damaged: {why(error)}") from None

    def _pipeline(self, like, size):
        """Makes a pipeline of arrays of `size` samples, of the parts in `_parts`: as `like`, but for path, total and first."""
        import tensorflow as tf

        def records(path, first, skip):
            part, found = like._replace(first=first), tf.data.TFRecordDataset(path)
            if part.held is not None or part.step > 1 or part.share:
                # In batches, as filtering single records is slower than reading.
                found = found.batch(_ROWS).enumerate().map(functools.partial(chosen, part)).unbatch()
            return found.skip(skip)

        def chosen(part, number, records):
            numbers = number * _ROWS + tf.range(tf.size(records, tf.int64), dtype=tf.int64)
            return tf.boolean_mask(records, part.chosen(numbers))

        kinds = tuple(tf.TensorSpec([], kind) for kind in (tf.string, tf.int64, tf.int64))
        files = tf.data.Dataset.from_generator(lambda: self._parts, output_signature=kinds)
        samples = files.flat_map(records).map(self._parse, tf.data.AUTOTUNE, deterministic=True)
        check_elements(samples.element_spec)
        return samples.batch(size)

    def label_line(self):
        """A description of the labels."""
        return ""


def _length_of(path):
    """Returns the number of records in a file."""
    size, at, count = os.path.getsize(path), 0, 0
    with open(path, "rb") as file:
        while at < size:
            file.seek(at)
            header = file.read(12)  # length, 64 bits, and its check sum
            if header[:2] == b"\x1f\x8b" and at == 0:
                raise UserError(f"{path} is compressed: unpack it, or read it with --data=FILE.py:FUNCTION")
            at += 12 + int.from_bytes(header[:8], "little") + 4
            if len(header) < 12 or at > size:
                raise UserError(f"{path} is damaged or not a TFRecord file: record {count} extends beyond its end")
            count += 1
    return count


def _is_whole(path):
    import tensorflow as tf

    try:
        for _ in tf.data.TFRecordDataset(path).batch(_ROWS):
            pass
    except tf.errors.DataLossError:
        return False
    return True


class Tables:
    """Files of Parquet or CSV, all with the same columns: one is the label, the others together are the sample.

    Args:
      kind: "parquet" or "csv".
      label: name of the label column; None: the last one called label, target or y, or else the last.
      known: second result of an earlier call of `about`.
    """

    def __init__(self, kind, label=None, known=None):
        self._kind, self._label, self._known = kind, label, dict(known or {})

    def about(self, paths):
        """Returns {path: number of records}, and a dict of label, columns, types and classes. It reads the labels.

        Raises `UserError` if a file is damaged, or has other columns than the first, or the labels are no numbers.
        """
        names, types = self._columns(paths[0])
        if "label" not in self._known:
            label = self._label or ([name for name in names if name.lower() in LABELS] or names)[-1]
            if label not in names:
                raise UserError(f"--label={label}: {paths[0]} has the columns {_listed(names)}")
            if len(names) < 2:
                raise UserError(f"{paths[0]} has only one column, {names[0]!r}: expected samples and labels")
            self._known = {"label": label, "columns": names, "types": types, "classes": None}
        lengths = {}
        for path in paths:
            self._compare(path, *self._columns(path))
            lengths[path] = 0
            for batch in self._batches(path, [self._known["label"]]):
                y = _values(batch.column(0), self._known["label"], path)
                if y.dtype.kind in "iub" and len(y):
                    both = [*(self._known["classes"] or ()), int(y.min()), int(y.max())]
                    self._known["classes"] = [min(both), max(both)]
                lengths[path] += batch.num_rows
        return lengths, self._known

    def _compare(self, path, names, types):
        if names != self._known["columns"]:
            other = next((n for n in [*names, *self._known["columns"]] if (n in names) != (n in self._known["columns"])), None)
            raise UserError(f"{path} has other columns than the first file" + (f": {other!r}" if other else ", in order"))
        if self._kind == "parquet" and types != self._known["types"]:
            name = next(name for name in names if types[name] != self._known["types"][name])
            raise UserError(
                f"{path}: the column {name!r} holds {types[name]}, but {self._known['types'][name]} in the first file"
            )

    def _columns(self, path):
        """Returns the names of the columns of a file, and {name: type as text}."""
        with _as_user_error(path):
            if self._kind == "parquet":
                import pyarrow.parquet as parquet

                schema = parquet.read_schema(path)
            else:
                import pyarrow.csv as csv

                with csv.open_csv(path) as reader:
                    schema = reader.schema
                if "" in schema.names:
                    index = "; if pandas wrote its index there, use to_csv(index=False)" if schema.names[0] == "" else ""
                    raise UserError(f"{path} has a column without a name, number {schema.names.index('') + 1}{index}")
                if all(_is_number(name) for name in schema.names):
                    raise UserError(f"{path} has no header line: it begins with {_listed(schema.names)}")
        if len(set(schema.names)) < len(schema.names):
            raise UserError(f"{path} has two columns of the same name: {_listed(schema.names)}")
        return list(schema.names), {field.name: str(field.type) for field in schema}

    def _batches(self, path, columns):
        """Yields the batches of a file, with some columns."""
        with _as_user_error(path):
            if self._kind == "parquet":
                import pyarrow.parquet as parquet

                with parquet.ParquetFile(path) as file:
                    yield from file.iter_batches(_ROWS, columns=columns, use_threads=False)
            else:
                import pyarrow
                import pyarrow.csv as csv

                # A CSV file does not state types: samples are floats, labels have the type inferred from the first file.
                types = {name: pyarrow.float64() for name in columns}
                label = self._known["label"]
                if label in types:
                    of_label = self._known["types"][label]
                    types[label] = pyarrow.int64() if of_label in ("int64", "bool") else pyarrow.float32()
                options = csv.ConvertOptions(column_types=types, include_columns=columns)
                with csv.open_csv(path, csv.ReadOptions(use_threads=False), convert_options=options) as reader:
                    yield from reader

    def read(self, parts, skip, size):
        """Yields the samples of some parts in arrays of `size` samples, after the first `skip`."""
        known, held, count = self._known, [], 0
        features = [name for name in known["columns"] if name != known["label"]]
        for part in parts:
            number = 0
            for batch in self._batches(part.path, known["columns"]):
                rows = np.flatnonzero(part.chosen(np.arange(number, number + batch.num_rows)))
                number += batch.num_rows
                rows, skip = rows[skip:], max(0, skip - len(rows))
                if not len(rows):
                    continue
                columns = [_values(batch.column(batch.schema.get_field_index(n)), n, part.path)[rows] for n in features]
                x = np.concatenate([c if c.ndim > 1 else c[:, None] for c in columns], axis=1)
                if x.dtype.kind == "f":
                    _check_exact(dict(zip(features, columns, strict=True)), part.path)
                y = _values(batch.column(batch.schema.get_field_index(known["label"])), known["label"], part.path)[rows]
                held.append((x, y))
                count += len(rows)
                while count >= size:
                    x, y = (np.concatenate(arrays) for arrays in zip(*held, strict=True))
                    yield x[:size], y[:size]
                    held, count = [(x[size:], y[size:])], len(x) - size
        if count:
            yield tuple(np.concatenate(arrays) for arrays in zip(*held, strict=True))

    def label_line(self):
        """A description of the labels."""
        return f"; label: the column {self._known['label']!r}, the sample: the other {len(self._known['columns']) - 1}"

    @property
    def classes(self):
        """The smallest and the largest label, or None where labels are no whole numbers."""
        return self._known["classes"]


def _values(column, name, path):
    """Returns a column as an array `[n]`, or `[n, k]` if its values are lists of k numbers."""
    from pyarrow import types

    values, of = column, f"{path}: the column {name!r} holds"
    is_list = types.is_list(column.type) or types.is_large_list(column.type)
    if is_list and len(lengths := np.unique(column.drop_null().value_lengths())) > 1:
        raise UserError(f"{of} lists of different lengths, such as {lengths[0]} and {lengths[1]}")
    if is_list or types.is_fixed_size_list(column.type):
        values = column.flatten()
    if not (types.is_integer(values.type) or types.is_floating(values.type) or types.is_boolean(values.type)):
        otherwise = "leave it out of the files, or read them with --data=FILE.py:FUNCTION"
        raise UserError(f"{of} {column.type}, expected numbers: {otherwise}")
    if empty := column.null_count + values.null_count * (values is not column):
        raise UserError(f"{of} {empty} empty values: fill them, or leave their rows out")
    array = values.to_numpy(zero_copy_only=False)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise UserError(f"{of} {np.sum(~np.isfinite(array))} values that are NaN or infinite")
    return array if values is column else array.reshape(len(column), -1)


def _check_exact(columns, path):
    """Raises a `UserError` if float32 would round whole numbers of a column, beside fractions or from a CSV file."""
    for name, values in columns.items():
        if found := rounded(values):
            otherwise = "scale them, or, if they are ids, give them an input of their own with --data=FILE.py:FUNCTION"
            raise UserError(f"{path}: the column {name!r} holds {found}: {otherwise}")


def _is_number(text):
    try:
        float(text)
    except ValueError:
        return False
    return True


def _listed(names):
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


@contextlib.contextmanager
def _as_user_error(path):
    """A context that turns pyarrow's error about a file into a `UserError` of one line."""
    try:
        import pyarrow
    except ImportError:
        raise UserError("files of Parquet and CSV need pyarrow, which is not installed: pip install pyarrow") from None
    try:
        yield
    except UnicodeDecodeError:
        raise UserError(f"{path} cannot be read: it is not UTF-8; convert it, as with `iconv -f latin1 -t utf8`") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read: {one_line(error)}") from None


def check_elements(spec):
    """Raises a `UserError` unless the elements of a `tf.data.Dataset` are (x, y) or (x, y, weight) of tensors of numbers."""
    import tensorflow as tf

    if not isinstance(spec, tuple) or len(spec) not in (2, 3):
        raise UserError(f"its elements are {str(spec):.80}, expected (x, y) or (x, y, weight)")
    for part in tf.nest.flatten(spec):
        if not isinstance(part, tf.TensorSpec):
            raise UserError(f"its elements hold {type(part).__name__}, expected dense tensors, as to_tensor() makes")
        if part.dtype == tf.string:
            raise UserError(f"its elements hold strings, expected numbers; {OF_STRINGS}")
