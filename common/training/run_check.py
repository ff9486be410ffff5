"""Check of a run's data, model and flags before it begins, by building its graph without training."""

from common import tf
from common.cluster import membership
from common.core import FITTING, UserError, model_options, tell
from common.data import Stream, datasets, mapped, user_function
from common.models import keras_model
from common.scheme import (
    GlobalParameters,
    LocalParameters,
    Together,
    build_steps,
    compression_of,
    fragments_of,
    groups_of,
    hyperparameters,
    schedule_of,
    size_of,
    tables,
)
from common.training import initial_values
from common.training.model_and_data import batches_of, check_same_columns, samples_of, split
from common.training.sample_counts import last_step


def check(settings, dataset, scheme=None):
    """Raises a `UserError` if data and model cannot be trained by this many workers; trains nothing.

    With `--compress` also if the scheme's messages cannot be compressed.
    """
    has_own = dataset.validation is not None and not isinstance(dataset, Stream)
    dataset, held_out = split(dataset, settings)
    if has_own and settings.validation:
        tell(f"validation: the set that the data have of their own, not --validation={settings.validation}")
    if settings.callback is not None:
        user_function("--callback", settings.callback)
    check_leases(settings, dataset)
    if not isinstance(dataset, Stream):
        check_same_columns(settings, dataset)
        datasets.shard(dataset, 0, settings.num_workers if settings.launch else 1)
    num_samples, is_stream, dataset = dataset.num_samples, isinstance(dataset, Stream), samples_of(dataset, settings)
    options = {"tables_on_ps": scheme is not None, **model_options(settings)}
    model = keras_model.build(settings.model, dataset, settings.seed, settings.loss, **options)
    initial_values.take(settings, model, dataset, say=lambda line: None)
    schedule, of_update = schedule_of(settings), None
    if settings.model not in FITTING.get(settings.data, ()):
        with keras_model.named(settings.model):
            _trace(model, dataset)
    compression = compression_of(settings)
    if scheme:
        tables.check_flags(settings, model.tables)
    if model.tables and settings.run.num_evaluators:
        raise UserError("--num_evaluators: an evaluator needs the whole model, but its tables (common.Embedding) are on the ps")
    sets = [dataset.train, dataset.test, *([held_out.test] if held_out and not is_stream else [])]
    tables.check_data(model, [x for x, *_ in sets], is_stream)
    never_ends, groups = num_samples is None, groups_of(settings, model)
    if scheme and (compression or model.tables or groups or settings.ema or settings.max_workers or schedule or never_ends):
        with tf.Graph().as_default():
            pieces = {"num_ps": settings.num_ps or 1, "fragments": fragments_of(settings), "tables": model.tables}
            pieces |= {"max_rows": settings.max_rows, "groups": groups, "ema": settings.ema}
            center = GlobalParameters(model.initial_parameters, **pieces, compression=compression)
            center.members = membership.Members("") if settings.max_workers else None
            batches = batches_of(dataset, settings, 0, 1, None)
            local = LocalParameters(
                center,
                model,
                batches,
                num_workers=settings.max_workers or settings.num_workers,
                samples_of_each=[None] if never_ends else None,
                begin_workers=settings.run.begin_workers if settings.max_workers else None,
            )
            build_steps(scheme, center, local, hyperparameters(settings, center, local))
            of_update = size_of(center, local, settings.batch_size).samples_per_update
            if settings.max_workers and schedule and not settings.steps and isinstance(center.waits(local), Together):
                raise UserError(
                    "--max_workers: the number of updates in an epoch depends on the number of workers, so the end of the "
                    "learning-rate schedule is not known: give --steps"
                )
    if schedule:
        schedule.ask = lambda: last_step(settings, num_samples, of_update)
        with tf.Graph().as_default():
            schedule(tf.placeholder(tf.int64, []))


def check_leases(settings, dataset):
    """Raises a `UserError` if an elastic run is impossible because the samples are sharded among the workers."""
    if settings.max_workers and isinstance(dataset, Stream):
        raise UserError(
            f"--max_workers={settings.max_workers}: streamed datasets are divided among the workers when a run begins: give "
            "one that ends, without --stream, or leave --max_workers out"
        )


def _trace(model, dataset):
    """Builds a model's training and evaluation in a graph, without training.

    Raises:
      UserError: if that is impossible.
    """

    def placeholders(samples):
        return [mapped(lambda array: tf.placeholder(array.dtype, [2, *array.shape[1:]]), part) for part in samples]

    with tf.Graph().as_default(), tables.found_by(tables.Asked(model.tables)):
        values = tf.placeholder(tf.float32, [model.size]), [tf.placeholder(v.dtype, v.shape) for v in model.initial_state]
        model.loss_and_gradient(*values, *placeholders(dataset.train))
        model.evaluate(*values, *placeholders(dataset.test))
