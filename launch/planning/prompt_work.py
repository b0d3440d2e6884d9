"""FLOPs of a prompt, and the FLOPs that a cached prefix saves.

Every token needs two FLOPs for each weight of the layers. Of a mixture of experts, only the weights of
the experts to which the token is routed count. In each layer, the token at position p attends to p + 1
tokens, or to fewer if the layer has a window or an index. Each query/key pair needs two FLOPs per
element of a key and of a value, in each head. Because later tokens attend to more tokens, a prefix of
half the tokens saves less than half of the FLOPs. Embeddings, norms and the recurrence of linear
attention are not counted.
"""

from dataclasses import dataclass

from .config_fields import ConfigFields
from .layer_kinds import LayerKinds


@dataclass(frozen=True, slots=True)
class Attended:
    """FLOPs for the query/key pairs of all layers of one kind."""

    operations: int
    """FLOPs for each query/key pair, summed over all layers of this kind."""
    span: int | None = None
    """Maximum tokens to which one token attends; None for full attention."""

    def pairs(self, tokens: int) -> int:
        """Return the number of query/key pairs in a prompt of `tokens` tokens."""
        ramp = tokens if self.span is None else min(tokens, self.span)
        return ramp * (ramp + 1) // 2 + (tokens - ramp) * ramp


@dataclass(frozen=True, slots=True)
class PromptWork:
    """FLOPs that a model needs to compute a prompt."""

    weights: int
    """Number of weights by which each token is multiplied."""
    attended: tuple[Attended, ...]

    def operations(self, tokens: int) -> int:
        """Return the FLOPs for a prompt of `tokens` tokens."""
        pairs = sum(each.operations * each.pairs(tokens) for each in self.attended)
        return 2 * self.weights * tokens + pairs


def work_of(fields: ConfigFields, kinds: LayerKinds) -> PromptWork:
    """Return a model's FLOPs per weight and per query/key pair, from its configuration."""
    latent = fields.has("kv_lora_rank")
    layers = kinds.full + kinds.window
    weights = layers * (_latent_weights(fields) if latent else _attention_weights(fields))
    weights += _mixer_weights(fields, kinds.state) + _mlp_weights(fields)
    heads = fields.number("num_attention_heads")
    if latent:
        elements = fields.number("qk_nope_head_dim", 128) + fields.number("qk_rope_head_dim")
        elements += fields.number("v_head_dim", 128)
    else:
        elements = 2 * head_dim(fields)
    pair = 2 * heads * elements
    if latent and fields.has("index_topk"):
        # The sparse-attention index scores every query/key pair; attention then computes only the
        # `index_topk` best pairs of each token.
        index = 2 * fields.number("index_n_heads", 64) * fields.number("index_head_dim")
        chosen = Attended(kinds.full * pair, fields.number("index_topk"))
        return PromptWork(weights, (Attended(kinds.full * index), chosen))
    attended = [Attended(kinds.full * pair)]
    if kinds.window:
        attended.append(Attended(kinds.window * pair, kinds.window_tokens))
    return PromptWork(weights, tuple(attended))


def head_dim(fields: ConfigFields) -> int:
    """Return the number of elements of a key or value in one head."""
    heads = fields.number("num_attention_heads")
    return fields.number("head_dim", max(1, fields.number("hidden_size") // heads))


def _attention_weights(fields: ConfigFields) -> int:
    hidden, heads = fields.number("hidden_size"), fields.number("num_attention_heads")
    kept = fields.number("num_key_value_heads", heads)
    return hidden * head_dim(fields) * (2 * heads + 2 * kept)


def _latent_weights(fields: ConfigFields) -> int:
    hidden, heads = fields.number("hidden_size"), fields.number("num_attention_heads")
    rank, rope = fields.number("kv_lora_rank"), fields.number("qk_rope_head_dim")
    nope, value = fields.number("qk_nope_head_dim", 128), fields.number("v_head_dim", 128)
    query = heads * (nope + rope)
    query_rank = fields.number("q_lora_rank", 0, least=0)
    queries = query_rank * (hidden + query) if query_rank else hidden * query
    return queries + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden


def _mixer_weights(fields: ConfigFields, layers: int) -> int:
    """Return the number of weights that a token uses in all linear-attention layers."""
    if not layers:
        return 0
    keys = fields.number("linear_num_key_heads") * fields.number("linear_key_head_dim")
    values = fields.number("linear_num_value_heads") * fields.number("linear_value_head_dim")
    # The input projection computes queries, keys, values and gates. The output projection has as many
    # weights as the projection of the values.
    return layers * fields.number("hidden_size") * (2 * keys + 3 * values)


def _mlp_weights(fields: ConfigFields) -> int:
    """Return the number of MLP weights that a token uses in all layers."""
    hidden, layers = fields.number("hidden_size"), fields.number("num_hidden_layers")
    dense = 3 * hidden * fields.number("intermediate_size", 0, least=0)
    chosen = fields.number("num_experts_per_tok", 0, least=0)
    if not chosen:
        return layers * dense
    inner = fields.number("moe_intermediate_size", fields.number("intermediate_size", 0, least=0))
    shared = fields.number("n_shared_experts", 0, least=0) * inner
    shared += fields.number("shared_expert_intermediate_size", 0, least=0)
    first = fields.number("first_k_dense_replace", 0, least=0)
    return first * dense + (layers - first) * 3 * hidden * (chosen * inner + shared)
