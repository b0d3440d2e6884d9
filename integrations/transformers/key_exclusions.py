"""Fields of a Transformers configuration that cannot change KV and are therefore in no page key.

Page keys cover all other fields. The reasons given here apply to version `READ_IN` of Transformers. A
test fails if Transformers' base configuration has a field that is neither listed here nor known to be
in page keys.
"""

from collections.abc import Mapping
from typing import Final

from ..sharing import names_of

READ_IN: Final = "5.19"

OPERATIONAL: Final[Mapping[str, str]] = {
    "_name_or_path transformers_version _commit_hash": (
        "Where it was read from and who wrote it; what it says is in the key, and the weights are"
        " by their content or commit."
    ),
    "architectures": "What the files say; the class of the model is in the key.",
    "bos_token_id eos_token_id pad_token_id": (
        "They say what is sampled and where it ends. A mask that leaves tokens out is refused."
    ),
    "id2label label2id problem_type num_labels finetuning_task": (
        "They name what a head of classification puts out."
    ),
    "return_dict output_hidden_states use_cache": "They say what a pass returns.",
    "initializer_range": "It draws weights that come from no file; those are not in the key.",
    "attention_dropout": "A model that is training is refused.",
    "distributed_config": (
        "How ranks divide the model: its sums are the same sums, added up in another order, and"
        " other ways than by heads are refused."
    ),
    "tie_word_embeddings": (
        "Where the weights of the last layer come from, after which nothing is kept."
    ),
}

LEFT_OUT: Final = {"transformers.configuration_utils.PreTrainedConfig": names_of(OPERATIONAL)}
"""Names of the configuration fields that are in no page key, by class."""
