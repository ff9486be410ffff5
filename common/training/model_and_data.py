"""Model and data of a run: the built model, the samples of each worker, the evaluation on the test set, a line about them."""

import itertools
import json
from pathlib import Path

from common.core import UserError, limits, model_options, run_folder
from common.data import (
    Batches,
    Position,
    Rows,
    Stream,
    StreamedBatches,
    TestSet,
    arrays_in,
    check_columns,
    copy_columns,
    datasets,
    fed,
)
from common.models import BUILT_IN, keras_model
from common.scheme import tables
from common.training import initial_values


def build_model(settings, dataset, index=0, tables_on_ps=False):
    """Returns the `common.models.Model` of worker `index`.

    The chief records the model's variables and the columns of files in the run's folder, or, with `--resume`, compares them
    with the record.

    Raises:
      UserError: if there is no such model, it does not fit the data, or parameters or columns are not those of the checkpoint.
    """
    # Only the chief's initial values count; the seeds of Dropout must differ between workers.
    options = {"tables_on_ps": tables_on_ps, "tables_seed": settings.seed, **model_options(settings)}
    model = keras_model.build(settings.model, dataset, settings.seed + index, settings.loss, **options)
    model.draw_apart(index)
    if index == 0:
        _check_model(settings, model)
        if dataset.columns and dataset.entry:
            check_same_columns(settings, dataset)
            copy_columns(dataset.entry, Path(settings.run_dir, "columns"))
        if not run_folder.has_checkpoint(settings.run_dir):
            initial_values.take(settings, model, dataset)
    return model


def check_same_columns(settings, dataset):
    """Raises a `UserError` if a resumed run had other columns, classes, or numbers of strings; see `check_columns`."""
    if settings.resume and dataset.columns and dataset.entry:
        check_columns(dataset.entry, Path(settings.run_dir, "columns"))


def optimizers_of(center, local):
    """Returns the optimizers of a scheme and their location, as text."""
    sides = ("on the ps", center.optimizers.names), ("on the workers", local.optimizers.names)
    said = ", ".join(f"{' and '.join(sorted(names))} {where}" for where, names in sides if names)
    return said.replace("GradientDescent", "SGD") or "the scheme's own steps"


def unit_of(settings, model):
    """Returns the unit of a run's loss: "nats per character" for a cross-entropy on `--data=text`; otherwise None."""
    is_entropy = model.minimizes in ("sparse categorical crossentropy of logits", "sparse categorical crossentropy")
    return "nats per character" if settings.data == "text" and is_entropy else None


def what_is_trained(model, dataset, num_workers, optimizers, is_own=False, unit=None, are_leased=False):
    """Returns a line on a run's objective, optimizers and number of samples; for a user's own data also their size.

    Args:
      unit: unit of the loss, or None.
    """
    measure = f" in {unit}" if unit else ""
    own = model.own_optimizer
    ignored = f" (the model's own {own} is not used)" if own else ""
    samples = _samples_text(dataset, num_workers, is_own, are_leased)
    columns = f"; {model.columns}" if model.columns else ""
    return f"minimizes {model.minimizes}{measure}, by {optimizers}{ignored}; {samples}{columns}"


def split(dataset, settings):
    """Returns the training data, and the validation data as a test set, or None.

    It is the validation set of the data, or held out by `--validation`, see `datasets.hold_out`.

    Raises:
      UserError: if there are both, or --patience without any.
    """
    if settings.patience and not settings.validation and dataset.validation is None:
        what = "give their share, too, with --validation, or let --data give three pairs: training, validation, test"
        raise UserError(f"--patience needs held-out samples: {what}")
    is_stream = isinstance(dataset, Stream)
    has_own = dataset.counts["validation"] is not None if is_stream else dataset.validation is not None
    if has_own and settings.validation and not settings.run.num_evaluators:  # an evaluator has it by default
        raise UserError(f"--validation={settings.validation}: --data={settings.data} gives a validation set of its own")
    if has_own or is_stream or not settings.validation:
        return dataset, dataset.validation
    return datasets.hold_out(dataset, settings.validation, settings.seed)


