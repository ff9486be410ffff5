"""Sources of samples: arrays; files and finite pipelines of tf.data, converted once to arrays; or a `Stream`."""

import json
import os
from pathlib import Path

from common.core import UserError, task_status
from common.data import cache, datasets, pipelines, streamed_datasets
from common.data.columns import COLUMNS
from common.data.files import HELD, files_of, kind_of, state_of
from common.data.nested_arrays import arrays_in
from common.data.pipeline_graphs import Unseen, dependencies, has
from common.data.pipelines import Records, is_pipeline, takes_two
from common.data.streams import Stream
from common.data.user_functions import call, user_function

KNOWN = "data.json"  # in a run's folder: findings of the input check about the data
_TABLES = "'DIR/*.csv', '*.parquet' or '*.arrow'"
# Flags for some data only: an example of these data, and the kinds of files
_ONLY_FOR = {
    **dict.fromkeys(("label", "missing", "hash_strings"), (_TABLES, ("csv", "parquet", "arrow"))),
    "parse": ("'DIR/*.tfrecord'", ("tfrecord",)),
    "test_data": ("files, as 'DIR/*.csv'", ("csv", "parquet", "arrow", "tfrecord")),
}


def load(settings):
    """Returns the `Data`, or the `Stream`, of `--data`, or raises `UserError` if there is none or no training could use it.

    Files and pipelines are converted to arrays in `--data_cache`, if they are not there yet.
    """
    spec, kind = settings.data, kind_of(settings.data)
    for flag, (example, kinds) in _ONLY_FOR.items():
        if getattr(settings, flag) is not None and kind not in kinds:
            raise UserError(f"--{flag} is for --data={example}, not {spec}")
    if settings.stream and (kind or ":" not in spec):
        raise UserError(f"--stream is for a function that gives tf.data.Datasets, not {spec}: leave it out")
    if not kind and ":" not in spec:
        return datasets.load(spec, settings.seed)
    if (arrays := datasets.shared()) is not None:
        return arrays
    known = _known(settings)
    if known.get("entry") and (found := cache.opened(Path(known["entry"]))) is not None:
        return found
    if kind:
        return _of_files(settings, kind)
    return of_function(settings, user_function("--data", spec), known.get("counts"))


def of_function(settings, function, counts=None):
    """Returns the `common.data.datasets.Data`, or the `Stream`, from a function of the user's.

    `counts` are those of a `Stream` that another process has found.
    """
    spec, shards_itself, num_workers = settings.data, takes_two(function), _num_workers(settings)
    arguments = [(num_workers, i) for i in range(num_workers)] if shards_itself else [()]
    pairs = [call("--data", spec, function, *each) for each in arguments]
    if not shards_itself and not is_of_datasets(pairs[0]):
        if settings.stream:
            raise UserError(f"--stream is for tf.data.Datasets, but --data={spec} gives others: leave it out")
        return datasets.checked(pairs[0], spec)
    for pair in pairs:
        is_pair = isinstance(pair, (tuple, list)) and all(map(is_pipeline, pair))
        if not is_pair or len(pair) != len(pairs[0]) or len(pair) not in datasets.SETS:
            raise UserError(f"--data={spec} must give (training set, test set), two tf.data.Datasets")
    return _of_datasets(settings, pairs, shards_itself, counts)


def is_of_datasets(given):
    """Whether the result of a function of the user's is a pipeline, or contains one."""
    return any(map(is_pipeline, [given, *(given if isinstance(given, (tuple, list)) else ())]))


def _num_workers(settings):
    """Returns the number of workers at the beginning of the run."""
    return settings.run.begin_workers if settings.max_workers else settings.num_workers


def _asked(settings):
    flags = "data", "test_data", "label", "parse", "missing", "hash_strings", "stream"
    return [*(getattr(settings, name) for name in flags), _num_workers(settings)]


def _known(settings):
    """Returns the findings of the input check, if the launcher of this task had made it about the same data, else {}."""
    if not settings.run_dir or settings.check or not os.environ.get("LAUNCHER_KEY"):
        return {}
    try:
        found = json.loads(Path(settings.run_dir, KNOWN).read_text())
        return found if found["asked"] == _asked(settings) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def to_keep(settings, dataset):
    """Returns the findings for `load` to keep in the run's folder, for JSON; None for arrays."""
    if isinstance(dataset, Stream):
        return {"asked": _asked(settings), "counts": dataset.counts}
    return {"asked": _asked(settings), "entry": dataset.entry} if dataset.entry else None


def _of_files(settings, kind):
    name, given = f"--data={settings.data}", settings.test_data
    if given is not None and kind_of(given) != kind:
        raise UserError(f"--test_data={given}: expected files of the same kind as {name}, as 'DIR/*.{kind}'")
    if kind == "tfrecord" and settings.parse is None:
        raise UserError(f"{name} needs --parse=FILE.py:FUNCTION, from a record, a scalar string tensor, to (x, y)")
    parse = user_function("--parse", settings.parse) if kind == "tfrecord" else None
    train, test = files_of("--data", settings.data), files_of("--test_data", given) if given else []
    if both := sorted(set(train) & set(test)):
        raise UserError(f"--test_data={given} names {both[0]}, which is one of {name}, too")
    text = f"from {len(train):,} file{'s' * (len(train) > 1)} {settings.data}; test: {given or f'every {HELD}th record'}"
    with pipelines.prefixed(name):
        if parse:
            return _of_records(settings, train, test, parse, text)
        return _of_tables(settings, kind, train, test, text)


