"""Samples: data sets in memory or mapped, files and pipelines converted to them, streams, and the batches of a worker.

Begin with `datasets`, which loads, checks and shards data, and `batches`, which draws batches in the graph.
"""

from typing import TYPE_CHECKING

from common.core import front_door

if TYPE_CHECKING:  # the front door: what others may import
    from common.data import datasets, sources, streams
    from common.data.array_types import OF_STRINGS
    from common.data.batches import Batches, Position, assign_part, fed, gathered, local_variable, make_local, order_of
    from common.data.builtin_data import ALPHABET, decoded, digits, encoded, next_characters, quadratic_optimum
    from common.data.columns import EXACT_UP_TO, Column, Columns, check_columns, copy_columns, listed, values_of
    from common.data.datasets import Data
    from common.data.ledger import LeasedBatches, Ledger
    from common.data.mapped_rows import Rows, chunks
    from common.data.nested_arrays import arrays_in, mapped
    from common.data.streams import Stream, StreamedBatches, TestSet
    from common.data.user_functions import call_user_function, one_line, user_function, user_module

__getattr__, __dir__ = front_door(__name__)
