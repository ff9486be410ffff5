"""Optimizers of a vector, and the slots that they share from round to round."""

import copy
from typing import Any

from common import tf
from common.core import UserError
from common.scheme.steps import current_round


class Optimizers:
    """The optimizers of one vector. A scheme creates them anew in every round; their slots are created once.

    The n-th optimizer of a round shares the slots of the n-th optimizer of every earlier round. Its other attributes are its
    own, for example a learning rate tensor.
    """

    def __init__(self):
        self._in_rounds: list[Any] = []  # those of the first round
        self._by_hand: list[tuple[Any, Any]] = []  # used outside of rounds

    @property
    def names(self):
        """The names of all used optimizers, a set."""
        return {optimizer.get_name() for optimizer in [*self._in_rounds, *(own for _, own in self._by_hand)]}

    def use(self, optimizer, prepare=lambda optimizer: None):
        """Returns a copy of the optimizer with the slots of its counterpart in earlier rounds.

        Args:
          optimizer: a `tf.train.Optimizer`.
          prepare: function of the copy, called once to create slots in advance, since `tf.cond` branches cannot create them.

        Raises:
          UserError: if it is not an optimizer, not of its counterpart's class, or equal to another with slots.
        """
        if not isinstance(optimizer, tf.train.Optimizer):
            raise UserError(f"expected an optimizer of tf.train, as tf.train.AdamOptimizer(0.001), not {optimizer!r}")
        round = current_round.get()
        used = self._by_hand if round is None else round.optimizers.setdefault(id(self), [])
        for known, own in used:
            if known is optimizer:
                return own
            if own._slots and _numbers(known) == _numbers(optimizer):
                raise UserError(
                    f"a round uses two equal optimizers with slots, {type(optimizer).__qualname__}: make one before the first "
                    "step, and use it each time"
                )
        own, place = copy.copy(optimizer), len(used)
        used.append((optimizer, own))
        if round is not None and place < len(self._in_rounds):
            first = self._in_rounds[place]
            if type(first).__qualname__ != type(own).__qualname__:
                kinds = f"{type(first).__qualname__}, now {type(own).__qualname__}"
                raise UserError(f"a scheme has to use the same optimizers in every round: it was {kinds}")
            own._slots, own._non_slot_dict = first._slots, first._non_slot_dict
            return own
        own._slots, own._non_slot_dict = {}, {}
        if round is not None:
            self._in_rounds.append(own)
        prepare(own)
        return own


def _numbers(optimizer):
    """Returns the attributes that distinguish an optimizer from others of its class."""
    values = {name: value for name, value in vars(optimizer).items() if not isinstance(value, dict)}
    return type(optimizer), {name: v if isinstance(v, (int, float, str)) else id(v) for name, v in values.items()}


def check_pieces(optimizer, pieces):
    """Raises a `UserError` if an optimizer with shared scalars, as Adam's powers of β, has changed several pieces."""
    if len(pieces) > 1 and optimizer._non_slot_dict:
        raise UserError(
            f"{type(optimizer).__qualname__} keeps numbers for all parameters together, as Adam's powers of β: this push "
            "cannot use it on several ps; choose --num_ps=1, another optimizer, or center.together"
        )
