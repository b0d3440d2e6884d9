"""A request in the engine, with its progress."""

import numpy as np

from ..ranks.protocol.answers import Admission
from .contents import KeyedTokens
from .limits import EngineLimits
from .request import TokenIds, WorkloadRequest, output_tokens

NEVER = 1 << 62
"""`turn` of a request that was never admitted; sorts after all others."""


class ActiveRequest:
    """A request from its arrival until it is finished or aborted. Lengths are in tokens."""

    def __init__(self, request: WorkloadRequest, limits: EngineLimits) -> None:
        self.namespace = request.namespace
        """The namespace; requests of different namespaces share no pages."""
        most, page_tokens = limits.output_tokens_max, limits.page_tokens
        self._page_tokens = page_tokens
        self.name, self.index = request.name, request.index
        self.prompt = request.prompt_length
        self.outputs = min(request.output_length, most) if most else request.output_length
        self.total = self.prompt + self.outputs
        # The last output token is never an input, so its KV is not computed.
        self.last = self.prompt + max(0, self.outputs - 1)
        outputs = output_tokens(request.index, self.outputs)
        self.tokens = KeyedTokens(np.concatenate([request.prompt_tokens, outputs]), page_tokens)
        self.admission: Admission | None = None
        """The cached or resumed prefix; None until the request is admitted."""
        self.hits: Admission | None = None
        """The cached prefix when the request first became ready."""
        self.turn = NEVER
        """Sequence number of the first admission over all requests; the youngest request has the
        highest."""
        self.computed = 0
        """Number of tokens whose KV is computed or loaded."""
        self.reserved = 0
        """Number of tokens that device pages are allocated for."""
        self.was_aside = False
        """Whether the request was retracted and has not started again from scratch since."""
        self.reached = 0
        """The computed length when the request left the device, if its prompt was complete. The tokens
        before this length are known, so they are not generated again."""
        self.lost = 0
        """The computed length when the request left the device; may have to be recomputed."""

    @property
    def goal(self) -> int:
        """The length to compute in chunks before decoding."""
        return max(self.prompt, self.reached)

    @property
    def has_moved(self) -> bool:
        """Whether the request has computed a token since it was admitted or resumed."""
        return self.computed > self.hit_tokens

    @property
    def matchable(self) -> TokenIds:
        """The tokens that a match may cover; the prompt's last token must be computed once."""
        return self.tokens.ids[: max(self.prompt - 1, self.reached)]

    @property
    def computed_ids(self) -> TokenIds:
        return self.tokens.ids[: self.computed]

    @property
    def hit_tokens(self) -> int:
        """The cached length; 0 before the request is admitted."""
        return 0 if self.admission is None else self.admission.cached_tokens

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Lengths at which a chunk has to end."""
        return () if self.admission is None else self.admission.checkpoints

    def admit(self, admission: Admission, reserve: int) -> None:
        """Record the cached prefix, and device pages allocated for `reserve` tokens."""
        room = max(reserve, admission.cached_tokens)
        self.admission, self.reserved = admission, -(-room // self._page_tokens) * self._page_tokens

    def leave_device(self) -> None:
        """Record that the device pages are freed; computed tokens may still be cached elsewhere."""
        if self.computed >= self.prompt:
            self.reached = max(self.reached, self.computed)
        self.lost = max(self.lost, self.computed)
        self.reserved = 0

    def begin_again(self) -> None:
        """Reset the request to its state before admission, to recompute it."""
        self.leave_device()
        self.admission, self.was_aside = None, False
        self.computed = 0


def turn_of(active: ActiveRequest) -> int:
    """Return the sort key of requests: order of first admission."""
    return active.turn