def samples_of_each(dataset, num_workers):
    """Returns the number of samples of each worker, a list; None in it for an endless stream."""
    if isinstance(dataset, Stream):
        return [share.count for share in dataset.shares]
    return [len(range(i, dataset.num_samples, num_workers)) for i in range(num_workers)]


def samples_of(dataset, settings):
    """Returns a `common.data.Data` for shapes and types: for a stream, some of its samples."""
    if not isinstance(dataset, Stream):
        return dataset
    if settings.model in BUILT_IN and dataset.first.is_classification:
        why = f"the number of classes in {dataset.name} is not known before it is read"
        raise UserError(f"--model={settings.model}: {why}; bring a model of your own, --model=FILE.py:FUNCTION")
    return dataset.first


def batches_of(dataset, settings, index, num_workers, position):
    """Returns the batches of worker `index`, from a `common.data.Position` on."""
    if isinstance(dataset, Stream):
        return StreamedBatches(dataset, index, settings.batch_size, settings.seed + index, position.value)
    x, y, *weights = datasets.shard(dataset, index, num_workers)
    weights = weights[0] if weights else None
    return Batches(x, y, settings.batch_size, settings.seed + index, weights=weights, position=position)


def position_of(settings, index, num_workers, num_samples):
    """Returns the `common.data.Position` of a worker in its samples, as left by its previous process."""
    path = Path(settings.run_dir, "metrics", f"worker-{index}.position")
    return Position(path, settings.seed, index, num_workers, -1 if num_samples is None else num_samples)


def evaluation_of(model, at, dataset, feeds, find=None):
    """Returns loss and metrics `at` (parameters, state) on the test set, {name: tensor}; adds the feeds to `feeds`.

    `find` looks up rows of tables, see `common.scheme.found_by`.
    """
    with tables.found_by(find):
        if isinstance(dataset, Stream):
            test = TestSet(dataset)
            return model.evaluate_parts(*at, test.part, test.num_samples, test.batch_size)
        return model.evaluate(*at, *fed_test_set(dataset, feeds))


def fed_test_set(dataset, feeds):
    """Returns x, y and weights, if any, of the test set as local variables; adds their feeds to `feeds`."""
    return tuple(fed(name, part, feeds) for name, part in zip(("x_test", "y_test", "w_test"), dataset.test, strict=False))


def _check_model(settings, model):
    path = Path(settings.run_dir, "model.json")
    if settings.resume and path.exists():
        try:
            before = json.loads(path.read_text())["variables"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(f"{path} is damaged: if the model is unchanged, remove that file") from None
        if before != model.description:
            pairs = itertools.zip_longest(before, model.description)
            was, now = next((b, n) for b, n in pairs if b != n)
            named = [f"{v[0]} {v[1]}" if v else "none" for v in (was, now)]
            raise UserError(f"--resume: the model has changed: it had {named[0]}, and now has {named[1]}")
    else:
        run_folder.write_json(path, {"variables": model.description, "paths": model.paths})


def _samples_text(dataset, num_workers, is_own, are_leased=False):
    if dataset.num_samples is None:
        return f"an unknown or endless number of samples, {dataset.text}"
    share = " or ".join(f"{each:,}" for each in sorted(set(samples_of_each(dataset, num_workers))))
    each = f", {share} for each of {num_workers} workers" if num_workers > 1 else ""
    each = ", which workers lease piece by piece" if are_leased else each
    if dataset.text:  # of converted files, or of a stream
        return f"{dataset.num_samples:,} samples{each}, {dataset.text}"
    arrays = [array for part in dataset.train for array in arrays_in(part)]
    whole, in_files = (sum(a.nbytes for a in some) for some in (arrays, [a for a in arrays if isinstance(a, Rows)]))
    kept = f"of which {limits.as_bytes(in_files)} are mapped, not copied" if in_files else "in memory"
    where = f", from arrays of {limits.as_bytes(whole)}{',' * bool(in_files)} {kept}" if is_own else ""
    return f"{dataset.num_samples:,} samples{each}{where}"
