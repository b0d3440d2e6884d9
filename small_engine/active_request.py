"""A request in the system, with how far it has come."""

import numpy as np

from ..ranks.protocol.answers import Admission
from .contents import KeyedTokens
from .limits import EngineLimits
from .request import TokenIds, WorkloadRequest, output_tokens

NEVER = 1 << 62
"""The turn of a request that was not admitted yet: it comes after all others."""


class ActiveRequest:
    """A request from its arrival until it has left. Lengths are in tokens."""

    def __init__(self, request: WorkloadRequest, limits: EngineLimits) -> None:
        self.namespace = request.namespace
        """Requests of different namespaces share nothing."""
        most, page_tokens = limits.output_tokens_max, limits.page_tokens
        self._page_tokens = page_tokens
        self.name, self.index = request.name, request.index
        self.prompt = request.prompt_length
        self.outputs = min(request.output_length, most) if most else request.output_length
        self.total = self.prompt + self.outputs
        # The last output token is never an input, so that its KV is not computed.
        self.last = self.prompt + max(0, self.outputs - 1)
        outputs = output_tokens(request.index, self.outputs)
        self.tokens = KeyedTokens(np.concatenate([request.prompt_tokens, outputs]), page_tokens)
        self.admission: Admission | None = None
        """What was cached for the request, or saved; None until it is admitted."""
        self.hits: Admission | None = None
        """What was cached for it when it was ready for the first time."""
        self.turn = NEVER
        """Which first admission it was, counted over all requests: the youngest has the highest."""
        self.computed = 0
        """The length that the request has, computed or from the cache."""
        self.reserved = 0
        """The length that the request has device pages for."""
        self.was_aside = False
        """Whether it has left the device for others, and has not begun again since."""
        self.reached = 0
        """The length that it had when it left the device, if its prompt was computed by then: the
        tokens before are known, and need not be generated again."""
        self.lost = 0
        """The length that it had when it left the device, perhaps to be computed again."""

    @property
    def goal(self) -> int:
        """The length that it computes in chunks, before it decodes."""
        return max(self.prompt, self.reached)

    @property
    def has_moved(self) -> bool:
        """Whether it has computed something since it was admitted or came back."""
        return self.computed > self.hit_tokens

    @property
    def matchable(self) -> TokenIds:
        """The tokens that a match may cover: the last token of a prompt is computed once at least."""
        return self.tokens.ids[: max(self.prompt - 1, self.reached)]

    @property
    def computed_ids(self) -> TokenIds:
        return self.tokens.ids[: self.computed]

    @property
    def hit_tokens(self) -> int:
        """The length that was cached; 0 before the request is admitted."""
        return 0 if self.admission is None else self.admission.cached_tokens

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """The lengths at which a chunk has to end."""
        return () if self.admission is None else self.admission.checkpoints

    def admit(self, admission: Admission, reserve: int) -> None:
        """Note what it has from the cache, and that it has device pages for `reserve` tokens."""
        room = max(reserve, admission.cached_tokens)
        self.admission, self.reserved = admission, -(-room // self._page_tokens) * self._page_tokens

    def leave_device(self) -> None:
        """Have no device pages any more; what was computed may still be had elsewhere."""
        if self.computed >= self.prompt:
            self.reached = max(self.reached, self.computed)
        self.lost = max(self.lost, self.computed)
        self.reserved = 0

    def begin_again(self) -> None:
        """Forget what it had; it is not admitted any more."""
        self.leave_device()
        self.admission, self.was_aside = None, False
        self.computed = 0


def turn_of(active: ActiveRequest) -> int:
    """Return by what requests are ordered: whoever was admitted first comes first."""
    return active.turn
