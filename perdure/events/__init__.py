"""The event bus for the control plane: the code is that of the training library, which users' images have as well."""

from perdure_training.events import *
from perdure_training.events import __all__ as __all__
