"""A Keras model as a pure function of one flat vector, its loss and metrics, and the built-in models.

Begin with `keras_model`.
"""

from typing import TYPE_CHECKING

from common.core import front_door

if TYPE_CHECKING:  # the front door: public names of the package
    from common.models import embedding, keras_model, transformer
    from common.models.builtin_models import BUILT_IN
    from common.models.stateless_model import Model

__getattr__, __dir__ = front_door(__name__)
