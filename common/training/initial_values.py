"""`--init_from`: initial values of a new run from another run or a model's file, by name and shape; rows of tables by id."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common import tf
from common.core import UserError, has_checkpoint, is_in_use, newest_good_checkpoint, tell
from common.data import check_columns, one_line
from common.scheme import place_of, saved_tables

LISTED = 8  # names of variables in the line
PARTS = 100_000  # rows of a table from a file at once


class Source(NamedTuple):
    """Values of another run or a file."""

    values: list[tuple[str, Any]]  # pairs of a variable's path in Keras and an array
    tables: list[saved_tables.SavedTable]


def take(settings, model, dataset, say=tell):
    """Takes the values of `--init_from` into a `common.models.Model`, and says in one line which; nothing without the flag.

    Tables are noted in `model.rows_from`, {number of a table: SavedTable}, for `fill`.

    Raises:
      UserError: with `--resume`, or if there is no such source, or nothing of it fits, or a table is another.
    """
    if settings.init_from is None:
        return
    flag = f"--init_from={settings.init_from}"
    if settings.resume:
        raise UserError(f"{flag} is for a new run, and --resume continues one with its own values: leave one of them out")
    path = Path(settings.init_from).expanduser()
    folder = path.parent if path.suffix == ".keras" else path
    if dataset.columns and dataset.entry:
        check_columns(dataset.entry, folder / "columns", flag)
    source = _of_file(flag, path) if path.suffix == ".keras" else _of_run(flag, path)
    taken, left = _take_variables(source, model)
    for i, spec in enumerate(model.tables):
        found = _table_of(flag, source, spec, settings)
        (left if found is None else taken).append(f"the table {spec.layer}")
        if found is not None:
            model.rows_from[i] = found
    if not taken:
        raise UserError(f"{flag} has nothing of this model: expected variables of the same names and shapes, such as {left[0]}")
    rows = sum(len(ids) for table in model.rows_from.values() for ids, _ in table.parts())
    of_tables = f" with {rows:,} rows" if model.rows_from else ""
    say(f"{flag}: took {_listed(taken)}{of_tables}; initial as usual: {_listed(left)}")


def fill(session, puts):
    """Writes rows into the tables on the ps.

    Args:
      puts: for each table a triple of its `SavedTable`, the feeds of ids and rows, and the operations that write these.
    """
    for table, feeds, put in puts:
        for ids, rows in table.parts():
            session.run(put, dict(zip(feeds, (ids, rows), strict=True)))


def puts_of(model, center):
    """Returns the argument of `fill`, in the present graph."""
    puts = []
    for i, found in model.rows_from.items():
        feeds = tf.placeholder(tf.int64, [None]), tf.placeholder(tf.float32, [None, found.width])
        puts.append((found, feeds, center.tables[i].put(*feeds)))
    return puts


def _take_variables(source, model):
    """Takes variables that are no tables; returns the names of those taken, and of those left."""
    pairs = model.named_variables()
    others = [(name, value) for name, value in source.values if "seed_generator_state" not in name]
    kinds = [[(_plain(_short(name)), value.shape) for name, value in some] for some in (pairs, others)]
    if kinds[0] == kinds[1]:  # numbers of names from Keras may differ
        given = [value for _, value in others]
    else:
        by_path, by_short = (_unique(pairs, others, how) for how in (str, _short))
        given = [by_path.get(name, by_short.get(_short(name))) for name, _ in pairs]
    own_tables = {table.name.partition("_")[2] for table in source.tables}
    taken: list[str] = []
    left: list[str] = []
    for (name, value), found in zip(pairs, given, strict=True):
        if name.endswith("/embeddings") and (short := _plain(name).split("/")[-2]) in own_tables and found is None:
            raise UserError(f"--init_from: {short} is a table there, and none here: give it common.Embedding, or another name")
        fits = found is not None and found.shape == value.shape and found.dtype == value.dtype
        (taken if fits else left).append(name)
        if fits:
            if value.dtype.kind == "f" and not np.isfinite(found).all():
                raise UserError(f"--init_from: {name} has values that are not finite: give another run or file")
            value[...] = found
    return taken, left


def _table_of(flag, source, spec, settings):
    """Returns the `SavedTable` for a `Spec`, or None if there is none of its name.

    Raises:
      UserError: if its width or vocabulary differs, if the name is not of a table, or `--max_rows` has no room for its rows.
    """
    short = spec.name.partition("_")[2]
    named = [table for table in source.tables if table.name == spec.name]
    named = named or [table for table in source.tables if table.name.partition("_")[2] == short]
    if not named:
        if any(short in map(_plain, name.split("/")) for name, _ in source.values):
            raise UserError(f"{flag}: {spec.layer} is no table there: give the layer common.Embedding another name")
        return None
    if len(named) > 1:
        raise UserError(f"{flag} has {len(named)} tables of the name {short}: give each common.Embedding a name of its own")
    (table,) = named
    if table.width != spec.width:
        numbers = f"{table.width} numbers there, and of {spec.width} here"
        raise UserError(f"{flag}: {spec.layer} has rows of {numbers}: give it the same width")
    if table.rows != spec.rows:
        sizes = ["no fixed number of" if rows is None else f"{rows:,}" for rows in (table.rows, spec.rows)]
        raise UserError(f"{flag}: {spec.layer} has {sizes[0]} rows there, and {sizes[1]} here: give it the same vocabulary")
    if table.rows is None:
        pieces = min(settings.num_ps or 1, settings.max_rows)
        places = np.concatenate([place_of(ids) for ids, _ in table.parts()] or [np.zeros(0, np.int64)])
        counts = np.bincount(np.searchsorted(saved_tables.starts_of(pieces), places, side="right"), minlength=pieces + 1)[1:]
        if (over := int(counts.max())) > (room := settings.max_rows // pieces):
            raise UserError(f"{flag}: {spec.layer} has {over:,} rows for a ps with room for {room:,}: give a larger --max_rows")
    return table


def _of_run(flag, folder):
    """Returns the `Source` of the newest good checkpoint in the folder of a run."""
    if not folder.is_dir():
        raise UserError(f"{flag}: there is no such folder: expected that of a run, or a file that ends in .keras")
    if not has_checkpoint(folder):
        raise UserError(f"{flag}: there is no checkpoint in {folder / 'checkpoints'}: give the folder of a run that has one")
    if is_in_use(folder):
        raise UserError(f"{flag}: that run still trains: wait until it has ended, or give its model.keras")
    checkpoint = newest_good_checkpoint(folder / "checkpoints")
    reader = tf.train.load_checkpoint(checkpoint)
    try:
        about = json.loads((folder / "model.json").read_text())
        trained, state = about["paths"]
        shapes = [shape for _, shape in about["variables"]]
        parameters = reader.get_tensor("parameters")
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes[: len(trained)]])
        pieces = np.split(parameters, ends[:-1])
        values = [(name, each.reshape(shape)) for name, each, shape in zip(trained, pieces, shapes, strict=False)]
        values += [(name, reader.get_tensor(f"state_{i}")) for i, name in enumerate(state)]
    except (OSError, ValueError, KeyError, TypeError, tf.errors.OpError):
        hint = "give its model.keras, or a run of this version"
        raise UserError(f"{flag}: {folder / 'model.json'} does not name the variables of the run: {hint}") from None
    return Source(values, saved_tables.tables_in(checkpoint))


def _of_file(flag, path):
    """Returns the `Source` of a Keras model in a file; each of its embedding layers is a table, and also a variable."""
    import keras

    from common.models import embedding

    if not path.is_file():
        raise UserError(f"{flag}: there is no such file")
    try:
        model = keras.models.load_model(path)
    except Exception as error:  # of a class that is missing, of a damaged file, in many ways
        hint = "if it has layers of its own, give the folder of its run"
        raise UserError(f"{flag} cannot be loaded: {one_line(error)}: {hint}") from error
    tables: list[saved_tables.SavedTable] = []
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Embedding):
            name = f"{len(tables)}_{saved_tables.variable_name(layer.name)}"
            is_endless = isinstance(layer, embedding.Embedding) and layer.input_dim is None
            rows = (layer._embeddings if is_endless else layer.embeddings).numpy()
            ids = layer._ids.numpy() if is_endless else np.arange(len(rows))
            count = None if is_endless else len(rows)
            tables.append(saved_tables.SavedTable(name, count, layer.output_dim, _parts_of(ids, rows)))
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    return Source([(v.path, v.numpy()) for v in variables], tables)


def _parts_of(ids, rows):
    """Returns a function that yields ids `[n]` and rows `[n, width]`, a part after another."""
    return lambda: ((ids[i : i + PARTS], rows[i : i + PARTS]) for i in range(0, len(ids), PARTS))


def _listed(names):
    """Returns names as text, the tables and `LISTED` others."""
    shown = [name for i, name in enumerate(names) if i < LISTED or name.startswith("the table")]
    more = f" and {len(names) - len(shown)} more variables" if len(names) > len(shown) else ""
    return (", ".join(shown) or "none") + more


def _unique(pairs, others, name_of):
    """Returns {name: array} of the other variables whose name, a function of the path, is unique on both sides."""
    names = [[name_of(name) for name, _ in some] for some in (pairs, others)]
    return {name_of(n): value for n, value in others if all(some.count(name_of(n)) == 1 for some in names)}


def _short(path):
    """Returns layer and variable of a path, as a model from a file has paths without the name of the model."""
    return "/".join(path.split("/")[-2:])


def _plain(path):
    """Returns the path of a variable without the numbers that Keras appends to names."""
    return re.sub(r"_\d+(?=/|$)", "", path)
