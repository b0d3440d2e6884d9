"""How many pieces the Mooncake client gets per call, and which pieces are read again.

The library's answers are simulated, because a real one returns most of these codes only rarely.
"""

from collections.abc import Sequence

from lockstep.storage_backends.mooncake.pieces import (
    LEASES,
    STEP_BYTES,
    STEP_PIECES,
    BufferPiece,
    Code,
    Columns,
    move,
    renewing,
)
from lockstep.storage_backends.threaded_backend import Stop
from tests.kit.storage.calls import soon_off_loop


class TestSteps:
    def moved(
        self, sizes: Sequence[int], held: Sequence[str] = (), *, pieces: int = 2
    ) -> tuple[list[list[str]], list[int]]:
        """Move `pieces` pieces of each key; a step with a key in `held` fails at the deadline.

        Return the keys of each call, and a result code for each key.
        """
        calls: list[list[str]] = []
        stop = Stop(soon_off_loop())

        def by(keys: list[str], _: object, lengths: list[list[int]], __: object) -> list[int]:
            calls.append(keys)
            stop.requested = not set(held).isdisjoint(keys)
            sums = [sum(each) for each in lengths]
            return [-800 if key in held else n for key, n in zip(keys, sums, strict=True)]

        keys = [f"k{number}" for number in range(len(sizes))]
        wanted = [[BufferPiece(0, size, 0)] * pieces for size in sizes]
        return calls, move(by, keys, wanted, stop)

    def test_the_first_piece_goes_alone_and_later_ones_together(self) -> None:
        calls, codes = self.moved([100] * 10)
        assert codes == [200] * 10
        assert calls[0] == ["k0"]
        assert len(calls) == 1 + -(-19 // STEP_PIECES)

    def test_large_pieces_go_one_at_a_time(self) -> None:
        calls, codes = self.moved([STEP_BYTES] * 4)
        assert codes == [2 * STEP_BYTES] * 4
        assert len(calls) == 8

    def test_an_owner_that_holds_the_first_piece_holds_no_other(self) -> None:
        calls, codes = self.moved([100] * 32, ["k0"])
        assert calls == [["k0"]]
        assert codes == [Code.NOT_TRANSFERRED] + [Code.MASTER_LATE] * 31

    def test_after_a_piece_that_failed_the_others_of_its_object_are_left_out(self) -> None:
        calls: list[list[str]] = []

        def by(keys: list[str], *_: object) -> list[int]:
            calls.append(keys)
            return [-704 if key == "k0" else 5 for key in keys]

        wanted = [[BufferPiece(0, 5, 0)] * 3, [BufferPiece(0, 5, 0)]]
        assert move(by, ["k0", "k1"], wanted, Stop(soon_off_loop())) == [Code.NOT_FOUND, 5]
        assert calls == [["k0"], ["k1"]]

    def test_where_the_library_gives_no_answer_all_keys_failed(self) -> None:
        def by(*_: object) -> list[int]:
            return []

        codes = move(by, ["k0"], [[BufferPiece(0, 5, 0)]], Stop(soon_off_loop()))
        assert codes == [Code.NO_MASTER]


class TestLeases:
    def codes(
        self, *rounds: dict[str, int], renewed: int = 0, dropped: bool = False, late: bool = False
    ) -> tuple[list[int], list[list[str]]]:
        """Read keys `a` and `b` with simulated result codes.

        Each dict has the codes of one call by key, and later calls repeat the last dict. A key without
        an entry gets code 5. Return the final codes, and the keys of each call.
        """
        calls: list[list[str]] = []
        stop = Stop(soon_off_loop())

        def by(keys: list[str], addresses: Columns, *_: Columns) -> list[int]:
            assert addresses == [[ord(key)] for key in keys]
            calls.append(keys)
            stop.requested = late
            answer = rounds[min(len(calls), len(rounds)) - 1]
            return [answer.get(key, 5) for key in keys]

        def renew(keys: list[str]) -> list[int]:
            return [renewed] * len(keys)

        columns = [[ord("a")], [ord("b")]]
        read = renewing(by, renew, lambda _: dropped, stop)
        return read(["a", "b"], columns, columns, columns), calls

    def test_only_what_came_too_late_is_read_again(self) -> None:
        assert self.codes({"b": Code.LEASE_EXPIRED}, {}) == ([5, 5], [["a", "b"], ["b"]])

    def test_what_comes_too_late_under_every_lease_is_given_up(self) -> None:
        codes, calls = self.codes({"a": Code.LEASE_EXPIRED})
        assert codes == [Code.LEASE_EXPIRED, 5]
        assert calls == [["a", "b"]] + [["a"]] * LEASES

    def test_nothing_is_read_again_after_the_deadline(self) -> None:
        codes, calls = self.codes({"a": Code.LEASE_EXPIRED}, late=True)
        assert (codes, len(calls)) == ([Code.MASTER_LATE, 5], 1)

    def test_what_has_no_further_lease_is_told_as_the_master_tells_it(self) -> None:
        codes, calls = self.codes({"a": Code.LEASE_EXPIRED}, renewed=Code.NOT_FOUND)
        assert (codes, len(calls)) == ([Code.NOT_FOUND, 5], 1)

    def test_what_is_invalid_is_read_again_only_where_another_may_have_lost_the_lease(self) -> None:
        codes, calls = self.codes({"a": Code.INVALID}, {})
        assert (codes, len(calls)) == ([Code.INVALID, 5], 1)
        assert self.codes({"a": Code.INVALID}, {}, dropped=True)[0] == [5, 5]