def _of_tables(settings, kind, train, test, text):
    from common.data import table_files

    flags, files = [settings.label, settings.missing, settings.hash_strings], state_of([*train, *test])

    def convert(folder, told):
        found = table_files.convert(kind, train, test, folder, told, *flags)
        (folder / COLUMNS).write_text(json.dumps({name: found[name] for name in ("columns", "label", "classes")}, indent=1))
        notes = f"{text}, {found['rows']['test']:,} samples" + "".join(f"; {note}" for note in found["notes"])
        return {"arrays": cache.arrays_of_tables(found), "columns": found["columns"], "text": notes}

    key = cache.key_of(kind, files, train, test, text, flags)
    return cache.converted(cache.folder_of(settings.data_cache), key, files, convert)


def _of_records(settings, train, test, parse, text):
    name, files = f"--data={settings.data}", state_of([*train, *test])
    with pipelines.as_user_error(name, "of the training set"):
        records = [Records(paths, parse) for paths in (train, test) if paths]
    of_test = records[1] if test else None

    def convert(folder, told):
        arrays = pipelines.convert_records(records[0], of_test, name, folder, told)
        return {"arrays": arrays, "columns": None, "text": f"{text}, {_count(arrays):,} samples"}

    return _converted(settings, [each.dataset for each in records], [files, text], files, convert)


def _of_datasets(settings, pairs, shards_itself, counts):
    name = f"--data={settings.data}"
    for half, dataset in ((half, dataset) for pair in pairs for half, dataset in zip(datasets.SETS[len(pair)], pair)):
        half = pipelines.NAMES[half]
        if hasattr(dataset, "element_spec"):
            try:
                pipelines.check_elements(dataset.element_spec)
            except UserError as error:
                raise UserError(f"{name}: of the {half} set {error}") from None
        elif settings.stream or dataset.num_batches is None:
            raise UserError(f"{name}: the {half} set is an endless or streamed keras.utils.PyDataset: make a tf.data.Dataset")
    if settings.stream or any(streamed_datasets.never_ends(pair[0]) for pair in pairs):
        return streamed_datasets.of_datasets(settings, pairs, shards_itself, counts)
    for half, dataset in zip(datasets.SETS[len(pairs[0])], pairs[0]):
        if streamed_datasets.never_ends(dataset):
            raise UserError(f"{name}: the {half} set never ends: limit it with take()")
    text = "from " + ("a tf.data.Dataset" if hasattr(pairs[0][0], "element_spec") else "a keras.utils.PyDataset")
    text += " of each worker's own" * shards_itself

    def convert(folder, told):
        sets = dict(zip(datasets.SETS[len(pairs[0])], ([dataset] for dataset in pairs[0])))
        sets["train"] = [pair[0] for pair in pairs]
        arrays = pipelines.convert(sets, name, folder, told)
        return {"arrays": arrays, "columns": None, "text": f"{text}; test: {_count(arrays):,} samples"}

    return _converted(settings, [*(pair[0] for pair in pairs), *pairs[0][1:]], [text], {}, convert)


def _converted(settings, sets, parts, files, convert):
    """Returns the `Data` of pipelines, from the cache if all that they depend on can be seen."""
    name = f"--data={settings.data}"
    found, reasons, way_out = [], [], "--stream reads it anew in each epoch"
    if settings.parse is not None:
        way_out = f"give --data=FILE.py:FUNCTION, of a tf.data.Dataset; {way_out}"
    for dataset in sets:
        try:
            found.append(dependencies(dataset, name, way_out))
        except Unseen as reason:
            reasons.append(reason)
    files = files | state_of(path for _, paths in found for path in paths)
    key = None if reasons else cache.key_of(*parts, [graph for graph, _ in found], files)
    if reasons:
        task_status.tell(f"{name}: converted anew in each run, as the pipeline depends on more than its graph: {reasons[0]}")
    is_apart = settings.num_workers > 1 and not settings.check and not os.environ.get("LAUNCHER_KEY")
    if (is_apart or key is None and settings.validation) and any(has(dataset, "Shuffle") for dataset in sets):
        hint = "leave shuffle() out, as samples are shuffled here (and list_files takes shuffle=False)"
        raise UserError(f"{name}: a set is shuffled, and each process would have another order: {hint}")
    return cache.converted(cache.folder_of(settings.data_cache), key, files, convert)


def _count(arrays):
    """Returns the number of test samples of the `arrays` of `cache.ABOUT`."""
    return int(arrays_in(arrays["y_test"])[0].split(" ")[1].split("x")[0])
