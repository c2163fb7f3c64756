"""The one error that reading and writing folders raises for what a user can mend."""


class ModelFolderError(ValueError):
    """A model or adapter folder is missing, incomplete, foreign or does not belong to its partner."""
