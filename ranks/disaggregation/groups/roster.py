"""Who is there: what a directory lists, told apart from what a directory loses."""

from collections.abc import Collection

from ....errors import StorageError
from .directory import GroupDirectory, Member


class Roster:
    """The groups that are taken to be there, by name. Owned by one thread.

    A group that is listed no more while others are is gone. Where all vanish at once, or after the
    directory did not answer, it may be the directory that has lost them: they have a while to be listed
    again. One that was started anew is gone and has come; one that is only listed anew is still there.
    """

    def __init__(self, directory: GroupDirectory, grace_s: float) -> None:
        """`grace_s` is a lease and what passes between two renewals."""
        self.members: dict[str, Member] = {}
        self._directory = directory
        self._grace_s = grace_s
        self._back_by_s: dict[str, float] = {}
        """By when groups have to be listed again that the directory may have lost."""

    def look(self, now_s: float, names: Collection[str]) -> tuple[list[str], list[Member]]:
        """Ask the directory for the groups of these names; return which are gone, and which have come.

        Those that have come are in another life, and one that is among both was started anew.
        """
        try:
            members = self._directory.groups().members
        except StorageError:
            # No group can renew its lease there, and it may come back without any.
            self._back_by_s = dict.fromkeys(self.members, now_s + self._grace_s)
            return [], []
        listed = {e.registration.name: e for e in members if e.registration.name in names}
        missing = [each for each in self.members if each not in listed]
        if len(missing) == len(self.members):
            for name in missing:
                self._back_by_s.setdefault(name, now_s + self._grace_s)
        gone = [each for each in missing if self._back_by_s.get(each, now_s) <= now_s]
        for name, member in listed.items():
            self._back_by_s.pop(name, None)
            known = self.members.get(name, member)
            if known.registration.start != member.registration.start:
                gone.append(name)
        for name in gone:
            self.forget(name)
        came = [
            member
            for name, member in listed.items()
            if name not in self.members or self.members[name].life < member.life
        ]
        self.members.update((each.registration.name, each) for each in came)
        return gone, came

    def forget(self, name: str) -> None:
        """Take a group for gone, whatever is listed."""
        self.members.pop(name, None)
        self._back_by_s.pop(name, None)
