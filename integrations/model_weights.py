"""Identity of a model's weights in page keys: a commit, or a digest of the weight files."""

from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from .weights import FileDigests, commit_of, is_commit, weights_digest


@dataclass(frozen=True)
class LoadedWeights:
    """How an engine loads the weights of one model."""

    name: str
    """The model: a local path, or the name of a Hugging Face repository."""
    revision: object
    """Revision of the Hugging Face repository; None if `name` is a local path."""
    load_format: str
    from_files: bool
    """Whether the engine's load format reads only files in the model's folder."""

    def identity(self, digests: FileDigests, where: str) -> str:
        """Return the identity of the weights.

        Raises `ConfigError` if the weights cannot be identified. The message names `where`, the setting
        in which users give a version.
        """
        path = Path(self.name)
        if self.from_files:
            commit = commit_of(path)
            if commit is None and "://" not in self.name and not path.exists():
                commit = str(self.revision) if is_commit(self.revision) else None
            if commit is not None:
                return f"commit {commit}"
            if path.exists():
                try:
                    return f"files {weights_digest(path, digests)}"
                except OSError as error:
                    raise unreadable(f"the weights of {self.name}", error, where) from error
        raise ConfigError(
            f"the weights of {self.name} (load_format {self.load_format!r}, revision"
            f" {self.revision!r}) are neither local files nor a commit; {remedy(where)}"
        )


def unreadable(what: str, error: OSError, where: str) -> ConfigError:
    """Return the error for weight files that cannot be read."""
    return ConfigError(f"{what} cannot be read to identify their KV ({error}); {remedy(where)}")


def remedy(where: str) -> str:
    """Return the sentence for error messages that advises the user to give a version of the weights."""
    return f"give weights_version in {where}, and change it whenever the weights change"
