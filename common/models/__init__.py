"""A Keras model as a pure function of one flat vector, its loss and metrics, and the models that come with this project.

Begin with `models`.
"""

from typing import TYPE_CHECKING

from common.front_door import front_door

if TYPE_CHECKING:  # the front door: what others may import
    from common.models import keras_model, transformer

__getattr__, __dir__ = front_door(__name__)
