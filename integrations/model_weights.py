"""What the weights are that an engine loads: the commit they are of, or a digest of their files.

Any engine can use this: it says how it is told to load, and where its users give a version.
"""

from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from .weights import FileDigests, commit_of, is_commit, weights_digest


@dataclass(frozen=True)
class LoadedWeights:
    """Says how an engine is told to load the weights of one model."""

    name: str
    """A path, or a name at the hub."""
    revision: object
    """Which state of the repository at the hub; None where `name` is no such repository."""
    load_format: str
    from_files: bool
    """Whether this format reads files of the model's own folder, and nothing else."""

    def identity(self, digests: FileDigests, where: str) -> str:
        """Return what the weights are.

        Raises `ConfigError` where that cannot be told; `where` is where users give a version.
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
    """Return the error for files that are to tell KV apart and cannot be read."""
    return ConfigError(f"{what} cannot be read to tell KV apart by them ({error}); {remedy(where)}")


def remedy(where: str) -> str:
    """Return what a user can do about weights that cannot be told apart."""
    return f"give weights_version in {where}, and change it whenever they change"
