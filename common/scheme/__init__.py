"""The building blocks of schemes: global parameters, a worker's local parameters, and the steps of a round.

Begin with `center` and `local`, the two arguments of each scheme, and `rounds`, the assembly of the yielded steps to a round.
"""

from typing import TYPE_CHECKING

from common.core import front_door

if TYPE_CHECKING:  # the front door: public names of the package
    from common.scheme import local_rows, saved_tables, tables
    from common.scheme.barriers import Pace, Ring, Together
    from common.scheme.center import GlobalParameters, fragments_of
    from common.scheme.compression import BIASED, Compression, compression_of, pack_sparse
    from common.scheme.definition import Scheme
    from common.scheme.groups import Groups, groups_of
    from common.scheme.learning_rates import Rate, check_rates, hyperparameters, schedule_of
    from common.scheme.local import LocalParameters
    from common.scheme.round_size import RoundSize, size_of
    from common.scheme.rounds import Rounds, build_rounds, build_steps, repeat_rounds, steps_apart, timed_rounds
    from common.scheme.sharded_tables import first_rows, place_of
    from common.scheme.steps import PARTS, Step, is_on_ps
    from common.scheme.tables import found_by

__getattr__, __dir__ = front_door(__name__)
