"""A request in the system, with how far it has come."""

import numpy as np

from ..ranks.replica.answers import Admission
from .contents import KeyedTokens
from .request import Requested, TokenIds, output_tokens


class ActiveRequest:
    """A request from its arrival until it has left. Lengths are in tokens."""

    def __init__(self, request: Requested, *, page_tokens: int, output_tokens_max: int) -> None:
        """`output_tokens_max` 0 stands for no limit."""
        most = output_tokens_max
        self.name, self.index = request.name, request.index
        self.prompt = request.prompt_length
        self.outputs = min(request.output_length, most) if most else request.output_length
        self.total = self.prompt + self.outputs
        # The last output token is never an input, so that its KV is not computed.
        self.last = self.prompt + max(0, self.outputs - 1)
        outputs = output_tokens(request.index, self.outputs)
        self.tokens = KeyedTokens(np.concatenate([request.prompt_tokens, outputs]), page_tokens)
        self.admission: Admission | None = None
        """What was cached for the request; None until it is admitted."""
        self.turn = 0
        """Which admission it was, counted over all requests: the youngest has the highest."""
        self.computed = 0
        """The length that the request has, computed or from the cache."""
        self.reserved = 0
        """The length that the request has device pages for."""
        self.is_handed_over = False
        """Whether another group has computed its whole prompt, and it is here with its tail."""

    @property
    def matchable(self) -> TokenIds:
        """The tokens that a match may cover: the last token of a prompt is always computed."""
        return self.tokens.ids[: self.prompt - 1]

    @property
    def wanted(self) -> TokenIds:
        """The tokens that its admission asks for."""
        return self.tokens.ids[: self.prompt] if self.is_handed_over else self.matchable

    @property
    def computed_ids(self) -> TokenIds:
        """The tokens that the request has."""
        return self.tokens.ids[: self.computed]

    @property
    def hit_tokens(self) -> int:
        """The length that was cached; 0 before the request is admitted."""
        return 0 if self.admission is None else self.admission.cached_tokens

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """The lengths at which a chunk has to end."""
        return () if self.admission is None else self.admission.checkpoints

    def begin_again(self) -> None:
        """Forget what it had; it is not admitted any more."""
        self.admission = None
        self.computed = self.reserved = 0
