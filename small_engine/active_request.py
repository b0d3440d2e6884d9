"""One request in the engine, with its progress."""

import numpy as np

from ..ranks.protocol.answers import Admission
from .contents import KeyedTokens
from .limits import EngineLimits
from .request import TokenIds, WorkloadRequest, output_tokens

NEVER = 1 << 62
"""Value of `turn` for a request that was never admitted; sorts after all admitted requests."""


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
        # The engine never feeds the last output token back to the model, so that token has no KV.
        self.last = self.prompt + max(0, self.outputs - 1)
        outputs = output_tokens(request.index, self.outputs)
        self.tokens = KeyedTokens(np.concatenate([request.prompt_tokens, outputs]), page_tokens)
        self.admission: Admission | None = None
        """The numbers of tokens that the cache provided, by tier, at the last admission or resume. None
        before the first admission."""
        self.hits: Admission | None = None
        """The numbers of tokens that the cache provided, by tier, when the request first became ready.
        None until it is ready."""
        self.turn = NEVER
        """The request's place in the order of first admission. The youngest request has the highest
        number."""
        self.computed = 0
        """Number of tokens whose KV is computed or loaded."""
        self.reserved = 0
        """Number of tokens that device pages are allocated for."""
        self.was_aside = False
        """Whether the request was retracted at least once since it started or started over."""
        self.reached = 0
        """The largest number of computed tokens with which the request left the device after its prompt
        was complete; 0 if it never did. Its outputs up to this number are known. After the next
        admission, they are therefore computed in chunks, like the prompt."""
        self.lost = 0
        """Number of tokens that were computed when the request left the device. Tokens that the cache
        does not restore are recomputed."""

    @property
    def goal(self) -> int:
        """Number of tokens to compute in chunks before the request decodes token by token."""
        return max(self.prompt, self.reached)

    @property
    def has_moved(self) -> bool:
        """Whether the request has computed a token since it was admitted or resumed."""
        return self.computed > self.hit_tokens

    @property
    def matchable(self) -> TokenIds:
        """The tokens that a match may cover. The prompt's last token must always be computed."""
        return self.tokens.ids[: max(self.prompt - 1, self.reached)]

    @property
    def computed_ids(self) -> TokenIds:
        return self.tokens.ids[: self.computed]

    @property
    def hit_tokens(self) -> int:
        """Length of the cached prefix in tokens; 0 before the request is admitted."""
        return 0 if self.admission is None else self.admission.cached_tokens

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Lengths in tokens at which a chunk of the prompt has to end."""
        return () if self.admission is None else self.admission.checkpoints

    def admit(self, admission: Admission, reserve: int) -> None:
        """Record the cached prefix, and that device pages for `reserve` tokens are allocated."""
        room = max(reserve, admission.cached_tokens)
        self.admission, self.reserved = admission, -(-room // self._page_tokens) * self._page_tokens

    def leave_device(self) -> None:
        """Record that the request's device pages are freed and how many tokens it had computed."""
        if self.computed >= self.prompt:
            self.reached = max(self.reached, self.computed)
        self.lost = max(self.lost, self.computed)
        self.reserved = 0

    def begin_again(self) -> None:
        """Reset the request to its state before admission, to admit and compute it again."""
        self.leave_device()
        self.admission, self.was_aside = None, False
        self.computed = 0


def turn_of(active: ActiveRequest) -> int:
    """Return the sort key that orders requests by first admission."""
    return active.turn
