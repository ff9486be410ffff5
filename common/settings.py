"""What a run is to do: all flags, and what follows from them before it begins."""


class Settings:
    """A namespace that nothing changes once it is made; `but` makes another."""

    def __init__(self, **values):
        self.__dict__.update(values)

    def __setattr__(self, name, value):
        raise AttributeError(f"settings do not change: make others with but({name}=...)")

    def but(self, **changes):
        """Returns these settings with some changes."""
        return Settings(**{**vars(self), **changes})
